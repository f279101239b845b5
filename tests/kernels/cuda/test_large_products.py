"""The CUDA kernels for products of many rows, in the emulator: quantize_input, quantize_cores, matmul, matmul_hopper, rope_store,
argmax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda import small_products, tiles
from tinyvllm.backends.kernel import Kernel
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.random_rows import packable_width

VARIANT = "sm_90"


def up(n: int, to: int) -> int:
    return -(-n // to) * to


# --- quantize_input


@pytest.mark.parametrize("format", (*tiles.USUAL, "Q2_K", "MXFP8", "NF4"))
@pytest.mark.parametrize("I, count, norm, gather", [(32, 1, True, False), (1056, 11, True, True), (1248, 9, False, False)])
def test_prepared_rows_are_rounded_and_laid_out(format: str, I: int, count: int, norm: bool, gather: bool) -> None:
    T, live, I = 24, up(count, 8), packable_width(format, I)
    x, weight = tiles.numbers(T, I), tiles.numbers(I, seed=1)
    index = tiles.laid(np.random.default_rng(2).integers(0, T, T).astype(np.int32))
    index[count:] = 1 << 30
    x[3] = 0
    out = aligned((tiles.prepared_bytes(format, T, I),), np.uint8)
    ins = [x, *([weight] if norm else []), *([index] if gather else []), tiles.one(count)]
    defines = dict(I=I, WEIGHT=format, NORM=int(norm), GATHER=int(gather), EPS="1e-5f")
    emulate(Kernel.cuda("quantize_input", VARIANT, 1, len(ins), (T, 1, 1), 256, **defines), out, *ins)
    rows = x[index[:count]] if gather else x[:count]
    want = tiles.prepared(tiles.rms_normed(rows, weight, 1e-5) if norm else rows, format)
    for got, expected in zip(parts(out, format, T, I), parts(want, format, live, I), strict=True):
        assert (got[: live // 8] == expected).all()
        assert tiles.untouched(got[live // 8 :])


def parts(prepared: np.ndarray, format: str, T: int, I: int) -> list[np.ndarray]:
    """Prepared rows as [T / 8, bytes] of numbers, and of scales."""
    if not tiles.has_scales(format):
        return [prepared.reshape(T // 8, prepared.size * 8 // T if T else 16 * I)]
    scales = T * I // 4
    return [prepared[:-scales].reshape(T // 8, -1), prepared[-scales:].reshape(T // 8, -1)]


@pytest.mark.parametrize("format", tiles.FLOATS)
@pytest.mark.parametrize("I, count, parts, norm, gather", [(96, 11, 1, True, False), (1056, 17, 3, True, True), (544, 8, 2, False, True)])
def test_core_matrices_hold_the_same_numbers(format: str, I: int, count: int, parts: int, norm: bool, gather: bool) -> None:
    T, live, groups = 32, up(count, 8), 6
    x, weight, out = tiles.numbers(T, I), tiles.numbers(I, seed=1), aligned((groups * 8 * I * 2,), np.uint8)
    index = tiles.laid(np.random.default_rng(2).integers(0, T, T).astype(np.int32))
    index[1], index[count:] = -1, 1 << 30
    ins = [x, *([weight] if norm else []), *([index] if gather else []), tiles.one(count)]
    defines = dict(I=I, WEIGHT=format, NORM=int(norm), GATHER=int(gather), EPS="1e-5f", GROUPS_MULTIPLE=3)
    emulate(Kernel.cuda("quantize_cores", VARIANT, 1, len(ins), (T // 8, parts, 1), 256, **defines), out, *ins)
    rows = x[index[:count]] if gather else x[:count]
    normed = tiles.rms_normed(rows, weight, 1e-5) if norm else rows
    if gather:
        normed[1] = 0
    got = out.reshape(I // 32, groups, 512)
    assert (got[:, : live // 8].reshape(-1) == in_cores(tiles.prepared(normed, format), live // 8)).all()
    assert tiles.untouched(np.ascontiguousarray(got[:, live // 8 :]))


def in_cores(prepared: np.ndarray, groups: int) -> np.ndarray:
    """[groups, I / 32, 8 tokens, 4 t, 4 octets, 4 bytes] -> [I / 32, groups, octets, tokens, t, bytes]"""
    return np.ascontiguousarray(prepared.reshape(groups, -1, 8, 4, 4, 4).transpose(1, 0, 4, 2, 3, 5)).reshape(-1)


# --- matmul


@dataclass(frozen=True)
class Cut:
    """How a product is divided into tiles, stages and splits."""

    tile_o: int
    tile_t: int
    warps: tuple[int, int, int] = (1, 1, 1)  # WARPS_O, WARPS_T, WARPS_K
    k_blocks: int = 2
    stages: int = 3
    split: int = 1
    band: int = 2


@dataclass(frozen=True)
class HopperCut:
    """The same of matmul_hopper."""

    tile_o: int
    tile_t: int
    split: int = 1
    k_blocks: int = 2
    stages: int = 3


SMALL = Cut(16, 16, (1, 1, 2))
WIDE = Cut(64, 32, (2, 2, 1))
MANY = Cut(32, 16, (1, 1, 4), k_blocks=1, stages=4, split=2)


@dataclass(frozen=True)
class Product:
    """One call of matmul; optional arguments are omitted if off."""

    format: str
    T: int
    O: int  # noqa: E741  the dimension's letter
    I: int  # noqa: E741
    bias: bool = False
    residual: bool = False
    gelu: bool = False
    silu: bool = False
    gate: bool = False  # the residual is one
    bias_first: int = 0

    def kernel(self, cut: Cut) -> Kernel:
        o_blocks, t_blocks = -(-self.O * (1 + self.silu) // cut.tile_o), -(-self.T // cut.tile_t)
        wo, wt, wk = cut.warps
        known = FORMATS[self.format]
        k_blocks, x = max(cut.k_blocks, known.elements // 32), 8 * tiles.row_bytes_of_32(self.format)
        w = 16 * known.nbytes * 32 // known.elements
        stage = k_blocks * (cut.tile_o // 16 * w + cut.tile_t // 8 * x)
        shared = cut.stages * wk * stage + (wk - 1) * cut.tile_o * cut.tile_t * 4
        return Kernel.cuda(
            "matmul", VARIANT, 1 + 2 * (cut.split > 1), 3 + self.bias + self.residual,
            (o_blocks * t_blocks, cut.split, 1), 32 * wo * wt * wk, shared,
            O=self.O, I=self.I, WEIGHT=self.format, BIAS=int(self.bias), RESIDUAL="GATE" if self.gate else int(self.residual),
            ACTIVATION=int(self.gelu), **({"BIAS_FIRST": self.bias_first} if self.bias_first else {}), SILU=int(self.silu), SPLIT=cut.split,
            TILE_O=cut.tile_o, TILE_T=cut.tile_t, WARPS_O=wo, WARPS_T=wt, WARPS_K=wk,
            K_BLOCKS=k_blocks, STAGES=cut.stages, BAND=cut.band, RESIDENT=1,
        ).passing(self.T)  # fmt: skip

    def shares(self, cut: Cut | HopperCut, blocks: int) -> list[np.ndarray]:
        """The scratch of split products: sums, poisoned, and counters."""
        if cut.split == 1:
            return []
        pieces = -(-self.I // 512)
        slots = pieces - -(-pieces // cut.split) + 1
        return [aligned((slots * blocks * cut.tile_o * cut.tile_t,), np.float32), aligned((blocks,), np.uint32, 0)]


class Data:
    """Operands of a product, and the expected results."""

    def __init__(self, product: Product, seed: int = 0) -> None:
        self.product, rows = product, product.O * (1 + product.silu)
        self.x = tiles.numbers(product.T, product.I, seed=seed)
        self.weight = tiles.tiled(tiles.numbers(rows, product.I, seed=seed + 1), product.format)
        self.biases = tiles.numbers(product.bias_first + rows, seed=seed + 2)  # also of matrices before this one
        self.bias, self.residual = self.biases[product.bias_first :], tiles.numbers(product.T, product.O, seed=seed + 3)

    def run(self, cut: Cut, count: int, first: int = 0, seed: int = 0) -> np.ndarray:
        """The product of `count` rows of x from `first` on; later rows are poison."""
        p = self.product
        x = tiles.prepared(self.x[first : first + count], p.format)
        prepared = aligned((tiles.prepared_bytes(p.format, p.T, p.I),), np.uint8)
        for to, part in zip(parts(prepared, p.format, p.T, p.I), parts(x, p.format, up(count, 8), p.I), strict=True):
            to[: len(part)] = part
        out, shares = aligned((p.T, p.O), np.float32), p.shares(cut, p.kernel(cut).grid[0])
        added = [self.biases] if p.bias else []
        added += [tiles.laid(np.roll(self.residual, -first, 0))] if p.residual else []
        ins = [prepared, self.weight.tiles, *added, tiles.one(count)]
        emulate(p.kernel(cut), out, *shares, *ins, seed=seed)
        assert tiles.untouched(out[count:])
        assert not shares or not shares[1].any(), "counters must be zero for the next launch"
        return out[:count]

    def hopper(self, cut: HopperCut, count: int, seed: int = 0) -> np.ndarray:
        """The product of the first `count` rows by matmul_hopper."""
        p, out = self.product, aligned((self.product.T, self.product.O), np.float32)
        groups, blocks = up(p.T, cut.tile_t) // 8, -(-p.O * (1 + p.silu) // cut.tile_o) * -(-p.T // cut.tile_t)
        padded = np.full((8 * groups, p.I), np.nan, np.float32)  # what is beyond the count may be anything
        padded[:count] = self.x[:count]
        prepared = tiles.laid(in_cores(tiles.prepared(padded, p.format), groups))
        shares = p.shares(cut, blocks)
        ins = [prepared, self.weight.tiles, *([self.bias] if p.bias else []), *([self.residual] if p.residual else []), tiles.one(count)]
        shared = cut.stages * cut.k_blocks * 64 * (cut.tile_o + cut.tile_t) + (2 * cut.tile_o * cut.tile_t if p.silu else 0)
        kernel = Kernel.cuda(
            "matmul_hopper", "sm_90a", 1 + len(shares), len(ins), (blocks, cut.split, 1), 2 * cut.tile_o + 128, shared,
            O=p.O, I=p.I, WEIGHT=p.format, BIAS=int(p.bias), RESIDUAL=int(p.residual), ACTIVATION=int(p.gelu), SILU=int(p.silu),
            SPLIT=cut.split, TILE_O=cut.tile_o, TILE_T=cut.tile_t, K_BLOCKS=cut.k_blocks, STAGES=cut.stages, BAND=2, RESIDENT=1,
        ).passing(groups)  # fmt: skip
        emulate(kernel, out, *shares, *ins, seed=seed)
        assert tiles.untouched(out[count:])
        assert not shares or not shares[1].any(), "counters must be zero for the next launch"
        return out[:count]

    def expected(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The expected results, and the magnitude for the tolerance, float64."""
        p = self.product
        y, size = tiles.product(self.x[:count], self.weight)
        y, size = (y + self.bias, size + np.abs(self.bias)) if p.bias else (y, size)
        if p.silu:
            gate, up = y[:, : p.O], y[:, p.O :]
            return gate / (1 + np.exp(-gate)) * up, size[:, : p.O] * (np.abs(up) + 1) + size[:, p.O :] * (np.abs(gate) + 1)
        y = y * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) if p.gelu else y
        residual = self.residual[:count].astype(np.float64)
        if p.gate:
            gate = residual / (1 + np.exp(-residual))
            return gate * y, np.abs(gate) * size + np.abs(gate * y)
        return (y + residual, size + np.abs(residual)) if p.residual else (y, size)


SHAPES = [
    (SMALL, 16, 9, 35, 1568),  # three pieces and one block of 32 columns, for two teams
    (WIDE, 72, 65, 104, 544),  # tiles that extend beyond both sides
    (MANY, 24, 23, 40, 2080),  # split; the second split has fewer pieces than teams
]


@pytest.mark.parametrize(
    "cut, T, count, O, I, format", [(*shape, name) for name in tiles.TILED for shape in (SHAPES if name in tiles.USUAL else SHAPES[1:2])]
)
def test_many_rows_times_weights(format: str, cut: Cut, T: int, count: int, O: int, I: int) -> None:  # noqa: E741
    data = Data(Product(format, T, O, packable_width(format, I)))
    tiles.close(data.run(cut, count), *data.expected(count))


@pytest.mark.parametrize("cut", [WIDE, MANY])
@pytest.mark.parametrize("switches", [{"bias": True, "residual": True}, {"residual": True, "gelu": True}, {"bias": True, "gelu": True}])
def test_what_follows_the_sums(cut: Cut, switches: dict[str, bool]) -> None:
    data = Data(Product("BF16", 24, 35, 1056, **switches))
    tiles.close(data.run(cut, 17), *data.expected(17))


@pytest.mark.parametrize("bias_first", [None, 0, 35])  # None: no bias
@pytest.mark.parametrize("format, cut", [("BF16", WIDE), ("Q8_0", MANY), ("Q5_K", SMALL), ("Q4_K", MANY)])
def test_silu_of_a_gate_multiplies_the_product(format: str, cut: Cut, bias_first: int | None) -> None:
    more = {"bias": bias_first is not None, "bias_first": bias_first or 0}
    data = Data(Product(format, 24, 35, packable_width(format, 1056), residual=True, gate=True, **more))
    tiles.close(data.run(cut, 17), *data.expected(17))


@pytest.mark.parametrize("format", (*tiles.USUAL, "Q4_K", "Q6_K"))
@pytest.mark.parametrize("cut", [Cut(64, 16, (2, 1, 1)), Cut(32, 16, (1, 1, 2), split=2), Cut(128, 32, (2, 2, 1))])
def test_gate_and_up_are_in_one_tile(format: str, cut: Cut) -> None:
    data = Data(Product(format, 24, 48, packable_width(format, 1056), bias=True, silu=True))
    tiles.close(data.run(cut, 19), *data.expected(19))


@pytest.mark.parametrize("format", tiles.KINDS)
def test_a_row_has_the_same_bits_in_any_batch_and_any_cut(format: str) -> None:
    """All rows at once, a few of them elsewhere in the batch, other tiles, stages, teams, splits, orders of blocks, and matvec."""
    data = Data(Product(format, 136, 40, packable_width(format, 1632), bias=True, residual=True))
    whole = data.run(Cut(64, 64, (2, 2, 1)), 130)
    tiles.close(whole, *data.expected(130))
    for cut in (SMALL, WIDE, MANY, Cut(16, 8, k_blocks=4, stages=2, split=4), Cut(32, 24, (1, 1, 4), stages=2)):
        tiles.same_bits(data.run(cut, 11, first=61, seed=cut.stages), whole[61:72])
    tiles.same_bits(matvec(data, 5, first=61), whole[61:66])


def matvec(data: Data, count: int, first: int) -> np.ndarray:
    """The same rows by the kernel for few rows."""
    p, out = data.product, aligned((count, data.product.O), np.float32)
    kernel = small_products.matvec(count, p.O, p.I, p.format, bias=1, residual=1)
    x, residual = (tiles.laid(rows[first : first + count]) for rows in (data.x, data.residual))
    emulate(kernel, out, x, data.weight.tiles, data.bias, residual, tiles.one(count))
    return out


@pytest.mark.parametrize("seed", range(3))
def test_splits_arrive_in_any_order(seed: int) -> None:
    data = Data(Product("Q8_0", 16, 32, 2560))
    cut = Cut(16, 8, split=5)
    tiles.same_bits(data.run(cut, 16, seed=seed + 1), data.run(SMALL, 16))


HOPPER_CUTS = [
    HopperCut(128, 128),
    HopperCut(64, 64, split=2),
    HopperCut(128, 64, split=4, stages=2),
    pytest.param(HopperCut(128, 192, k_blocks=4, stages=2), marks=pytest.mark.long),
    pytest.param(HopperCut(64, 64, k_blocks=1, stages=8), marks=pytest.mark.long),
    pytest.param(HopperCut(64, 128, split=4, k_blocks=4, stages=2), marks=pytest.mark.long),
]


@pytest.mark.parametrize("cut", HOPPER_CUTS)
@pytest.mark.parametrize("format", tiles.FLOATS)
def test_hopper_gives_the_same_sums(format: str, cut: HopperCut) -> None:
    """In the emulator, whose products of 16 columns round as its mma does, the bits are those of matmul."""
    T = 72 if cut.tile_t < 128 else 200
    data = Data(Product(format, T, 139, 1568, bias=True, residual=True))  # three pieces and one block of 32 columns
    got = data.hopper(cut, T - 5)
    tiles.close(got, *data.expected(T - 5))
    tiles.same_bits(got[:20], data.run(WIDE, 20))


@pytest.mark.parametrize("cut", [HopperCut(128, 64), pytest.param(HopperCut(64, 64, split=2), marks=pytest.mark.long)])
def test_hopper_combines_gate_and_up(cut: HopperCut) -> None:
    data = Data(Product("BF16", 136, 80, 544, bias=True, silu=True))
    got = data.hopper(cut, 130, seed=1)
    tiles.close(got, *data.expected(130))
    tiles.same_bits(got[:17], data.run(Cut(64, 16, (2, 1, 1)), 17))


def test_hoppers_splits_arrive_in_any_order() -> None:
    data = Data(Product("BF16", 16, 64, 2560))
    for seed in range(2):
        tiles.same_bits(data.hopper(HopperCut(64, 64, split=5), 16, seed=seed + 1), data.run(SMALL, 16))


def test_no_rows_write_nothing() -> None:
    assert not len(Data(Product("BF16", 16, 16, 1024)).run(MANY, 0))


# --- rope_store


@pytest.mark.parametrize("others", [0, 1, 2])  # matrices that v, or k and v, come from
@pytest.mark.parametrize(
    "H, K, D, R, cache, bias, norm",
    [(4, 2, 64, 64, "BF16", False, False), (3, 1, 80, 32, "F16", True, True), (5, 5, 48, 0, "F32", True, False)],
)
def test_heads_are_rotated_and_stored(H: int, K: int, D: int, R: int, cache: str, bias: bool, norm: bool, others: int) -> None:
    T, count, P, S, heads = 9, 7, 5, 4, H + 2 * K
    y, added = tiles.numbers(T, heads * D), tiles.numbers(heads * D, seed=1)
    norms = [tiles.numbers(D, seed=2), tiles.numbers(D, seed=3)]
    turn = np.random.default_rng(4).uniform(0, 6, (T, R // 2))
    angles = tiles.laid(np.concatenate([np.cos(turn), np.sin(turn)], 1).astype(np.float32))
    slots = tiles.laid(np.random.default_rng(5).permutation(P * S)[:T].astype(np.int32))
    q, pool = aligned((T, H, D), np.float32), aligned((P, 2, K, S, D), np.float32 if cache == "F32" else np.uint16)
    matrices = [tiles.laid(part) for part in np.split(y, [(heads - K * n) * D for n in range(others, 0, -1)], axis=1)]
    ins = [*matrices, *([added] if bias else []), *(norms if norm else []), *([angles] if R else []), slots, tiles.one(count)]
    defines = dict(H=H, K=K, D=D, R=R, S=S, CACHE_TYPE=cache, BIAS=int(bias), QK_NORM=int(norm), QK_EPS="1e-6f")
    defines |= dict(MAIN=heads - others * K, SECOND=K) if others else {}
    emulate(Kernel.cuda("rope_store", VARIANT, 3, len(ins), (T, -(-heads // 8), 1), 256, **defines), q, pool, pool, *ins)

    made = (y + added * bias).reshape(T, heads, D)[:count].astype(np.float64)
    turned, values = made[:, : H + K], made[:, H + K :]
    if norm:
        weight = np.concatenate([np.tile(norms[0], (H, 1)), np.tile(norms[1], (K, 1))])
        turned = turned / np.sqrt((turned**2).mean(-1, keepdims=True) + 1e-6) * weight
    a, b, cosine, sine = turned[..., : R // 2], turned[..., R // 2 : R], np.cos(turn[:count, None]), np.sin(turn[:count, None])
    turned = np.concatenate([a * cosine - b * sine, b * cosine + a * sine, turned[..., R:]], -1)
    np.testing.assert_allclose(q[:count], turned[:, :H], rtol=0, atol=3e-6)
    assert tiles.untouched(q[count:])

    number = {"F32": lambda n: n, "BF16": bf16_to_f32, "F16": lambda n: n.view(np.float16).astype(np.float32)}[cache]
    blocks, offsets = slots[:count] // S, slots[:count] % S
    precision = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8}[cache]
    np.testing.assert_allclose(number(pool[blocks, 0, :, offsets]), turned[:, H:], rtol=precision, atol=3e-6)
    np.testing.assert_allclose(number(pool[blocks, 1, :, offsets]), values, rtol=precision, atol=1e-6)
    if cache == "BF16":
        assert (pool[blocks, 1, :, offsets] == f32_to_bf16(values.astype(np.float32))).all()
    others = np.delete(pool.transpose(0, 3, 1, 2, 4).reshape(P * S, -1), slots[:count], 0)
    assert tiles.untouched(others)


# --- argmax


@pytest.mark.parametrize("V, share", [(1, 1), (1003, 1), (4100, 3), (2053, 4)])
def test_the_largest_logit_the_first_of_equals(V: int, share: int) -> None:
    N, count = 9, 8
    logits = tiles.numbers(N, V)
    logits[1] = -np.inf
    logits[2, V // 2] = np.nan
    logits[3] = 0
    logits[3, : V // 3] = -0.0  # equal to 0
    logits[4, [V // 3, V // 2, V - 1]] = 50
    logits[5] = -3e38
    logits[6, V - 1] = np.inf
    logits[7, : V - 1] = -np.inf
    best, most, counters = aligned((N,), np.int32), aligned((N,), np.uint64, 0), aligned((N,), np.uint32, 0)
    kernel = Kernel.cuda("argmax", VARIANT, 3, 2, (share, N, 1), 256, V=V)
    for seed in range(2):
        best[:] = 77
        emulate(kernel, best, most, counters, logits, tiles.one(count), seed=seed)
        want = [-1 if np.isnan(row).any() or row.max() == -np.inf else int(row.argmax()) for row in logits]
        assert best.tolist() == [*want[:count], 77]
        assert not most.any() and not counters.any()
