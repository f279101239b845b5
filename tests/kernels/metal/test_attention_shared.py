"""attention_decode of the Metal backend where sequences share blocks: each has the bits that it has alone.

Partitions of 128 keys and SPREAD 1, so that small caches have units.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.metal.test_attention import TOLERANCE, VARIANT, attention_shape, decode, launch_decode
from tests.kernels.test_attention import Case, Shape, _ints, grouped, make, oracle, same, with_sinks
from tinyvllm.backends.metal import plan as records

PARTITION = 128
# Of each sequence of a group: its own tokens, and those in the blocks of the sequence before it. One, two, three of which one is much
# longer, nine that diverge in the middle of a partition, and a group that diverges step by step.
GROUPS = [
    [(30, 0)],
    [(40, 160), (9, 160)],
    [(1, 128), (200, 128), (17, 64)],
    [(1 + 13 * i % 50, 208) for i in range(9)],
    [(30, 256), (31, 256), (32, 192), (150, 192), (3, 64), (17, 32), (1, 32)],
]


def decode_shared(
    case: Case,
    shared_prefix_lens: list[int],
    simds: int = 8,
    seed: int = 0,
    spread: int = 1,
    count: int | None = None,
    read: list[int] | None = None,
    variant: str = VARIANT,
) -> np.ndarray:
    """The one row of each sequence, with these shared lengths."""
    B = len(case.new)
    kernels, words = records.attention_decode(
        variant, B, attention_shape(case), partition=PARTITION, simds=simds, cascade=True, spread=spread
    )
    counted = B if count is None else count
    return launch_decode(kernels, words, case.q, case, counted, _ints(shared_prefix_lens), seed=seed, read=read)


# Each has its own division of a tile, its own number of sequences in a unit, and of stripes that are computed at the same time.
SHAPES = [
    (Shape(H=4, K=1, D=64, dtype="F16"), 8),
    (Shape(H=8, K=1, D=64, S=32, dtype="BF16"), 8),
    (Shape(H=7, K=1, D=64, dtype="BF16"), 5),
    (Shape(H=2, K=2, D=128, S=8, dtype="F16"), 16),
    (Shape(H=2, K=1, D=128, dtype="BF16"), 4),
    (with_sinks(Shape(H=10, K=1, D=128, dtype="F16", cap=2.0)), 8),
    (Shape(H=4, K=1, D=128), 8),
    (Shape(H=3, K=1, D=80, dtype="F16"), 8),
    (Shape(H=2, K=1, D=48), 8),
    (Shape(H=2, K=1, D=256, dtype="BF16"), 6),
    (Shape(H=3, K=3, D=64, dtype="F16", window=150), 4),
    (Shape(H=4, K=1, D=64, dtype="KV_INT8"), 8),
    (Shape(H=4, K=1, D=128, S=8, dtype="KV_INT4"), 8),
]
MORE_SHAPES = [
    (Shape(H=3, K=1, D=512, dtype="BF16"), 8),
    (Shape(H=3, K=1, D=512, dtype="KV_INT4"), 8),
    (Shape(H=8, K=1, D=64, dtype="KV_INT8"), 8),
    (Shape(H=2, K=1, D=256, dtype="KV_INT8"), 6),
    (Shape(H=8, K=1, D=64, S=32, dtype="KV_INT4"), 8),
    (Shape(H=2, K=2, D=48, dtype="KV_INT4", window=150), 5),
    (Shape(H=4, K=1, D=64, dtype="KV_FP8"), 8),
    (Shape(H=3, K=1, D=80, dtype="KV_FP8"), 4),
]


@pytest.mark.parametrize("shape, simds", [*SHAPES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_SHAPES)], ids=str)
def test_shared_blocks_read_once_give_the_same_bits(shape: Shape, simds: int) -> None:
    case = grouped(shape, groups=GROUPS)
    apart: list[int] = []
    once: list[int] = []
    want = decode_shared(case, [0] * len(case.new), simds, read=apart)
    np.testing.assert_allclose(want, oracle(case), **TOLERANCE)
    assert same(decode_shared(case, case.shared, simds, seed=1, read=once), want)
    assert not once or once[3] < 0.85 * apart[3], "bytes of the cache, where they are counted"


@pytest.mark.parametrize("shape, simds", [SHAPES[0], SHAPES[5]], ids=["small", "of two parts"])
def test_a_second_launch_merges_units_to_the_same_bits(shape: Shape, simds: int) -> None:
    case = grouped(shape, groups=GROUPS)
    want = decode_shared(case, case.shared, simds)
    assert same(decode_shared(case, case.shared, simds, seed=1, variant=records.MERGE), want)


@pytest.mark.parametrize("spread", [1, 30, 1000])
def test_smaller_shared_lengths_give_the_same_bits(spread: int) -> None:
    case = grouped(Shape(H=2, K=1, D=128, dtype="F16"), groups=GROUPS)
    want = decode(case, partition=PARTITION, simds=8)  # by the kernel without CASCADE
    for shared_prefix_lens in (case.shared, [max(0, n - 16) for n in case.shared], [n // 32 * 16 for n in case.shared]):
        assert same(decode_shared(case, shared_prefix_lens, seed=2, spread=spread), want)


def test_a_longer_sequence_continues_alone() -> None:
    case = make(Shape(H=2, K=1, D=64, dtype="F16"), [1] * 4, [144, 144, 700, 144], shared=[0, 128, 128, 128])
    assert same(decode_shared(case, case.shared), decode(case, partition=PARTITION, simds=8))


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_invalid_rows_are_in_no_unit(count: int) -> None:
    """Rows from the count on are padding: their tables, contexts and shared lengths have no meaning."""
    case = make(Shape(H=4, K=1, D=64, dtype="BF16"), [1] * 5, [300, 290, 310, 295, 280], shared=[0, 256, 256, 256, 256])
    want = decode(case, partition=PARTITION, simds=8)
    case.tables[count:], case.context[count:] = 2**30, [2**30] * (5 - count)
    out = decode_shared(case, case.shared, count=count)
    assert same(out[:count], want[:count]) and (out[count:].view(np.uint32) == 0xFFFFFFFF).all()


def test_shared_tokens_are_read_from_the_sequence_before() -> None:
    """Sequence 1 has a wrong shared length: it gets the result of sequence 0's blocks, as if its table had them."""
    case = make(Shape(H=4, K=2, D=64, dtype="F16"), [1, 1, 1], [330, 300, 350])
    wrong, right = decode_shared(case, [0, 256, 0]), decode_shared(case, [0, 0, 0])
    assert same(wrong[[0, 2]], right[[0, 2]]) and not same(wrong[1:2], right[1:2])
    case.tables[1, : 256 // 16] = case.tables[0, : 256 // 16]
    assert same(wrong, decode_shared(case, [0, 0, 0]))


def test_a_broken_sequence_does_not_affect_those_that_share_with_it() -> None:
    case = make(Shape(H=2, K=1, D=64, dtype="BF16"), [1] * 4, [210, 200, 214, 220], shared=[0, 192, 192, 192])
    clean = decode_shared(case, case.shared)
    case.cache[case.tables[2, 12], :, :, 3] = 0xFFFF
    broken = decode_shared(case, case.shared, seed=1)
    assert same(broken[[0, 1, 3]], clean[[0, 1, 3]]) and np.isnan(broken[2]).all()


def test_shared_lengths_change_under_one_launch() -> None:
    """A captured launch has one text, grid and arguments, whatever the shared lengths are."""
    apart = make(Shape(H=4, K=1, D=64, dtype="F16"), [1] * 6, [200] * 6)
    shared = make(apart.shape, [1] * 6, [200] * 6, shared=[0, 192, 192, 0, 128, 128])
    for case in (apart, shared, apart):
        np.testing.assert_allclose(decode_shared(case, case.shared), oracle(case), **TOLERANCE)
