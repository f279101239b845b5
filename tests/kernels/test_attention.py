"""Paged attention of the CPU backend against a softmax in float64, and bit for bit: decode against prefill, shared blocks read once against
the same blocks read by each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.in_turn import in_turn
from tests.kernels.calling import TILE_LANES, aligned, call
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel
from tinyvllm.batch import KVLayout
from tinyvllm.quant.codecs import f32_to_bf16
from tinyvllm.quant.kv import KV_FORMATS, pack_blocks, unpack_blocks

NEEDS = {"amx": TILE_LANES, "avx512": {"avx512f"}, "avx2": {"avx2"}, "neon": {"asimd"}}
TARGETS = [target for target, features in NEEDS.items() if features <= cpu_features()] + ["plain"]
# Both sides read the same rounded cache, so float32 arithmetic is all that differs: about sqrt(D + context) roundings of 6e-8.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
INTEGERS = ("KV_INT8", "KV_INT4")


@dataclass(frozen=True)
class Shape:
    H: int = 4
    K: int = 2
    D: int = 64
    S: int = 16
    dtype: str = "F32"
    window: int = 0
    cap: float = 0.0
    sinks: tuple[float, ...] = ()  # of the H heads, if there are any

    @property
    def policies(self) -> dict[str, int | str]:
        return ({"CAP": f"{self.cap}f"} if self.cap else {}) | ({"SINKS": 1} if self.sinks else {})

    @property
    def sink_arrays(self) -> list[np.ndarray]:
        """The kernels' argument for sinks, float32 [H], if there is one."""
        if not self.sinks:
            return []
        array = aligned((self.H,), np.float32)
        array[...] = self.sinks
        return [array]


def with_sinks(shape: Shape) -> Shape:
    """Sinks among the scores of most rows, far above them and far below, -infinity, and beyond what float32 has exponentials of."""
    return replace(shape, sinks=tuple((0.5, 3.0, -60.0, 2.0, 40.0, -np.inf, 1e4, -1e4)[h % 8] for h in range(shape.H)))


@dataclass
class Case:
    """`new[b]` rows of sequence b, the last of its `context[b]` tokens; the cache holds NaN wherever no sequence has a token.

    `shared[b]` of its tokens, the first, are in the blocks of sequence b - 1.
    """

    shape: Shape
    new: list[int]
    context: list[int]
    q: np.ndarray
    cache: np.ndarray
    tables: np.ndarray
    keys: list[np.ndarray]  # float64 [context, K, D] as the cache holds them
    values: list[np.ndarray]
    shared: list[int] = field(default_factory=list)
    value_scales: list[np.ndarray] = field(default_factory=list)  # float64 [context, K] of a packed cache
    weights: str = ""  # how those of values are rounded: "whole" numbers of a tile's largest, or to bfloat16 in tiles ("amx", "pairs")

    @property
    def starts(self) -> np.ndarray:
        return _ints([0, *np.cumsum(self.new)])

    def kernel(self, stem: str, target: str, cascade: bool = False) -> Kernel:
        s, (B, M) = self.shape, self.tables.shape
        sizes = {"H": s.H, "K": s.K, "D": s.D, "S": s.S, "B": B, "M": M, "WINDOW": s.window, "CASCADE": int(cascade)}
        defines = (*sizes.items(), ("CACHE_TYPE", s.dtype), ("SCALE", f"{s.D**-0.5}f"), *s.policies.items())
        ins = {"attention_decode": 5 + cascade, "attention_prefill": 6}[stem] + bool(s.sinks)
        return Kernel(stem, "cpu", target, defines, outs=2, ins=ins)


def _ints(numbers: object) -> np.ndarray:
    array = np.asarray(numbers, np.int32)
    out = aligned(array.shape, np.int32)
    out[...] = array
    return out


def check_close(got: np.ndarray, want: np.ndarray, shape: Shape, target: str) -> None:
    """A rounded weight near the middle of two numbers may become the other one: for integer caches that is 1/126 of a tile's largest, for
    tiles 1/256 of itself.
    """
    off = np.abs(got - want)
    if shape.dtype in INTEGERS:
        assert not np.isnan(off).any() and off.max() < 2e-2 and np.mean(off > 1e-4) < 1e-2, (off.max(), np.mean(off > 1e-4))
    elif rounding_tiles(shape, target):
        assert not np.isnan(off).any() and off.max() < 1e-2 and np.mean(off) < 1e-4, (off.max(), np.mean(off))
    else:
        np.testing.assert_allclose(got, want, **TOLERANCE)


def rounding_tiles(shape: Shape, target: str) -> str:
    """The tiles in which weights are rounded to bfloat16, as `weights_in_tiles` has them: AMX's, or those of pairs of bfloat16; or none."""
    if target == "amx" and shape.dtype in ("BF16", "KV_FP8"):
        return "amx"
    needs = {"BF16": {"avx512_bf16"}, "KV_FP8": {"avx512_bf16", "avx512vbmi"}}.get(shape.dtype, {"none"})
    return "pairs" if target == "avx512" and needs <= cpu_features() else ""


def _rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """x in the cache's dtype (bfloat16 as uint16) and as float64."""
    if dtype == "BF16":
        bits = ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    x = x.astype({"F16": np.float16}.get(dtype, np.float32))
    return x, x.astype(np.float64)


def make(shape: Shape, new: list[int], context: list[int], M: int | None = None, seed: int = 0, shared: list[int] | None = None) -> Case:
    rng, s, B = np.random.default_rng(seed), shape, len(new)
    shared = shared or [0] * B
    needed = [-(-n // s.S) for n in context]
    M, P = M or max(needed) + 1, sum(needed) + 3
    floats = {"F32": np.float32, "F16": np.uint16, "BF16": np.uint16}
    cache = aligned((P, 2, s.K, s.S, s.D), floats.get(s.dtype, np.float32))  # NaN bytes; a packed one is packed at the end
    blocks, tables = iter(rng.permutation(P)), _ints(np.full((B, M), 2**30))  # a block that is read by mistake is far away
    keys, values = [], []
    for b, n in enumerate(context):
        lead = shared[b]
        tables[b, : needed[b]] = [*tables[b - 1, : lead // s.S], *(next(blocks) for _ in range(needed[b] - lead // s.S))]
        at, slot = tables[b, np.arange(n) // s.S], np.arange(n) % s.S
        for side, exact in enumerate((keys, values)):
            stored, wide = _rounded(rng.standard_normal((n - lead, s.K, s.D), np.float32), s.dtype)
            cache[at[lead:], side, :, slot[lead:]] = stored.view(cache.dtype)
            exact.append(np.concatenate([exact[b - 1][:lead], wide]) if lead else wide)
        if s.window and not any(shared):  # what is before every row's window may be gone, whole blocks of it and single slots
            gone = max(0, n - new[b] - s.window + 1)
            cache[at[:gone], :, :, slot[:gone]] = np.full((), 0xFF, np.uint8).repeat(cache.itemsize).view(cache.dtype)
            tables[b, : gone // s.S] = 2**30
    scales: list[np.ndarray] = []
    if s.dtype in KV_FORMATS:
        cache, keys, values, scales = _packed(s, cache, tables, context)
    q = aligned((sum(new), s.H, s.D), np.float32)
    q[...] = 2 * rng.standard_normal(q.shape, np.float32)
    return Case(shape, new, context, q, cache, tables, keys, values, shared, scales)


def _packed(s: Shape, cache: np.ndarray, tables: np.ndarray, context: list[int]) -> tuple[np.ndarray, *tuple[list[np.ndarray], ...]]:
    """A cache's blocks packed, and what each sequence reads there: rotated keys stay rotated, as queries come rotated to the kernels."""
    blocks = aligned((len(cache), KVLayout(s.dtype, s.K, s.S, s.D).block_bytes), np.uint8)
    blocks[...] = pack_blocks(s.dtype, cache)
    held = unpack_blocks(s.dtype, blocks, s.K, s.S, s.D).astype(np.float64)
    bits = np.ascontiguousarray(blocks[:, -2 * 2 * s.K * s.S :]).view("<u2").reshape(len(cache), 2, s.K, s.S)
    scales = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    each = [(np.clip(tables[b, np.arange(n) // s.S], 0, len(cache) - 1), np.arange(n) % s.S) for b, n in enumerate(context)]
    sides = [[held[at, side, :, slot] for at, slot in each] for side in (0, 1)]
    return blocks, sides[0], sides[1], [scales[at, 1, :, slot] for at, slot in each]


def rounded(case: Case, target: str) -> Case:
    """The case with queries and weights as the CPU's kernels multiply them: 8 bits for integer caches, bfloat16 in tiles."""
    if tiles := rounding_tiles(case.shape, target):
        return replace(case, q=round_bf16(case.q), weights=tiles)
    if case.shape.dtype not in INTEGERS:
        return case
    top = np.abs(case.q).max(2, keepdims=True)
    return replace(case, q=np.rint(case.q * (np.float32(127) / top)) * (top / np.float32(127)), weights="whole")


def round_bf16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def weights_in_tiles(scores: np.ndarray, scales: np.ndarray | None, start: int, D: int, tiles: str) -> np.ndarray:
    """exp(scores) of [H, keys] from position `start` on as values are multiplied with them, relative to the largest of its tile and those
    before it in the partition, or with AMX to a score at most 8 ln 2 below. Rounded is a weight times its value's scale [H, keys].
    """
    amx = tiles == "amx"
    out, slack = np.zeros_like(scores), 8 * np.log(2) if amx else 0
    tile = (128 if D <= 128 else 64) if amx else 64 if D <= 64 else 32
    for h, row in enumerate(scores):
        top = -np.inf
        for first in range(start // tile * tile, start + len(row), tile):
            at = slice(max(first - start, 0), first - start + tile)
            top = -np.inf if first % 256 == 0 else top
            most = row[at].max()
            top = most if most > top + slack else top
            scale = 1 if scales is None else scales[h, at]
            out[h, at] = round_bf16(np.exp(row[at] - top) * scale).astype(np.float64) / scale * np.exp(top - row.max())
    return out


def rounded_weights(weights: np.ndarray, scales: np.ndarray, start: int) -> np.ndarray:
    """Weights [H, keys] of the keys from position `start` on as kernels multiply values of integer caches with them.

    In a tile of 64 keys each weight times its value's scale [H, keys] is a whole number of 126ths of the largest, and what is left of it is
    added to the weight sixteen keys later.
    """
    out = np.zeros_like(weights)
    for first in range(start // 64 * 64, start + weights.shape[1], 64):
        at = slice(max(first - start, 0), first - start + 64)
        tile = np.zeros((len(weights), 64))
        lead = max(start - first, 0)
        tile[:, lead : lead + weights[:, at].shape[1]] = weights[:, at] * scales[:, at]
        step = tile.max(1, keepdims=True) / 126
        rest = np.zeros((len(weights), 16))
        for c in range(0, 64, 16):
            exact = tile[:, c : c + 16] / step + rest
            rest = exact - np.rint(exact)
            tile[:, c : c + 16] = np.rint(exact) * step
        out[:, at] = tile[:, lead : lead + weights[:, at].shape[1]] / scales[:, at]
    return out


def oracle(case: Case) -> np.ndarray:
    s, out, row = case.shape, np.empty(case.q.shape), 0
    for b, n in enumerate(case.new):
        for position in range(case.context[b] - n, case.context[b]):
            seen = slice(max(0, position + 1 - s.window) if s.window else 0, position + 1)
            k, v = (np.repeat(x[b][seen], s.H // s.K, axis=1) for x in (case.keys, case.values))
            scores = np.einsum("hd,thd->ht", case.q[row].astype(np.float64), k) * s.D**-0.5
            if s.cap:
                scores = s.cap * np.tanh(scores / s.cap)
            sinks = np.array(s.sinks or [-np.inf] * s.H)[:, None]
            top = np.maximum(scores.max(1, keepdims=True), sinks)
            weights = np.exp(scores - top)
            total = weights.sum(1, keepdims=True) + np.exp(sinks - top)
            scales = np.repeat(case.value_scales[b][seen].T, s.H // s.K, axis=0) if case.value_scales else None
            if case.weights in ("amx", "pairs"):
                weights = weights_in_tiles(scores, scales, seen.start, s.D, case.weights) * np.exp(scores.max(1, keepdims=True) - top)
            elif case.weights:
                weights = rounded_weights(weights, scales, seen.start)
            out[row] = np.einsum("ht,thd->hd", weights / total, v)
            row += 1
    return out


def decode(
    case: Case, target: str = TARGETS[0], threads: int = 2, count: int | None = None, shared_prefix_lens: list[int] | None = None
) -> np.ndarray:  # fmt: skip
    """The last row of each sequence; with `shared_prefix_lens`, by the kernel that reads once what is shared."""
    s, (B, M) = case.shape, case.tables.shape
    last = aligned((B, s.H, s.D), np.float32)
    last[...] = case.q[case.starts[1:] - 1]
    partial = aligned((B * s.H * -(-M * s.S // 256) * (s.D + 2),), np.float32)
    out = aligned(last.shape, np.float32)
    ins = [last, case.cache, case.tables, _ints(case.context), _ints([B if count is None else count]), *s.sink_arrays]
    ins += [] if shared_prefix_lens is None else [_ints(shared_prefix_lens)]
    call(case.kernel("attention_decode", target, shared_prefix_lens is not None), out, partial, *ins, threads=threads)
    return out


def prefill(case: Case, target: str = TARGETS[0], threads: int = 2, first: int = 0, count: int | None = None) -> np.ndarray:
    s = case.shape
    G = s.H // s.K
    rows = max(1, 128 // G) * G
    scratch = aligned((64 * (256 * s.D + rows * (3 * s.D + 32)),), np.float32)
    out = aligned(case.q.shape, np.float32)
    counts = _ints([first, len(case.new) - first if count is None else count])
    ins = (case.q, case.cache, case.tables, _ints(case.context), case.starts, counts, *s.sink_arrays)
    call(case.kernel("attention_prefill", target), out, scratch, *ins, threads=threads)
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


RAGGED = [
    Shape(H=8, K=1, D=32, S=8, dtype="BF16"),
    Shape(H=7, K=1, D=64, S=16, dtype="BF16"),
    Shape(H=4, K=4, D=64, S=8, dtype="F16"),
    Shape(H=6, K=2, D=80, S=16, dtype="BF16"),
    Shape(H=4, K=2, D=96, S=8, dtype="F16"),
    Shape(H=2, K=2, D=112, S=16),
    Shape(H=8, K=2, D=128, S=64, dtype="BF16"),
    Shape(H=5, K=1, D=256, S=16, dtype="F16"),
    Shape(H=3, K=3, D=48, S=256, dtype="BF16"),
    Shape(H=4, K=2, D=64, S=8, window=5),
    Shape(H=4, K=4, D=64, S=16, dtype="BF16", window=70),
    Shape(H=8, K=2, D=128, S=8, dtype="F16", window=300),
    Shape(H=8, K=1, D=64, S=16, dtype="KV_INT8"),
    Shape(H=7, K=1, D=80, S=8, dtype="KV_INT8"),
    Shape(H=4, K=4, D=128, S=128, dtype="KV_INT8", window=70),
    Shape(H=5, K=1, D=256, S=16, dtype="KV_INT8"),
    Shape(H=8, K=1, D=64, S=16, dtype="KV_INT4"),
    Shape(H=6, K=2, D=96, S=8, dtype="KV_INT4", window=300),
    Shape(H=4, K=2, D=256, S=64, dtype="KV_INT4"),
    Shape(H=4, K=2, D=32, S=8, dtype="KV_INT4", window=5),
    Shape(H=8, K=2, D=64, S=16, dtype="KV_FP8"),
    Shape(H=3, K=3, D=48, S=8, dtype="KV_FP8", window=70),
    Shape(H=4, K=1, D=128, S=256, dtype="KV_FP8"),
    with_sinks(Shape(H=8, K=2, D=64, S=16, dtype="BF16", window=300, cap=2.0)),
]
NEW = [1, 70, 3, 1, 20, 1, 33]
CONTEXT = [1, 70, 17, 300, 530, 64, 289]


@functools.cache
def ragged(shape: Shape) -> Case:
    return make(shape, NEW, CONTEXT)


@pytest.mark.parametrize(("dtype", "target"), in_turn(["F32", "BF16", "KV_FP8"], TARGETS))
def test_weights_below_2_to_the_minus_100_are_0(dtype: str, target: str) -> None:
    """The second key's is 2^-110, and its value 2^108, so it would be seen. Subnormal weights would be slow, too."""
    case, D = make(Shape(H=2, K=2, D=64), [2], [2]), 64
    numbers = np.zeros_like(case.cache)
    numbers[case.tables[0, 0], 0, :, 1, 0], numbers[case.tables[0, 0], 1, :, 0] = -1, 1
    numbers[case.tables[0, 0], 1, :, 1] = 2.0**108
    cache = pack_blocks(dtype, numbers) if dtype in KV_FORMATS else numbers if dtype == "F32" else f32_to_bf16(numbers)
    case = replace(case, shape=replace(case.shape, dtype=dtype), cache=aligned(cache.shape, cache.dtype, cache))
    case.q[...] = 0
    case.q[:, :, 0] = 110 * np.log(2) * D**0.5
    for out in (prefill(case, target), decode(case, target)):
        np.testing.assert_allclose(out, 1, atol=0.02)  # what e4m3 and its scale make of 1


@pytest.mark.parametrize(("shape", "target"), in_turn(RAGGED, TARGETS))
def test_ragged_sequences(shape: Shape, target: str) -> None:
    case = ragged(shape)
    want = oracle(rounded(case, target))
    got = prefill(case, target)
    check_close(got, want, shape, target)
    last = decode(case, target)
    check_close(last, want[case.starts[1:] - 1], shape, target)
    assert same(last, got[case.starts[1:] - 1]), "decode and prefill of the same row differ in bits"


CUT = [Shape(H=4, K=1, D=64, dtype="BF16"), Shape(H=3, K=3, D=128, S=8, window=90)]
CUT += [Shape(H=4, K=1, D=64, dtype=dtype, S=8) for dtype in KV_FORMATS]


@pytest.mark.parametrize(("shape", "target"), in_turn(CUT, TARGETS))
def test_every_row_has_the_bits_of_decode_however_prompts_are_cut(shape: Shape, target: str) -> None:
    whole = make(shape, [150], [290])
    rows = prefill(whole, target)
    for new in ([1], [2], [5], [64], [67]):
        for context in (290, 257, 230, 140 + new[0]):
            first = context - new[0] - 140  # row of `whole` that comes first in this cut
            q = aligned((new[0], shape.H, shape.D), np.float32)
            q[...] = whole.q[first : first + new[0]]
            cut = Case(shape, new, [context], q, whole.cache, whole.tables, whole.keys, whole.values, [0])
            assert same(prefill(cut, target), rows[first : first + new[0]]), (new, context)
            assert same(decode(cut, target), rows[first + new[0] - 1 : first + new[0]]), (new, context)


@pytest.mark.parametrize(("shape", "target"), in_turn([RAGGED[1], RAGGED[9]], TARGETS))
def test_lanes_do_not_change_bits(shape: Shape, target: str) -> None:
    case = ragged(shape)
    rows, last = prefill(case, target, threads=1), decode(case, target, threads=1)
    for threads in (2, 3):
        assert same(prefill(case, target, threads=threads), rows)
        assert same(decode(case, target, threads=threads), last)


@pytest.mark.parametrize(
    ("shape", "target"), in_turn([Shape(H=8, K=2, D=64, dtype="BF16"), Shape(H=2, K=2, D=64, dtype="F16", window=1000)], TARGETS)
)
def test_long_contexts(shape: Shape, target: str) -> None:
    case = make(shape, [9, 1], [4096, 4100], M=300)
    want, got = oracle(rounded(case, target)), prefill(case, target)
    check_close(got, want, shape, target)
    assert same(decode(case, target), got[case.starts[1:] - 1])


@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_do_not_count_stay_as_they_are(target: str) -> None:
    case = make(Shape(dtype="BF16"), [1, 1, 40, 5, 1], [300, 20, 40, 12, 9])
    want = oracle(rounded(case, target))
    out = decode(case, target, count=2)
    check_close(out[:2], want[:2], case.shape, target)
    assert (out[2:].view(np.uint32) == 0xFFFFFFFF).all()
    assert (decode(case, target, count=0).view(np.uint32) == 0xFFFFFFFF).all()
    out = prefill(case, target, first=2, count=2)
    check_close(out[2:47], want[2:47], case.shape, target)
    assert (out[[0, 1, 47]].view(np.uint32) == 0xFFFFFFFF).all()


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_is_not_reached_by_later_tokens(target: str) -> None:
    case = make(Shape(H=3, K=3, dtype="BF16"), [40], [100])
    clean = prefill(case, target)
    case.cache[case.tables[0, 70 // 16], :, :, 70 % 16] = 0xFFFF  # NaN at position 70, which rows 0 to 9 do not see
    dirty = prefill(case, target)
    assert same(dirty[:10], clean[:10])
    assert np.isnan(dirty[10:]).all()


@pytest.mark.parametrize(("dtype", "target"), in_turn(KV_FORMATS, TARGETS))
def test_a_packed_row_is_not_reached_by_later_tokens(dtype: str, target: str) -> None:
    """Nor by what unused slots hold, whose scales may be NaN; a NaN that is seen reaches the row."""
    shape = Shape(H=3, K=3, D=64, dtype=dtype)
    case = make(shape, [40], [100])
    clean = prefill(case, target)
    scales = case.cache[:, -2 * 2 * shape.K * shape.S :].view(np.uint16).reshape(-1, 2, shape.K, shape.S)
    for side in (0, 1):
        before = scales[case.tables[0, 70 // 16], side, :, 70 % 16].copy()
        scales[case.tables[0, 70 // 16], side, :, 70 % 16] = 0x7FC0  # of position 70, which rows 0 to 9 do not see
        dirty = prefill(case, target)
        assert same(dirty[:10], clean[:10])
        assert np.isnan(dirty[10:]).all()
        scales[case.tables[0, 70 // 16], side, :, 70 % 16] = before


@pytest.mark.parametrize(("dtype", "target"), in_turn(["BF16", *KV_FORMATS], TARGETS))
def test_queries_that_are_not_finite_give_nan(dtype: str, target: str) -> None:
    """Of rows whose keys end with a tile, and with a part of one."""
    case = make(Shape(H=3, K=3, D=64, dtype=dtype), [40], [100])
    case.q[3, 1, 5], case.q[4, 2, 7], case.q[39, 0, 63] = np.nan, np.inf, -np.inf
    assert np.argwhere(np.isnan(prefill(case, target)).all(axis=2)).tolist() == [[3, 1], [4, 2], [39, 0]]
    assert np.isnan(decode(case, target)[0]).all(axis=1).tolist() == [True, False, False]


@pytest.mark.parametrize("target", TARGETS)
def test_large_scores_do_not_overflow(target: str) -> None:
    case = make(Shape(dtype="BF16"), [20], [600])
    case.q *= 200
    want = oracle(rounded(case, target))
    np.testing.assert_allclose(
        prefill(case, target), want, rtol=1e-3, atol=1e-2 if rounding_tiles(case.shape, target) else 1e-3
    )  # scores of 2000 have errors of 1e-4


# --- blocks that sequences share


# Of each sequence of a group: tokens of its own, and those that are in the blocks of the one before it. Groups of 1, 2, 3 and 17, contexts
# that end in the last shared chunk and chunks later, and a group that parts step by step.
GROUPS = [
    [(5, 0)],
    [(40, 320), (9, 320)],
    [(1, 256), (300, 256), (17, 64)],
    [(1 + 13 * i % 70, 592) for i in range(17)],
    [(30, 768), (31, 768), (32, 512), (530, 512), (3, 128), (70, 64), (1, 64)],
]


def grouped(shape: Shape, seed: int = 0, groups: list[list[tuple[int, int]]] = GROUPS) -> Case:
    context, shared = [], []
    for group in groups:
        for i, (own, tokens) in enumerate(group):
            blocks = tokens // shape.S * shape.S
            context.append(own + max(blocks, group[i + 1][1] if i + 1 < len(group) else 0))
            shared.append(blocks if i else 0)
    return make(shape, [1] * len(context), context, seed=seed, shared=shared)


@pytest.mark.parametrize(("shape", "target"), in_turn(RAGGED, TARGETS))
def test_shared_blocks_read_once_give_the_same_bits(shape: Shape, target: str) -> None:
    case = grouped(shape)
    want = decode(case, target)
    check_close(want, oracle(rounded(case, target)), shape, target)
    for threads in (1, 3):
        assert same(decode(case, target, threads, shared_prefix_lens=case.shared), want), threads
    # what is said to be shared may be less than what is
    for less in ([0] * len(case.shared), [n // 2 // shape.S * shape.S for n in case.shared], [max(0, n - shape.S) for n in case.shared]):
        assert same(decode(case, target, shared_prefix_lens=less), want)


@pytest.mark.parametrize(("shape", "target"), in_turn([RAGGED[1], RAGGED[5]], TARGETS))
def test_what_is_said_to_be_shared_is_read_from_the_one_before(shape: Shape, target: str) -> None:
    """Sequence 1 is wrongly said to begin as sequence 0 does: it gets what it would get if its table said so, too."""
    case, tokens = make(shape, [1, 1, 1], [400, 330, 350]), 256 if rounding_tiles(shape, target) == "amx" else 320  # whole tiles of keys
    wrong = decode(case, target, shared_prefix_lens=[0, tokens, 0])
    right = decode(case, target)
    assert same(wrong[[0, 2]], right[[0, 2]]) and not same(wrong[1:2], right[1:2])
    case.tables[1, : tokens // shape.S] = case.tables[0, : tokens // shape.S]
    assert same(wrong, decode(case, target))


@pytest.mark.parametrize("target", TARGETS)
def test_sequences_that_do_not_count_are_in_no_group(target: str) -> None:
    case = make(Shape(dtype="BF16"), [1] * 5, [300, 290, 310, 295, 280], shared=[0, 256, 256, 256, 256])
    out = decode(case, target, count=2, shared_prefix_lens=case.shared)
    assert same(out[:2], decode(case, target)[:2])
    assert (out[2:].view(np.uint32) == 0xFFFFFFFF).all()
    assert (decode(case, target, count=0, shared_prefix_lens=case.shared).view(np.uint32) == 0xFFFFFFFF).all()
