"""Paged attention of the Metal backend in the emulator: against a softmax in float64; a row's bits in different batches.

Sequences and caches are those of the CPU kernels' tests: NaN in every slot that no row sees, table entries far beyond the pool.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.test_attention import Case, Shape, _ints, make, oracle, same, with_sinks
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import plan as records
from tinyvllm.backends.shapes import Attention
from tinyvllm.batch import KVLayout
from tinyvllm.quant.kv import KV_FORMATS

# Only sums are rounded, as in the CPU's kernels.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
VARIANT = "apple7"


def attention_shape(case: Case) -> Attention:
    s = case.shape
    return Attention(s.H, s.K, s.D, s.S, case.tables.shape[1], s.dtype, f"{s.D**-0.5}f", s.window, s.cap, bool(s.sinks))


def decode(
    case: Case, count: int | None = None, partition: int = 512, simds: int = 2, seed: int = 0, variant: str = VARIANT, **options: Any
) -> np.ndarray:
    """The last row of each sequence."""
    s, B = case.shape, len(case.new)
    kernels, words = records.attention_decode(variant, B, attention_shape(case), partition=partition, simds=simds)
    last = aligned((B, s.H, s.D), np.float32)
    last[...] = case.q[case.starts[1:] - 1]
    return launch_decode(kernels, words, last, case, B if count is None else count, seed=seed, **options)


def launch_decode(
    kernels: list[Kernel], words: int, q: np.ndarray, case: Case, count: int, *ins: np.ndarray, seed: int, **options: Any
) -> np.ndarray:  # fmt: skip
    """One launch with zeros as scratch, or two with anything."""
    out, partial = aligned(q.shape, np.float32), aligned((words,), np.uint32, 0 if len(kernels) == 1 else 0xFFFFFFFF)
    ends = _ints(case.context), _ints([count]), *case.shape.sink_arrays
    emulate(kernels[0], out, partial, q, case.cache, case.tables, *ends, *ins, seed=seed, **options)
    for merge in kernels[1:]:
        emulate(merge, out, partial, *ends, seed=seed)
    assert len(kernels) > 1 or not partial.any(), "the next launch needs zeros"
    return out


def prefill(case: Case, first: int = 0, count: int | None = None, simds: int = 4, seed: int = 0) -> np.ndarray:
    chunks = len(case.new) - first if count is None else count
    kernel = records.attention_prefill(VARIANT, sum(case.new), len(case.new), attention_shape(case), simds=simds)
    out = aligned(case.q.shape, np.float32)
    ins = case.q, case.cache, case.tables, _ints(case.context), case.starts, _ints([first, chunks]), *case.shape.sink_arrays
    emulate(kernel, out, *ins, seed=seed)
    return out


def alone(case: Case, b: int) -> Case:
    """Sequence b, one row, in a batch of its own."""
    last = case.starts[b + 1] - 1
    q = aligned((1, *case.q.shape[1:]), np.float32)
    q[...] = case.q[last]
    return Case(case.shape, [1], case.context[b : b + 1], q, case.cache, case.tables[b : b + 1], [], [])


NEW = [1, 9, 3, 1]
CONTEXT = [1, 41, 67, 150]
MORE_PACKED = [
    Shape(H=10, K=1, D=128, S=16, dtype="KV_INT8"),
    Shape(H=3, K=3, D=32, S=16, dtype="KV_INT8", window=70),
    Shape(H=2, K=1, D=256, S=16, dtype="KV_INT4"),
    Shape(H=10, K=1, D=32, S=32, dtype="KV_INT4"),
    Shape(H=8, K=1, D=128, S=16, dtype="KV_FP8", window=300),
    Shape(H=2, K=2, D=32, S=8, dtype="KV_FP8"),
]
SHAPES = [  # each head dimension divides lanes differently, each group size divides scores differently
    Shape(H=4, K=1, D=32, S=8, dtype="BF16"),
    Shape(H=8, K=1, D=32, S=16, dtype="F16"),
    Shape(H=2, K=2, D=48, S=256, dtype="BF16"),
    Shape(H=3, K=1, D=64, S=16, dtype="F16"),
    Shape(H=4, K=2, D=64, S=32),
    Shape(H=7, K=1, D=80, S=16, dtype="F16"),
    Shape(H=4, K=2, D=96, S=8, dtype="BF16"),
    Shape(H=1, K=1, D=128, S=16, dtype="F16"),
    Shape(H=8, K=2, D=128, S=64, dtype="BF16"),
    Shape(H=10, K=1, D=128, S=16, dtype="F16"),
    Shape(H=5, K=1, D=144, S=16, dtype="F16"),
    Shape(H=2, K=1, D=256, S=16, dtype="BF16"),
    Shape(H=2, K=2, D=256, S=8),
    Shape(H=20, K=1, D=32, S=16, dtype="BF16"),
    Shape(H=2, K=1, D=64, S=8, dtype="F16", window=5),
    Shape(H=3, K=3, D=32, S=16, dtype="BF16", window=70),
    Shape(H=4, K=1, D=128, S=16, window=64),
    Shape(H=4, K=1, D=64, S=16, dtype="KV_INT8"),
    Shape(H=2, K=1, D=256, S=64, dtype="KV_INT8", window=70),
    Shape(H=4, K=2, D=64, S=16, dtype="KV_INT4"),
    Shape(H=7, K=1, D=96, S=8, dtype="KV_INT4"),  # two lanes read the same words
    Shape(H=2, K=2, D=48, S=256, dtype="KV_INT4", window=5),
    Shape(H=3, K=1, D=80, S=16, dtype="KV_FP8"),
    with_sinks(Shape(H=10, K=1, D=128, S=16, dtype="KV_INT8", cap=2.0)),  # in two parts
    with_sinks(Shape(H=8, K=2, D=64, S=16, dtype="F16", window=70)),
    with_sinks(Shape(H=4, K=2, D=32, S=16, dtype="BF16", cap=2.0)),
]


WIDE = [  # in two halves of values; query heads in parts of two
    with_sinks(Shape(H=6, K=2, D=288, S=8, dtype="F16", window=70, cap=2.0)),
    Shape(H=2, K=1, D=512, S=16, dtype="BF16"),
    Shape(H=3, K=1, D=512, S=16, dtype="KV_INT4"),
    Shape(H=2, K=1, D=512, S=16, dtype="KV_INT8", window=70),
    with_sinks(Shape(H=4, K=2, D=288, S=8, dtype="KV_INT4")),
    Shape(H=1, K=1, D=352, S=16, dtype="KV_FP8"),
    Shape(H=1, K=1, D=512, S=16),
]


@functools.cache
def ragged(shape: Shape) -> Case:
    return make(shape, NEW, CONTEXT)


@pytest.mark.parametrize(
    "shape",
    [*SHAPES[::2], *WIDE[:3], *(pytest.param(shape, marks=pytest.mark.long) for shape in (*SHAPES[1::2], *WIDE[3:], *MORE_PACKED))],
    ids=str,
)
def test_ragged_sequences(shape: Shape) -> None:
    case = ragged(shape)
    want = oracle(case)
    np.testing.assert_allclose(prefill(case), want, **TOLERANCE)
    for partition in (512, 64):
        np.testing.assert_allclose(decode(case, partition=partition), want[case.starts[1:] - 1], **TOLERANCE)


@pytest.mark.parametrize("dtype, window", [("BF16", 0), ("F16", 64)])
def test_decode_at_every_border(dtype: str, window: int) -> None:
    contexts = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 128, 129, 300]
    case = make(Shape(H=2, K=1, D=32, dtype=dtype, window=window), [1] * len(contexts), contexts, seed=3)
    want = decode(case, partition=64)
    np.testing.assert_allclose(want, oracle(case), **TOLERANCE)
    for b in (0, 5, 9, 12):
        assert same(decode(alone(case, b), partition=64, seed=b + 1), want[b : b + 1]), contexts[b]


@pytest.mark.parametrize("simds", [1, 3, 8])
def test_decode_with_other_numbers_of_simd_groups(simds: int) -> None:
    case = make(Shape(H=6, K=2, D=64, dtype="F16"), [1, 1, 1], [5, 40, 130])
    np.testing.assert_allclose(decode(case, simds=simds, partition=96, seed=simds), oracle(case), **TOLERANCE)


def test_the_maximum_number_of_partitions() -> None:
    case = make(Shape(H=2, K=1, D=48, dtype="BF16"), [1, 1], [1024, 993], M=64)
    np.testing.assert_allclose(decode(case, partition=32), oracle(case), **TOLERANCE)


def test_partitions_are_merged_in_one_order() -> None:
    """Whichever threadgroup is last; and each launch resets its scratch, for another launch of the same sizes."""
    shape = Shape(H=10, K=2, D=64, S=8, dtype="F16")
    cases = [make(shape, [1, 1, 1], contexts, M=20, seed=i) for i, contexts in enumerate(([150, 33, 64], [10, 160, 97], [65, 159, 1]))]
    (kernel,), words = records.attention_decode(VARIANT, 3, attention_shape(cases[0]), partition=32)
    partial, outs = aligned((words,), np.uint32, 0), [aligned(cases[0].q.shape, np.float32) for _ in cases]
    for seed in range(4):
        for case, out in zip(cases, outs, strict=True):
            before = out.copy()
            ins = case.q, case.cache, case.tables, _ints(case.context), _ints([3])
            emulate(kernel, out, partial, *ins, seed=seed, resident=2 + 3 * seed)
            assert not partial.any() and (seed == 0 or same(out, before))
    for case, out in zip(cases, outs, strict=True):
        np.testing.assert_allclose(out, oracle(case), **TOLERANCE)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6], SHAPES[9], SHAPES[11], SHAPES[15], SHAPES[-1], WIDE[0], WIDE[2]], ids=str)
def test_a_second_launch_merges_to_the_same_bits(shape: Shape) -> None:
    """The variant for a Mac on which the waiting of a single launch is not trusted."""
    case = ragged(shape)
    for partition, seed in ((64, 0), (32, 1), (512, 2)):
        want = decode(case, partition=partition)
        assert same(decode(case, partition=partition, seed=seed, variant=records.MERGE), want), partition
    out = decode(case, count=2, partition=32, variant=records.MERGE)
    assert same(out[:2], decode(case, count=2, partition=32)[:2]) and (out[2:].view(np.uint32) == 0xFFFFFFFF).all()


def test_zeros_have_the_same_bits_in_two_launches() -> None:
    case = make(Shape(H=2, K=1, D=32), [1], [100])
    case.cache[:] = 0
    assert same(decode(case, partition=32, variant=records.MERGE), decode(case, partition=32))


def test_a_sequence_of_one_partition_uses_no_scratch() -> None:
    case = make(Shape(H=2, K=1, D=32, dtype="F16", window=20), [1, 1, 1], [30, 64, 100], M=8)
    (kernel,), words = records.attention_decode(VARIANT, 3, attention_shape(case), partition=64)
    out, partial = aligned(case.q.shape, np.float32), aligned((words,), np.uint32)
    emulate(kernel, out, partial, case.q, case.cache, case.tables, _ints(case.context), _ints([3]))
    np.testing.assert_allclose(out, oracle(case), **TOLERANCE)
    assert (partial == 0xFFFFFFFF).all()


@pytest.mark.parametrize("zeros", [slice(0, 1), slice(0, 2)], ids=["keys", "keys and values"])
def test_zeros_are_valid_numbers(zeros: slice) -> None:
    """A word 0 of a record means that it has not arrived."""
    case = make(Shape(H=2, K=1, D=32), [1], [100])
    case.cache[:, zeros] = 0
    case.keys[0][...] = 0
    if zeros.stop == 2:
        case.values[0][...] = 0
    np.testing.assert_allclose(decode(case, partition=32), oracle(case), **TOLERANCE)


@pytest.mark.parametrize(
    "shape", [Shape(H=4, K=1, D=32, dtype="BF16"), Shape(H=3, K=3, D=64, S=8, window=50), Shape(H=3, K=1, D=256, dtype="F16")], ids=str
)
def test_bits_of_prefill_do_not_depend_on_the_chunks(shape: Shape) -> None:
    whole = make(shape, [60], [130])
    rows = prefill(whole)
    np.testing.assert_allclose(rows, oracle(whole), **TOLERANCE)
    for new, context in ((1, 130), (3, 97), (20, 96), (33, 120)):
        first = context - new - 70  # row of `whole` that is the first of this chunk
        q = aligned((new, shape.H, shape.D), np.float32)
        q[...] = whole.q[first : first + new]
        chunk = Case(shape, [new], [context], q, whole.cache, whole.tables, whole.keys, whole.values)
        assert same(prefill(chunk, seed=new), rows[first : first + new]), (new, context)


def test_bits_of_prefill_do_not_depend_on_the_threadgroup() -> None:
    case = ragged(SHAPES[6])
    assert same(prefill(case, simds=2, seed=1), prefill(case, simds=8, seed=2))


def test_invalid_rows_are_not_written() -> None:
    case = make(Shape(D=32, dtype="BF16"), [1, 1, 20, 5, 1], [80, 20, 20, 12, 70])
    want = oracle(case)
    out = decode(case, count=2, partition=64)
    np.testing.assert_allclose(out[:2], want[:2], **TOLERANCE)
    assert (out[2:].view(np.uint32) == 0xFFFFFFFF).all()
    assert (decode(case, count=0).view(np.uint32) == 0xFFFFFFFF).all()
    out = prefill(case, first=2, count=2)
    np.testing.assert_allclose(out[2:27], want[2:27], **TOLERANCE)
    assert (out[[0, 1, 27]].view(np.uint32) == 0xFFFFFFFF).all()
    assert (prefill(case, first=2, count=0).view(np.uint32) == 0xFFFFFFFF).all()


def test_large_scores_do_not_overflow() -> None:
    case = make(Shape(D=32, dtype="F16"), [9, 1], [80, 70])
    case.q *= 200
    want = oracle(case)
    for got, expected in ((prefill(case), want), (decode(case), want[case.starts[1:] - 1])):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-2)  # a score of 2000 is rounded by 1e-4


@pytest.mark.parametrize("dtype", KV_FORMATS)
def test_a_row_of_a_packed_cache_has_its_own_bits(dtype: str) -> None:
    """Alone, in chunks, and whatever unused slots and later tokens hold: their quants may be anything, their scales NaN."""
    shape = Shape(H=4, K=1, D=64, S=16, dtype=dtype)
    case = make(shape, [30, 1], [70, 45])
    rows, ends = prefill(case), decode(case, partition=32)
    assert same(decode(alone(case, 1), partition=32, seed=1), ends[1:])
    cut = Case(shape, [7], [60], case.q[13:20], case.cache, case.tables[:1], [], [])
    assert same(prefill(cut, seed=2), rows[13:20])
    quants, scales = case.cache[:, : 2 * 16 * row_bytes(shape)], case.cache[:, 2 * 16 * row_bytes(shape) :].view(np.uint16)
    after = quants[case.tables[0, 4]].reshape(2, -1, 4)  # tokens 64 to 69, and slots without a token
    after[1, row_bytes(shape) :] = 0x7F  # values of slots 4 to 7 and later: e4m3's NaN
    scales[case.tables[0, 4]].reshape(2, 16)[:, 4:] = 0x7FC0
    dirty = prefill(case, seed=3)
    assert same(dirty[:28], rows[:28]) and np.isnan(dirty[28:30]).all() and same(dirty[30:], rows[30:])
    broken = decode(case, partition=32, seed=1)
    assert np.isnan(broken[0]).all() and same(broken[1:], ends[1:])


def row_bytes(shape: Shape) -> int:
    return KVLayout(shape.dtype, shape.K, shape.S, shape.D).row_bytes


@pytest.mark.parametrize("partition", [512, 32])
def test_a_broken_sequence_does_not_reach_others(partition: int) -> None:
    case = make(Shape(H=2, K=1, D=32, dtype="BF16"), [12, 1, 20], [70, 90, 80])
    clean, ends = prefill(case), decode(case, partition=partition)
    case.cache[case.tables[1, 1], :, :, 3] = 0xFFFF
    dirty, broken = prefill(case, seed=1), decode(case, partition=partition, seed=1)
    assert same(dirty[:12], clean[:12]) and same(dirty[13:], clean[13:]) and np.isnan(dirty[12]).all()
    assert same(broken[::2], ends[::2]) and np.isnan(broken[1]).all()
