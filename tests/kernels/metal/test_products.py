"""The Metal kernels for products, in the emulator, against float64 sums over the weights as the project's reader unpacks them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.emulator import emulate as emulator
from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.tiles import close, laid, numbers, one, same_bits, untouched
from tests.kernels.metal.samples import EVERY
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import plan as records
from tinyvllm.backends.metal.plan import Cut
from tinyvllm.backends.shapes import Heads, Product
from tinyvllm.backends.source import kernel_text
from tinyvllm.quant.codecs import bf16_to_f32
from tinyvllm.quant.formats import FLOATS, GROUPED
from tinyvllm.quant.kv import KV_FORMATS, is_rotated, pack_blocks, rotate
from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.quant.random_rows import packable_width, random_rows

VARIANT, EPS, QK_EPS = "apple7", 1e-5, 1e-6
PACKED = tuple(name for name in EVERY if name not in FLOATS)
NAMES = (*FLOATS, "Q8_0", "Q4_0", "Q4_K", "Q3_K")  # every way of sharing a row's bytes among lanes
SHAPES = [(1, 288), (2, 1056), (5, 544), (8, 96), (16, 288)]  # rows of x, columns: short last steps, less than a step
CUTS = {1: Cut(2, 3), 2: Cut(8, 2), 5: Cut(1, 4, staged=True), 8: Cut(4, 4, 2, True), 16: Cut(2, 4, 2)}


def poison(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return aligned(shape, dtype)


@dataclass(frozen=True)
class Weight:
    """`rows` uint8 [O, bytes] as in a file, `values` float64 [O, I]. Of `joined` ones only the values count."""

    format: str
    rows: np.ndarray
    values: np.ndarray


def weight_of(O: int, I: int, format: str, seed: int = 0) -> Weight:
    rows = random_rows(format, O, I, seed=seed)
    return Weight(format, laid(rows), unpack_rows(format, rows).astype(np.float64))


def equal(out: np.ndarray, weight: Weight, first: int) -> None:
    """Columns from `first` on are the weights', exactly; where a float32 scale times a number is rounded, to the last bit."""
    error = np.abs(out - weight.values[:, first : first + 16].T)
    assert error.max() <= (2**-22 if weight.format in (*GROUPED, "NVFP4_G128") else 0)


def product(x: np.ndarray, weight: Weight) -> tuple[np.ndarray, np.ndarray]:
    """x times weight transposed, and the sums of the absolute products."""
    return x @ weight.values.T, np.abs(x) @ np.abs(weight.values).T + 1e-20


def normed(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    return x * norm / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)


def joined(*weights: Weight) -> Weight:
    return replace(weights[0], values=np.concatenate([w.values for w in weights]))


def gelu(y: np.ndarray) -> np.ndarray:
    return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


# --- matvec


def matvec(kernel: Kernel, x: np.ndarray, weight: Weight, *more: np.ndarray, rows: int | None = None, seed: int = 0) -> np.ndarray:
    out = poison(len(x), len(weight.rows))
    emulate(kernel, out, x, weight.rows, *more, one(len(x) if rows is None else rows), seed=seed)
    return out


ONE_SHAPE = [(*SHAPES[i % 5], format) for i, format in enumerate(EVERY) if format not in NAMES]


@pytest.mark.parametrize("T, I, format", [(*shape, format) for shape in SHAPES for format in NAMES] + ONE_SHAPE)
def test_matvec(T: int, I: int, format: str) -> None:
    O, I = 21, packable_width(format, I)
    weight, x = weight_of(O, I, format), numbers(T, I)
    close(matvec(records.matvec(VARIANT, Product(format, T, O, I), cut=CUTS[T]), x, weight, seed=T), *product(x, weight))


@pytest.mark.parametrize("bias, residual, gelu_too", [(1, 0, 0), (0, 1, 0), (1, 1, 1)])
def test_matvec_ends_with_bias_gelu_and_residual(bias: int, residual: int, gelu_too: int) -> None:
    T, O, I = 3, 21, 96
    weight, x, b, r = weight_of(O, I, "BF16"), numbers(T, I), numbers(O, seed=1), numbers(T, O, seed=2)
    kernel = records.matvec(VARIANT, Product("BF16", T, O, I, bool(bias), bool(residual), bool(gelu_too)))
    got = matvec(kernel, x, weight, *[b][:bias], *[r][:residual])
    y, size = product(x, weight)
    y = y + b * bias
    close(got, (gelu(y) if gelu_too else y) + r * residual, size + 2)


@pytest.mark.parametrize("format", EVERY)
def test_a_row_has_the_same_bits_in_any_batch(format: str) -> None:
    """Alone and among sixteen, at another row, with x staged or not, with the work divided in other ways."""
    O, I = 19, packable_width(format, 1312)
    weight, x = weight_of(O, I, format), numbers(16, I)
    want = matvec(records.matvec(VARIANT, Product(format, 16, O, I)), x, weight)
    cuts = [(5, 1, Cut(4, 2)), (3, 4, Cut(2, 2, staged=True)), (15, 1, Cut(1, 1)), (2, 2, Cut(8, 2)), (7, 9, Cut(2, 4, 2))]
    for first, T, cut in cuts if format in NAMES else cuts[:2]:
        same_bits(
            matvec(records.matvec(VARIANT, Product(format, T, O, I), cut=cut), laid(x[first : first + T]), weight, seed=T),
            want[first : first + T],
        )


@pytest.mark.parametrize("T", [1, 4, 16])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_after_the_last_are_not_written(rows: int, T: int) -> None:
    weight, x, rows = weight_of(10, 64, "Q8_0"), numbers(T, 64), min(rows, T)
    x[rows:] = np.nan
    out = matvec(records.matvec(VARIANT, Product("Q8_0", T, 10, 64)), x, weight, rows=rows)
    assert np.isfinite(out[:rows]).all() and untouched(out[rows:])


@pytest.mark.parametrize("format", ("BF16", "Q4_0"))
def test_nan_and_infinity_stay_in_their_rows(format: str) -> None:
    weight, x = weight_of(8, 64, format), numbers(4, 64)
    x[1, 33], x[2, 5] = np.nan, np.inf
    out = matvec(records.matvec(VARIANT, Product(format, 4, 8, 64)), x, weight)
    assert np.isnan(out[1]).all() and not np.isfinite(out[2]).any() and np.isfinite(out[[0, 3]]).all()


@pytest.mark.parametrize("format", PACKED)
def test_every_weight_is_exact(format: str) -> None:
    """Rows of x with a single 1 give the weights themselves: every column of every format is multiplied by its x."""
    I = packable_width(format, 544)
    weight = weight_of(3, I, format)
    for first in range(0, I, 16):
        x = laid(np.eye(16, I, first, dtype=np.float32))
        out = matvec(records.matvec(VARIANT, Product(format, 16, 3, I), cut=Cut(2, 2, staged=True)), x, weight)
        equal(out, weight, first)


# --- norm_gate_up_silu


def gate_up(
    kernel: Kernel, x: np.ndarray, norm: np.ndarray, weights: list[Weight], *bias: np.ndarray, rows: int | None = None
) -> np.ndarray:
    out = poison(len(x), len(weights[0].rows))
    emulate(kernel, out, x, norm, *(w.rows for w in weights), *bias, one(len(x) if rows is None else rows), seed=len(x))
    return out


def gated(y: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    (gate, up), (of_gate, of_up) = np.split(y, 2, axis=1), np.split(size, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up, of_gate * np.abs(up) + np.abs(gate) * of_up + np.abs(gate * up)


@pytest.mark.parametrize("T, E, format", [(*shape, format) for shape, format in zip(SHAPES * 4, EVERY, strict=False)])
def test_norm_gate_up_silu(T: int, E: int, format: str) -> None:
    F, E, bias, rows = 13, packable_width(format, E), T % 2, T - (T > 2)
    weights, x, norm, b = [weight_of(F, E, format, seed) for seed in (0, 1)], numbers(T, E), numbers(E, seed=1), numbers(2, F, seed=2)
    cut = replace(CUTS[T], rows=max(2, CUTS[T].rows))
    kernel = records.norm_gate_up_silu(VARIANT, format, T, E, F, f"{EPS}f", bool(bias), cut)
    got = gate_up(kernel, x, norm, weights, *[laid(b[0]), laid(b[1])][: 2 * bias], rows=rows)
    y, size = product(normed(x, norm), joined(*weights))
    want, size = gated(y + b.reshape(-1) * bias, size)
    close(got[:rows], want[:rows], size[:rows])
    assert untouched(got[rows:])


@pytest.mark.parametrize("format", ["BF16", "Q4_0"])
def test_a_gated_row_has_the_same_bits_in_any_batch(format: str) -> None:
    F, E = 9, 1056
    weights, x, norm = [weight_of(F, E, format, seed) for seed in (0, 1)], numbers(16, E), numbers(E, seed=1)

    def run(T: int, first: int, cut: Cut | None = None) -> np.ndarray:
        kernel = records.norm_gate_up_silu(VARIANT, format, T, E, F, f"{EPS}f", cut=cut)
        return gate_up(kernel, laid(x[first : first + T]), norm, weights)

    want = run(16, 0)
    for T, first, cut in ((1, 6, None), (2, 9, None), (3, 3, None), (8, 8, Cut(8, 2)), (5, 1, Cut(2, 4, 2, True))):
        same_bits(run(T, first, cut), want[first : first + T])


@pytest.mark.parametrize("T", [1, 5])
def test_gate_and_up_in_two_launches_have_the_bits_of_one(T: int) -> None:
    """For matrices in two formats, which one launch cannot read."""
    F, E, format = 13, 1056, "Q4_0"
    weights, x, norm, b = [weight_of(F, E, format, seed) for seed in (0, 1)], numbers(T, E), numbers(E, seed=1), numbers(2, F, seed=2)
    shape, biases = (VARIANT, format, T, E, F, f"{EPS}f", True), (laid(b[0]), laid(b[1]))
    want, out = gate_up(records.norm_gate_up_silu(*shape), x, norm, weights, *biases), poison(T, F)
    for half, weight, bias in zip(("GATE", "UP"), weights, biases, strict=True):
        emulate(records.norm_gate_up_silu(*shape, half=half), out, x, norm, weight.rows, bias, one(T), seed=T)
    same_bits(out, want)


# --- norm_qkv_rope_store, rope_store

H, K, S, P = 3, 2, 8, 4  # heads of q and of k, slots a block, blocks
NUMBER = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class Case:
    """Arguments of one call, and its expected results."""

    def __init__(self, T: int, E: int, D: int, R: int, format: str, bias: int, qk_norm: int) -> None:
        """`format`: of all heads, or those of q, k and v with + between them."""
        formats = format.split("+") if "+" in format else [format] * 3
        self.T, self.D, self.R, self.bias, self.qk_norm, self.format = T, D, R, bias, qk_norm, formats[0]
        self.x, self.norm = numbers(T, E), numbers(E, seed=1)
        self.weights = [weight_of(heads * D, E, name, seed) for seed, (heads, name) in enumerate(zip((H, K, K), formats, strict=True))]
        self.main = next((i for i, name in enumerate(formats) if name != formats[0]), 3)
        self.apart = tuple(len(w.rows) for w in self.weights[self.main :])
        self.biases, self.norms, self.angles = numbers((H + 2 * K) * D, seed=2), numbers(2, D, seed=3), numbers(T, R, seed=4)
        self.slots = laid(np.random.default_rng(5).permutation(P * S)[:T].astype(np.int32))

    def heads(self, cache: str) -> Heads:
        return Heads(H, K, self.D, S, self.R, cache, bool(self.bias), bool(self.qk_norm), f"{QK_EPS}f")

    def _last_inputs(self, some: slice, rows: int) -> list[np.ndarray]:
        parts = np.split(self.biases, [H * self.D, (H + K) * self.D])
        ins = [laid(part) for part in parts][: 3 * self.bias] + [laid(self.norms[0]), laid(self.norms[1])][: 2 * self.qk_norm]
        return ins + [laid(self.angles[some])][: self.R] + [laid(self.slots[some]), one(rows)]

    def pool(self, cache: str) -> np.ndarray:
        """Poison [P, 2, K, S, D] to store in; packed [P, bytes]: what `packed` expects in the slots without a row."""
        if cache in KV_FORMATS:
            return laid(pack_blocks(cache, numbers(P, 2, K, S, self.D, seed=9)))
        return poison(P, 2, K, S, self.D, dtype=NUMBER[cache])

    def packed(self, cache: str, pool: np.ndarray, rows: int) -> np.ndarray:
        """The packed blocks with the rows that a launch has stored in `pool`, of float32."""
        held = numbers(P, 2, K, S, self.D, seed=9)
        for slot in self.slots[:rows]:
            held[slot // S, :, :, slot % S] = pool[slot // S, :, :, slot % S]
        return pack_blocks(cache, held)

    def run(self, T: int, cache: str, first: int = 0, rows: int | None = None, cut: Cut | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows `first` to first + T - 1 -> q [T, H, D], pool [P, 2, K, S, D] as stored."""
        some = slice(first, first + T)
        q, pool = poison(T, H, self.D), self.pool(cache)
        valid = T if rows is None else rows
        kernel = records.norm_qkv_rope_store(VARIANT, self.format, T, self.x.shape[1], self.heads(cache), f"{EPS}f", cut, self.apart)
        weights = [w.rows for w in self.weights[: self.main]]
        ins = [laid(self.x[some]), self.norm, *weights, *self._products(some, valid), *self._last_inputs(some, valid)]
        emulate(kernel, q, pool, pool, *ins, seed=T)
        return q, pool

    def _products(self, some: slice, rows: int) -> list[np.ndarray]:
        """Of the heads whose weights have another format than q's: launches of their own."""
        found, x = [], laid(self.x[some])
        for weight in self.weights[self.main :]:
            out = poison(len(x), len(weight.rows))
            kernel = records.norm_head(VARIANT, weight.format, len(x), len(weight.rows), x.shape[1], f"{EPS}f", gather=False)
            emulate(kernel, out, x, self.norm, weight.rows, one(rows), seed=rows)
            found.append(out)
        return found

    def rope_store(self, y: np.ndarray, cache: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
        q, pool = poison(self.T, H, self.D), self.pool(cache)
        parts = np.split(y, np.cumsum([w.rows.shape[0] for w in self.weights])[self.main - 1 : -1], axis=1)
        kernel = records.rope_store(VARIANT, self.T, self.heads(cache), self.apart)
        emulate(kernel, q, pool, pool, *map(laid, parts), *self._last_inputs(slice(None), rows), seed=rows)
        return q, pool

    def product(self) -> tuple[np.ndarray, np.ndarray]:
        return product(normed(self.x, self.norm), joined(*self.weights))

    def expected(self, y: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64 [T, H + 2 K, D] from the products, and the sizes of their sums."""
        heads, size = ((v.reshape(self.T, H + 2 * K, self.D)) for v in (y + self.biases * self.bias, size + 1))
        for index in range(H + K):
            head, s = heads[:, index], size[:, index]
            if self.qk_norm:
                inverse = 1 / np.sqrt((head**2).mean(-1, keepdims=True) + QK_EPS)
                weight = self.norms[int(index >= H)]
                head[:], s[:] = head * inverse * weight, s * inverse * np.abs(weight)
            half = self.R // 2
            cosine, sine, a, b = self.angles[:, :half], self.angles[:, half:], head[:, :half].copy(), head[:, half : self.R].copy()
            head[:, :half], head[:, half : self.R] = a * cosine - b * sine, b * cosine + a * sine
            s[:, : self.R] = np.tile(np.abs(cosine) + np.abs(sine), 2) * s.max(-1, keepdims=True)
        return heads, size

    def check(self, q: np.ndarray, pool: np.ndarray, cache: str, rows: int, y: np.ndarray, size: np.ndarray) -> None:
        want, size = self.expected(y, size)
        close(q[:rows], want[:rows, :H], size[:rows, :H])
        assert untouched(q[rows:])
        at = self.slots[:rows]
        stored = by_slot(pool)
        values = bf16_to_f32(stored[at]) if cache == "BF16" else stored[at].astype(np.float32)
        rounding = {"F32": 0, "F16": 2**-11, "BF16": 2**-8}[cache] * np.abs(want[:rows, H:])
        close(values, want[:rows, H:], size[:rows, H:] + rounding / 2e-6)
        assert untouched(np.delete(stored, at, axis=0))


def by_slot(pool: np.ndarray) -> np.ndarray:
    return pool.transpose(0, 3, 1, 2, 4).reshape(P * S, 2 * K, -1)


HEADS = [  # D, R, bias, qk_norm, cache
    (32, 32, 1, 0, "BF16"), (16, 16, 0, 0, "F16"), (16, 0, 1, 0, "F32"),
    (32, 32, 0, 1, "F32"), (48, 16, 1, 1, "BF16"),
]  # fmt: skip


FEW = [(1, 96, "BF16"), (4, 544, "Q8_0"), (16, 64, "Q4_0"), (2, 256, "Q4_K"), (3, 512, "Q2_K")]  # T, E, format


@pytest.mark.parametrize("heads, few", [(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (3, 0), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3), (4, 4)])
def test_norm_qkv_rope_store(heads: int, few: int) -> None:
    (D, R, bias, qk_norm, cache), (T, E, format) = HEADS[heads], FEW[few]
    case, rows = Case(T, E, D, R, format, bias, qk_norm), T - (T > 2)
    q, pool = case.run(T, cache, rows=rows)
    case.check(q, pool, cache, rows, *case.product())


@pytest.mark.parametrize("heads", [0, 2, 3, 4])
@pytest.mark.parametrize("format", ["Q4_K+Q4_K+Q6_K", "Q8_0+Q5_0+Q4_0", "BF16+Q4_1+Q4_1"])
def test_norm_qkv_rope_store_of_several_formats(heads: int, format: str) -> None:
    """v, or k and v, come as products of their own."""
    (D, R, bias, qk_norm, cache), T, rows = HEADS[heads], 4, 3
    case = Case(T, 256, D, R, format, bias, qk_norm)
    q, pool = case.run(T, cache, rows=rows)
    case.check(q, pool, cache, rows, *case.product())


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_come_as_products_have_the_bits_of_others(heads: int) -> None:
    D, R, bias, qk_norm, cache = HEADS[heads]
    case = Case(5, 544, D, R, "Q4_0", bias, qk_norm)
    want = case.run(5, cache)
    for main in (2, 1):
        case.main, case.apart = main, tuple(len(w.rows) for w in case.weights[main:])
        for got, expected in zip(case.run(5, cache), want, strict=True):
            same_bits(got, expected)


@pytest.mark.parametrize("qk_norm", [0, 1])
def test_a_row_of_heads_has_the_same_bits_in_any_batch(qk_norm: int) -> None:
    case = Case(16, 544, 16, 16, "BF16", 1, qk_norm)
    want_q, want_pool = case.run(16, "F32")
    for T, first, cut in ((1, 3, None), (2, 6, Cut(2, 2)), (5, 11, Cut(2, 4, staged=True))):
        q, pool = case.run(T, "F32", first, cut=cut)
        at = case.slots[first : first + T]
        same_bits(q, want_q[first : first + T])
        same_bits(by_slot(pool)[at], by_slot(want_pool)[at])


@pytest.mark.parametrize("D, R, bias, qk_norm, cache", HEADS)
@pytest.mark.parametrize("format", ["F32", "F32+F32+BF16", "F32+BF16+BF16"])
def test_rope_store(D: int, R: int, bias: int, qk_norm: int, cache: str, format: str) -> None:
    case = Case(5, 32, D, R, format, bias, qk_norm)
    y = numbers(5, (H + 2 * K) * D)
    q, pool = case.rope_store(y, cache, 4)
    case.check(q, pool, cache, 4, y.astype(np.float64), np.abs(y))


@pytest.mark.parametrize("cache, D, R, qk_norm", [("KV_INT8", 32, 32, 0), ("KV_INT4", 48, 16, 1), ("KV_FP8", 48, 0, 0)])
def test_packed_caches_store_the_bytes_of_the_definition(cache: str, D: int, R: int, qk_norm: int) -> None:
    """Of the very keys and values that go to a cache of float32; with rotated keys queries are rotated, too."""
    case, rows = Case(5, 96, D, R, "BF16", 1, qk_norm), 4
    y = numbers(5, (H + 2 * K) * D)
    for launch in (lambda format: case.run(5, format, rows=rows), lambda format: case.rope_store(y, format, rows)):
        (q, pool), (packed_q, packed) = launch("F32"), launch(cache)
        np.testing.assert_array_equal(packed, case.packed(cache, pool, rows))
        same_bits(packed_q[:rows], rotate(q[:rows]) if is_rotated(cache, keys=True) else q[:rows])
        assert untouched(packed_q[rows:])


# --- norm_head, argmax


@pytest.mark.parametrize("format", ("BF16", "Q4_0", "Q6_K"))
@pytest.mark.parametrize("N, E, V", [(1, 64, 37), (3, 544, 50), (16, 96, 19)])
def test_norm_head(N: int, E: int, V: int, format: str) -> None:
    E = packable_width(format, E)
    weight, x, norm = weight_of(V, E, format), numbers(N + 4, E), numbers(E, seed=1)
    index, count = np.random.default_rng(0).permutation(N + 4)[:N].astype(np.int32), N - (N > 2)
    index[count:] = 1 << 30  # of a row that is not valid
    logits = poison(N, V)
    emulate(records.norm_head(VARIANT, format, N, V, E, f"{EPS}f"), logits, x, norm, weight.rows, laid(index), one(count), seed=N)
    close(logits[:count], *product(normed(x[index[:count]], norm), weight))
    assert untouched(logits[count:])


def run_argmax(logits: np.ndarray, count: int, parts: int) -> np.ndarray:
    N, V = logits.shape
    first, last, _ = records.argmax(VARIANT, N, V)
    first, last = (
        replace(k, grid=grid, defines=tuple({**dict(k.defines), "PARTS": parts}.items()))
        for k, grid in ((first, (parts, N, 1)), (last, (N, 1, 1)))
    )
    ranks, indices, out = poison(N, parts, dtype=np.uint32), poison(N, parts, dtype=np.int32), poison(N, dtype=np.int32)
    emulate(first, ranks, indices, logits, one(count), seed=parts)
    emulate(last, out, ranks, indices, one(count), seed=parts)
    return out


@pytest.mark.parametrize("parts, V", [(1, 70), (3, 1001), (5, 1300), (32, 257)])
def test_argmax(parts: int, V: int) -> None:
    logits = numbers(7, V)
    logits[1, [V // 2, V - 1]] = 9.0  # the lowest of equals
    logits[2] = -np.inf  # there is none
    logits[3, V // 3] = -np.nan
    logits[4], logits[4, 5:8] = -1.0, (-0.0, 0.0, -0.0)
    logits[5], logits[5, V - 2] = -np.inf, -3e38
    got = run_argmax(logits, 6, parts)
    assert got[:6].tolist() == [logits[0].argmax(), V // 2, -1, -1, 5, V - 2] and untouched(got[6:])


def test_parts_of_a_vocabulary_cover_it() -> None:
    assert [records.argmax(VARIANT, 1, V)[2] for V in (10, 4096, 4097, 128256, 1 << 18)] == [1, 1, 2, 32, 32]


# --- matmul


def matmul(kernel: Kernel, O: int, x: np.ndarray, *ins: np.ndarray, rows: int, T: int | None = None, seed: int = 0) -> np.ndarray:
    out = poison(T or len(x), O)
    emulate(kernel, out, x, *ins, one(rows), seed=seed)
    return out


@pytest.mark.parametrize(
    "T, O, I, tile, format", [(35, 70, 96, 32, format) for format in EVERY] + [(17, 37, 288, 64, format) for format in NAMES]
)
def test_matmul(T: int, O: int, I: int, tile: int, format: str) -> None:
    I = packable_width(format, I)
    weight, x, rows = weight_of(O, I, format), numbers(T, I), T - 2
    x[rows:] = np.nan
    got = matmul(records.matmul(VARIANT, Product(format, T, O, I), tile=tile), O, x, weight.rows, rows=rows, seed=T)
    want, size = product(x[:rows], weight)
    close(got[:rows], want, size)
    assert untouched(got[rows:])


@pytest.mark.parametrize("tile", [32, 64])
def test_matmul_ends_with_norm_bias_gelu_and_residual(tile: int) -> None:
    T, O, I = 40, 66, 64
    weight, x, norm, b, r = weight_of(O, I, "F16"), numbers(T, I), numbers(I, seed=3), numbers(O, seed=1), numbers(T, O, seed=2)
    kernel = records.matmul(VARIANT, Product("F16", T, O, I, True, True, True, eps=f"{EPS}f"), tile=tile)
    y, size = product(normed(x, norm), weight)
    close(matmul(kernel, O, x, norm, weight.rows, b, r, rows=T), gelu(y + b) + r, size + 2)


@pytest.mark.parametrize("bias", [0, 1])
def test_matmul_of_gate_and_up(bias: int) -> None:
    T, F, E = 33, 45, 96
    weights, x, norm, b = [weight_of(F, E, "Q8_0", seed) for seed in (0, 1)], numbers(T, E), numbers(E, seed=1), numbers(2, F, seed=2)
    kernel = records.matmul(VARIANT, Product("Q8_0", T, F, E, bool(bias), silu=True, eps=f"{EPS}f"))
    got = matmul(kernel, F, x, norm, *(w.rows for w in weights), *[laid(b[0]), laid(b[1])][: 2 * bias], rows=T)
    y, size = product(normed(x, norm), joined(*weights))
    close(got, *gated(y + b.reshape(-1) * bias, size))


def test_matmul_multiplies_a_gate_that_is_in_out() -> None:
    T, F, E = 33, 45, 256
    gate, up, x, norm, b = weight_of(F, E, "Q4_K"), weight_of(F, E, "Q6_K", 1), numbers(T, E), numbers(E, seed=1), numbers(2, F, seed=2)
    out = poison(T, F)
    for weight, bias, is_up in ((gate, b[0], False), (up, b[1], True)):
        kernel = records.matmul(VARIANT, Product(weight.format, T, F, E, bias=True, gated=is_up, eps=f"{EPS}f"))
        emulate(kernel, out, x, norm, weight.rows, laid(bias), one(T))
    y, size = product(normed(x, norm), joined(gate, up))
    close(out, *gated(y + b.reshape(-1), size))


def test_matmul_of_three_matrices_and_of_gathered_rows() -> None:
    """As before rope_store, and as for the head."""
    case, T = Case(19, 96, 16, 16, "BF16", 0, 0), 19
    O, I = (H + 2 * K) * 16, 96
    kernel = records.matmul(VARIANT, Product("BF16", T, O, I, eps=f"{EPS}f", borders=(H * 16, (H + K) * 16)))
    close(matmul(kernel, O, case.x, case.norm, *(w.rows for w in case.weights), rows=T), *case.product())
    index = np.random.default_rng(0).integers(0, T, 21).astype(np.int32)
    index[20] = 1 << 30  # after the last valid row
    weight = weight_of(30, I, "Q4_0")
    kernel = records.matmul(VARIANT, Product("Q4_0", 21, 30, I, eps=f"{EPS}f", gather=True))
    got = matmul(kernel, 30, case.x, case.norm, laid(index), weight.rows, rows=20, T=21)
    close(got[:20], *product(normed(case.x[index[:20]], case.norm), weight))
    assert untouched(got[20:])


def test_a_row_of_matmul_does_not_depend_on_the_others() -> None:
    T, O, I = 70, 20, 160
    weight, x = weight_of(O, I, "BF16"), numbers(T, I)
    want = matmul(records.matmul(VARIANT, Product("BF16", T, O, I)), O, x, weight.rows, rows=T)
    same_bits(matmul(records.matmul(VARIANT, Product("BF16", 20, O, I)), O, laid(x[50:]), weight.rows, rows=20), want[50:])


# --- matmul16

MATRIX_ROW = records.MATRIX


def loosely(size: np.ndarray, format: str) -> np.ndarray:
    """Sizes for `close`: operands of quantized formats are raised by 1024, which the sums subtract again (operands.h)."""
    return size * (32 if format in ("Q8_0", "Q4_0", "Q4_K") else 1)


def sixteen(kernel: Kernel, O: int, x: np.ndarray, *ins: np.ndarray, rows: int, seed: int = 0) -> np.ndarray:
    out = poison(len(x), O)
    emulate(kernel, out, x, *ins, one(rows), seed=seed)
    return out


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("T, O, I, count, shares", [(16, 70, 288, 2, 4), (9, 33, 544, 4, 2), (12, 150, 96, 1, 1)])
def test_matmul16(T: int, O: int, I: int, count: int, shares: int, format: str) -> None:
    I, rows = packable_width(format, I), T - (T > 12)
    weight, x = weight_of(O, I, format), numbers(T, I)
    x[rows:] = np.nan
    kernel = records.matmul16(MATRIX_ROW, Product(format, T, O, I), fragments=records.Fragments(count), shares=shares)
    got = sixteen(kernel, O, x, weight.rows, rows=rows, seed=T)
    want, size = product(x[:rows], weight)
    close(got[:rows], want, loosely(size, format))
    assert untouched(got[rows:])


@pytest.mark.parametrize("format", EVERY)
def test_every_weight_of_an_operand_is_exact(format: str) -> None:
    """Rows of x with a single 1 give the weights themselves: columns of operands and of x have the same order."""
    I = packable_width(format, 288)
    weight = weight_of(11, I, format)
    kernel = records.matmul16(MATRIX_ROW, Product(format, 16, 11, I))
    for first in range(0, I, 16):
        out = sixteen(kernel, 11, laid(np.eye(16, I, first, dtype=np.float32)), weight.rows, rows=16)
        equal(out, weight, first)


@pytest.mark.parametrize("count", [2, 4])
def test_matmul16_ends_with_norm_bias_gelu_and_residual(count: int) -> None:
    T, O, I, format = 13, 66, 576, "Q4_0"
    weight, x, norm, b, r = weight_of(O, I, format), numbers(T, I), numbers(I, seed=3), numbers(O, seed=1), numbers(T, O, seed=2)
    kernel = records.matmul16(
        MATRIX_ROW, Product(format, T, O, I, bias=True, residual=True, gelu=True, eps=f"{EPS}f"), fragments=records.Fragments(count)
    )
    y, size = product(normed(x, norm), weight)
    close(sixteen(kernel, O, x, norm, weight.rows, b, r, rows=T), gelu(y + b) + r, loosely(size + 2, format))


@pytest.mark.parametrize("format, bias", [("Q8_0", 1), ("Q4_K", 0), ("BF16", 1)])
def test_matmul16_of_gate_and_up(format: str, bias: int) -> None:
    T, F, E = 10, 45, packable_width(format, 352)
    weights, x, norm, b = [weight_of(F, E, format, seed) for seed in (0, 1)], numbers(T, E), numbers(E, seed=1), numbers(2, F, seed=2)
    kernel = records.matmul16(MATRIX_ROW, Product(format, T, F, E, bool(bias), silu=True, eps=f"{EPS}f"))
    got = sixteen(kernel, F, x, norm, *(w.rows for w in weights), *[laid(b[0]), laid(b[1])][: 2 * bias], rows=T)
    y, size = product(normed(x, norm), joined(*weights))
    want, size = gated(y + b.reshape(-1) * bias, size)
    close(got, want, loosely(size, format))


def test_matmul16_of_three_matrices_and_of_gathered_rows() -> None:
    case = Case(11, 96, 16, 16, "Q4_0", 0, 0)
    O, I = (H + 2 * K) * 16, 96
    kernel = records.matmul16(MATRIX_ROW, Product("Q4_0", 11, O, I, eps=f"{EPS}f", borders=(H * 16, (H + K) * 16)))
    want, size = case.product()
    close(sixteen(kernel, O, case.x, case.norm, *(w.rows for w in case.weights), rows=11), want, loosely(size, "Q4_0"))
    index = np.random.default_rng(0).integers(0, 11, 16).astype(np.int32)
    index[15] = 1 << 30  # after the last valid row
    weight, got = weight_of(30, I, "Q8_0"), poison(16, 30)
    kernel = records.matmul16(MATRIX_ROW, Product("Q8_0", 16, 30, I, eps=f"{EPS}f", gather=True))
    emulate(kernel, got, case.x, case.norm, laid(index), weight.rows, one(15))
    want, size = product(normed(case.x[index[:15]], case.norm), weight)
    close(got[:15], want, loosely(size, "Q8_0"))
    assert untouched(got[15:])


@pytest.mark.parametrize("format", ["BF16", "Q4_0", "Q4_K"])
def test_a_row_of_matmul16_does_not_depend_on_the_others(format: str) -> None:
    O, I = 40, packable_width(format, 544)
    weight, x, norm = weight_of(O, I, format), numbers(16, I), numbers(I, seed=1)

    def run(x: np.ndarray, count: int) -> np.ndarray:
        kernel = records.matmul16(MATRIX_ROW, Product(format, len(x), O, I, eps=f"{EPS}f"), fragments=records.Fragments(count))
        return sixteen(kernel, O, laid(x), norm, weight.rows, rows=len(x), seed=count)

    want = run(x, 4)
    same_bits(run(x[6:], 4), want[6:])
    same_bits(run(x, 2), want)
    x[3], x[5, 40] = np.nan, np.inf
    same_bits(np.delete(run(x, 4), (3, 5), axis=0), np.delete(want, (3, 5), axis=0))


PLANTED = [  # a text of matmul16, its replacement, and the expected message
    ("threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (first + own < I)", "if (first + own < I)", "race"),
    ("    threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (first + COLUMNS", "    if (first + COLUMNS", "race|never written"),
    ("(second_half) ? -72.0f", "(second_half) ? -71.0f", "off by"),
    ("slice.word >> 8", "slice.word >> 4", "off by"),
    ("token >= count || o >= O", "o >= O", "not untouched"),
]


@pytest.mark.parametrize("found, planted, said", PLANTED)
def test_a_planted_fault_is_detected(found: str, planted: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    T, O, I = 16, 40, 544

    def text(kernel: Kernel, instead: object = None) -> str:
        whole = kernel_text(kernel)
        assert whole.count(found) == 1
        return whole.replace(found, planted)

    monkeypatch.setattr(emulator, "kernel_text", text)
    weight, x = weight_of(O, I, "Q4_0"), numbers(T, I)
    with pytest.raises(AssertionError, match=said):
        got = sixteen(records.matmul16(MATRIX_ROW, Product("Q4_0", T, O, I)), O, x, weight.rows, rows=T - 1)
        want, size = product(x[: T - 1], weight)
        close(got[: T - 1], want, loosely(size, "Q4_0"))
        assert untouched(got[T - 1 :]), "not untouched"


PLANTED_FORMATS = [  # a format, a text of its header, its replacement, and the expected message
    ("Q4_1", "plane, (float)raw.line.x", "plane, (float)raw.line.y", "off by"),
    ("Q5_0", "raw.high = word_at_2(block + 2) >> first", "raw.high = word_at_2(block + 2)", "off by"),
    ("Q5_1", "raw.high = head.y >> first", "raw.high = head.y", "off by"),
    ("Q2_K", "words_at_4(block + at / 4 * 8)", "words_at_4(block)", "off by"),
    ("Q3_K", "at % 4 / 2 * 8 + part * 4", "at % 4 / 2 * 8", "off by"),
    ("Q5_K", ">> (uint)(at / 4 * 2)", ">> (uint)(at / 4)", "off by"),
    ("Q6_K", "scales[4]", "scales[2]", "off by"),
    ("Q6_K", "words_at_2(block + at * 8)", "words_at_4(block + at * 8)", "misaligned"),
    ("IQ4_NL", "1.43298969f", "0.93298969f", "off by"),
    ("IQ4_XS", "(int)scale - 32", "(int)scale - 31", "off by"),
    ("MXFP4", "(e - 1) << 23", "(e + 1) << 23", "off by"),
    ("MXFP4", "words_at_1(block + 1", "words_at_2(block + 1", "misaligned"),
    ("FP8_G128", "(bits & 0x007F007Fu) << 7", "(bits & 0x007F007Fu) << 6", "off by"),
    ("MXFP8", "e << 23", "(e + 1) << 23", "off by"),
    ("NVFP4_G128", "block + 4 + at / 2 * 2", "block + 4 + at / 4 * 2", "off by"),
    ("NF4", "(uint)(16 * four)", "(uint)(8 * four)", "off by"),
    ("BNB_FP4", "raw.words[plane]", "raw.words[0]", "off by"),
    ("INT3_G32", "plane * (RUN / 4) + four", "plane + four", "off by"),
    ("INT6_G64", "raw.high[four] >> plane * 4", "raw.high[four] >> plane * 2", "off by"),
]


@pytest.mark.parametrize("format, found, planted, said", PLANTED_FORMATS)
def test_a_fault_planted_in_a_format_is_detected(format: str, found: str, planted: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(kernel: Kernel, instead: object = None) -> str:
        whole = kernel_text(kernel)
        assert whole.count(found) == 1
        return whole.replace(found, planted)

    monkeypatch.setattr(emulator, "kernel_text", text)
    I = packable_width(format, 288)
    weight, x = weight_of(5, I, format), numbers(1, I)
    with pytest.raises((AssertionError, emulator.EmulatorError), match=said):
        close(matvec(records.matvec(VARIANT, Product(format, 1, 5, I)), x, weight), *product(x, weight))


def test_only_the_variant_apple7_matrix_multiplies_up_to_sixteen_rows_by_matrices() -> None:
    assert [T for T in range(1, 40) if records.by_matrix(MATRIX_ROW, T)] == list(range(13, 17))
    assert not any(records.by_matrix(VARIANT, T) for T in range(1, 40))
    assert [T for T in range(1, 40) if not records.by_lanes(VARIANT, T)] == list(range(17, 40))


# --- limits of a launch


def test_variants_fit_a_threadgroup() -> None:
    """Threads, registers and threadgroup memory of the default variants and of those that are timed."""
    for T in range(1, 17):
        for D, qk_norm in ((64, False), (96, True), (128, True), (256, True)):
            heads = Heads(32, 8, D, 16, D, "BF16", False, qk_norm, "1e-6f")
            for cut in [*records.cuts(T), *(found := records.cuts_for_heads(T, 4096, heads))]:
                assert cut.simds % cut.teams == 0 and cut.simds <= 16 and cut.rows >= 2 and cut.rows * cut.part(T) <= 64
            assert all(cut.memory(T, 4096) + 4 * T * D * qk_norm <= records.THREADGROUP_BYTES for cut in found)
            taken = dict(records.norm_qkv_rope_store(VARIANT, "Q4_0", T, 4096, heads, "1e-5f").defines)
            assert (taken["ROWS"], taken["SIMDS"], taken["TEAMS"]) == (found[0].rows, found[0].simds, found[0].teams)
