"""The CUDA kernels for products of up to eight rows, in the emulator, against float64 sums of the same rounded numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda import small_products as kernels
from tests.kernels.cuda.small_products import EPS, QK_EPS
from tests.kernels.cuda.tiles import KINDS, TILED, USUAL, Tiled, close, laid, numbers, one, product, rms_normed, same_bits, tiled, untouched
from tinyvllm.backends.kernel import Kernel
from tinyvllm.quant.codecs import bf16_to_f32
from tinyvllm.quant.random_rows import packable_width

WIDTHS = [(1, 32), (3, 512), (8, 544), (8, 1056), (2, 2080)]  # tokens, columns: pieces of 512 and remainders


def poison(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return aligned(shape, dtype)


# --- matvec


def matvec(kernel: Kernel, x: np.ndarray, weight: Tiled, *more: np.ndarray, rows: int | None = None, seed: int = 0) -> np.ndarray:
    out = poison(len(x), len(weight.rows))
    emulate(kernel, out, x, weight.tiles, *more, one(len(x) if rows is None else rows), seed=seed)
    return out


@pytest.mark.parametrize("T, I, format", [(*shape, name) for name in TILED for shape in (WIDTHS if name in USUAL else [WIDTHS[3]])])
def test_matvec(T: int, I: int, format: str) -> None:
    O, I = 37, packable_width(format, I)
    weight, x = tiled(numbers(O, I), format), numbers(T, I)
    close(matvec(kernels.matvec(T, O, I, format), x, weight, seed=T), *product(x, weight))


@pytest.mark.parametrize("bias, residual, activation", [(1, 0, 0), (0, 1, 0), (1, 1, 1)])
def test_matvec_ends_with_bias_gelu_and_residual(bias: int, residual: int, activation: int) -> None:
    T, O, I = 3, 21, 96
    weight, x, b, r = tiled(numbers(O, I), "BF16"), numbers(T, I), numbers(O, seed=1), numbers(T, O, seed=2)
    got = matvec(kernels.matvec(T, O, I, "BF16", bias, residual, activation), x, weight, *[b][:bias], *[r][:residual])
    y, size = product(x, weight)
    y = y + b * bias
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) if activation else y
    close(got, y + r * residual, size + 2)


@pytest.mark.parametrize("format", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(format: str) -> None:
    """Alone, among eight, at another index, and with other divisions of work: one or two tiles a block, several pieces a warp."""
    O, I = 80, packable_width(format, 2112)
    weight, x = tiled(numbers(O, I), format), numbers(8, I)
    want = matvec(kernels.matvec(8, O, I, format), x, weight)
    same_bits(matvec(kernels.matvec(8, O, I, format, processors=1), x, weight, seed=1), want)
    same_bits(matvec(kernels.matvec(1, O, I, format), laid(x[5:6]), weight), want[5:6])
    same_bits(matvec(kernels.matvec(2, O, I, format, processors=1), laid(x[2:4]), weight), want[2:4])
    same_bits(matvec(kernels.matvec(3, O, I, format, processors=2), laid(x[4:7]), weight), want[4:7])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_after_the_last_are_not_touched(rows: int) -> None:
    weight, x = tiled(numbers(40, 64), "Q8_0"), numbers(8, 64)
    x[rows:] = np.nan
    out = matvec(kernels.matvec(8, 40, 64, "Q8_0"), x, weight, rows=rows)
    assert np.isfinite(out[:rows]).all() and untouched(out[rows:])


@pytest.mark.parametrize("format", KINDS)
def test_what_is_not_finite_makes_its_row_nan_and_no_other(format: str) -> None:
    I = packable_width(format, 64)
    weight, x = tiled(numbers(16, I), format), numbers(4, I)
    x[1, 33], x[2, 5] = np.nan, np.inf
    out = matvec(kernels.matvec(4, 16, I, format), x, weight)
    assert np.isnan(out[1]).all() and not np.isfinite(out[2]).any() and np.isfinite(out[[0, 3]]).all()


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
def test_blocks_of_zeros_and_of_tiny_numbers(format: str) -> None:
    weight, x = tiled(numbers(16, 96), format), numbers(2, 96)
    x[0, :32], x[1, 32:64] = 0, 1e-37
    close(matvec(kernels.matvec(2, 16, 96, format), x, weight), *product(x, weight))


# --- norm_gate_up_silu


def gate_up(kernel: Kernel, x: np.ndarray, norm: np.ndarray, weight: Tiled, *bias: np.ndarray, rows: int | None = None) -> np.ndarray:
    out = poison(len(x), len(weight.rows) // 2)
    emulate(kernel, out, x, norm, weight.tiles, *bias, one(len(x) if rows is None else rows), seed=len(x))
    return out


@pytest.mark.parametrize("T, E, format", [(*shape, name) for name in KINDS for shape in (WIDTHS if name in USUAL else [WIDTHS[1]])])
def test_norm_gate_up_silu(T: int, E: int, format: str) -> None:
    F, bias, E = 48, T % 2, packable_width(format, E)
    weight, x, norm, b = tiled(numbers(2 * F, E), format), numbers(T, E), numbers(E, seed=1), numbers(2 * F, seed=2)
    rows = T - (T > 2)
    got = gate_up(kernels.norm_gate_up_silu(T, E, F, format, bias, processors=1), x, norm, weight, *[b][:bias], rows=rows)
    y, size = product(rms_normed(x, norm, EPS), weight)
    gate, up = np.split(y + b * bias, 2, axis=1)
    of_gate, of_up = np.split(size, 2, axis=1)
    close(got[:rows], (gate / (1 + np.exp(-gate)) * up)[:rows], (of_gate * np.abs(up) + np.abs(gate) * of_up + np.abs(gate * up))[:rows])
    assert untouched(got[rows:])


@pytest.mark.parametrize("format, E", [("BF16", 1056), ("Q8_0", 4640)])  # ten pieces for five warps
def test_a_gated_row_has_the_same_bits_in_any_batch(format: str, E: int) -> None:
    F = 32
    weight, x, norm = tiled(numbers(2 * F, E), format), numbers(8, E), numbers(E, seed=1)
    want = gate_up(kernels.norm_gate_up_silu(8, E, F, format), x, norm, weight)
    same_bits(gate_up(kernels.norm_gate_up_silu(8, E, F, format, processors=1), x, norm, weight), want)
    same_bits(gate_up(kernels.norm_gate_up_silu(1, E, F, format), laid(x[6:7]), norm, weight), want[6:7])


# --- norm_qkv_rope_store

H, K, S, P = 3, 2, 16, 3  # heads of q and of k, slots a block, blocks
NUMBER = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class Heads:
    """Arguments of one call, and the expected results. `others`: the last heads that other products have."""

    def __init__(self, T: int, E: int, D: int, R: int, format: str, bias: int, qk_norm: int, others: tuple[int, ...] = ()) -> None:
        O = (H + 2 * K) * D
        self.T, self.D, self.R, self.bias, self.qk_norm = T, D, R, bias, qk_norm
        self.x, self.norm, self.weight = numbers(T, E), numbers(E, seed=1), tiled(numbers(O - sum(others) * D, E), format)
        self.products = [numbers(T, n * D, seed=6 + i) for i, n in enumerate(others)]
        self.biases, self.norms, self.angles = numbers(O, seed=2), numbers(2, D, seed=3), numbers(T, R, seed=4)
        self.slots = laid(np.random.default_rng(5).permutation(P * S)[:T].astype(np.int32))

    def run(self, kernel: Kernel, cache: str, first: int = 0, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows `first` to first + TOKENS - 1 -> q [TOKENS, H, D], pool [P, 2, K, S, D] as stored."""
        T = int(dict(kernel.defines)["TOKENS"])
        some = slice(first, first + T)
        q, pool = poison(T, H, self.D), poison(P, 2, K, S, self.D, dtype=NUMBER[cache])
        ins = [laid(self.x[some]), self.norm, self.weight.tiles, *(laid(product[some]) for product in self.products)]
        ins += [self.biases][: self.bias]
        ins += [laid(self.norms[0]), laid(self.norms[1])][: 2 * self.qk_norm]
        ins += [laid(self.angles[some])][: self.R] + [laid(self.slots[some]), one(T if rows is None else rows)]
        emulate(kernel, q, pool, pool, *ins, seed=T)
        return q, pool

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [T, H + 2 K, D], and the magnitude of its sums."""
        y, size = product(rms_normed(self.x, self.norm, EPS), self.weight)
        y, size = np.concatenate([y, *self.products], 1), np.concatenate([size, *map(np.abs, self.products)], 1)
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


SHAPES = [  # D, R, bias, qk_norm, cache
    (32, 32, 1, 0, "BF16"), (64, 64, 0, 0, "F16"), (32, 0, 1, 0, "F32"),
    (32, 32, 0, 1, "F32"), (48, 16, 1, 1, "BF16"), (16, 16, 0, 0, "F32"),
]  # fmt: skip


FEW = [(1, 96, "BF16"), (3, 544, "Q8_0"), (8, 64, "Q4_0"), (2, 1056, "F16"), (3, 256, "Q6_K")]  # T, E, format


@pytest.mark.parametrize("shape, few", [(i, (i + j) % len(FEW)) for i in range(len(SHAPES)) for j in (0, 1, 3)])
def test_norm_qkv_rope_store(shape: int, few: int) -> None:
    """Each kind of heads with three of the products, each product with three kinds at least."""
    (D, R, bias, qk_norm, cache), (T, E, format) = SHAPES[shape], FEW[few]
    heads_are_stored(Heads(T, E, D, R, format, bias, qk_norm), cache)


@pytest.mark.parametrize("others", [(2,), (4,), (2, 2)])  # v; k and v; each of them in a format of its own
@pytest.mark.parametrize("D, R, bias, qk_norm, cache", SHAPES)
def test_heads_of_other_matrices_are_stored(D: int, R: int, bias: int, qk_norm: int, cache: str, others: tuple[int, ...]) -> None:
    T, format = {1: (3, "Q8_0"), 2: (8, "BF16")}[len(others)]
    heads_are_stored(Heads(T, 96, D, R, format, bias, qk_norm, others), cache)


def heads_are_stored(heads: Heads, cache: str) -> None:
    """The kernel's q and cache are the expected ones, and nothing else is written."""
    T, E, D, others = heads.T, heads.x.shape[1], heads.D, tuple(product.shape[1] // heads.D for product in heads.products)
    rows, format = T - (T > 2), heads.weight.format
    kernel = kernels.norm_qkv_rope_store(T, E, H, K, D, heads.R, S, format, cache, heads.bias, heads.qk_norm, processors=2, others=others)
    q, pool = heads.run(kernel, cache, rows=rows)
    want, size = heads.expected()
    close(q[:rows], want[:rows, :H], size[:rows, :H])
    assert untouched(q[rows:])
    at = heads.slots[:rows]
    stored = pool.transpose(0, 3, 1, 2, 4).reshape(P * S, 2 * K, D)  # by slot
    values = bf16_to_f32(stored[at]) if cache == "BF16" else stored[at].astype(np.float32)
    rounding = {"F32": 0, "F16": 2**-11, "BF16": 2**-8}[cache] * np.abs(want[:rows, H:])
    close(values, want[:rows, H:], size[:rows, H:] + rounding / 2e-6)
    assert untouched(np.delete(stored, at, axis=0))


@pytest.mark.parametrize("qk_norm", [0, 1])
def test_a_row_of_heads_has_the_same_bits_in_any_batch(qk_norm: int) -> None:
    heads = Heads(8, 544, 32, 32, "BF16", 1, qk_norm)

    def run(T: int, first: int, processors: int) -> tuple[np.ndarray, np.ndarray]:
        kernel = kernels.norm_qkv_rope_store(T, 544, H, K, 32, 32, S, "BF16", "F32", 1, qk_norm, processors)
        q, pool = heads.run(kernel, "F32", first)
        return q, pool.transpose(0, 3, 1, 2, 4).reshape(P * S, -1)[heads.slots[first : first + T]]

    want_q, want_stored = run(8, 0, 132)
    for T, first, processors in ((8, 0, 1), (1, 3, 132), (2, 6, 132)):
        q, stored = run(T, first, processors)
        same_bits(q, want_q[first : first + T])
        same_bits(stored, want_stored[first : first + T])


# --- norm_head


def head(kernel: Kernel, x: np.ndarray, norm: np.ndarray, weight: Tiled, index: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """logits [N, V], best [N]. Launched twice: the second launch starts with the state that the first one left."""
    N = len(index)
    state = aligned((2 * N + 1,), np.int32, 0)
    for seed in (0, 1):
        logits, best = poison(N, len(weight.rows)), poison(N, dtype=np.int32)
        emulate(kernel, logits, best, state, x, norm, weight.tiles, laid(index.astype(np.int32)), one(count), seed=seed)
        assert not state.any()
    return logits, best


@pytest.mark.parametrize(
    "N, E, V, processors, format",
    [
        (*shape, name)
        for name in KINDS
        for shape in ([(1, 64, 37, 132), (3, 544, 151, 1), (8, 1056, 70, 2)] if name in USUAL else [(3, 64, 70, 1)])
    ],
)
def test_norm_head(N: int, E: int, V: int, processors: int, format: str) -> None:
    E = packable_width(format, E)
    weight, x, norm = tiled(numbers(V, E), format), numbers(N + 4, E), numbers(E, seed=1)
    index, count = np.random.default_rng(0).permutation(N + 4)[:N], N - (N > 2)
    index[count:] = 1 << 30  # out of range: not read
    logits, best = head(kernels.norm_head(N, E, V, format, processors), x, norm, weight, index, count)
    close(logits[:count], *product(rms_normed(x[index[:count]], norm, EPS), weight))
    assert (best[:count] == logits[:count].argmax(1)).all()
    assert untouched(logits[count:]) and untouched(best[count:])


def test_the_lowest_of_equals_is_best_and_without_a_largest_there_is_none() -> None:
    V, E = 200, 32
    values = numbers(V, E)
    values[[70, 71, 150]] = 9.0  # rows 70, 71 and 150 of the weight are the same
    weight, x = tiled(values, "F16"), np.abs(numbers(3, E))
    x[1] = np.nan
    kernel = kernels.norm_head(3, E, V, "F16", processors=2)
    index = np.array([0, 1, 2])
    assert head(kernel, laid(x), aligned((E,), np.float32, 1), weight, index, 3)[1].tolist() == [70, -1, 70]
    for nan in (np.nan, -np.nan):
        values[33, 7] = nan  # one logit of a row; the others have a largest
        assert head(kernel, laid(np.abs(x)), aligned((E,), np.float32, 1), tiled(values, "F16"), index, 3)[1].tolist() == [-1, -1, -1]
    weight = tiled(np.full((V, E), -np.inf, np.float32), "F16")
    assert head(kernel, laid(x), aligned((E,), np.float32, 1), weight, index, 3)[1].tolist() == [-1, -1, -1]


def test_a_row_of_logits_has_the_same_bits_in_any_batch() -> None:
    V, E = 100, 1056
    weight, x, norm = tiled(numbers(V, E), "BF16"), numbers(8, E), numbers(E, seed=1)
    want, _ = head(kernels.norm_head(8, E, V, "BF16"), x, norm, weight, np.arange(8), 8)
    same_bits(head(kernels.norm_head(8, E, V, "BF16", processors=1), x, norm, weight, np.arange(8), 8)[0], want)
    same_bits(head(kernels.norm_head(1, E, V, "BF16"), x, norm, weight, np.array([6]), 1)[0], want[6:7])
