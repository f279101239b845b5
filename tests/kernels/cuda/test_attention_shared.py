"""attention_decode of the CUDA backend where sequences share blocks: the bits that each has alone, and what is read of the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.test_attention import GPU, close, decode, prefill, rounded, told
from tests.kernels.test_attention import Case, Shape, _ints, grouped, make, oracle, same
from tinyvllm.backends.cuda import plan as records


def reading(
    case: Case, shared_prefix_lens: list[int] | None, grid: int | None = None, seed: int = 1, section: int = 4096
) -> tuple[np.ndarray, int]:
    """What comes out, and the tokens that are read of the cache."""
    read: list[int] = []
    out = decode(case, grid, None, section, seed, shared_prefix_lens, read)
    return out, read[4] // (2 * case.shape.K * -(-case.shape.H // case.shape.K // 16) * case.shape.D * 2)


def behind(shape: Shape, common: list[int], own: list[int], M: int | None = None) -> Case:
    """`common[b]` tokens lie in the blocks of the sequence before, which has at least as many."""
    contexts = [o + max(common[b : b + 2]) for b, o in enumerate(own)]
    return make(shape, [1] * len(own), contexts, M=M, shared=common)


# Each has another number of sequences in sixteen rows: 4, 2, 16, 3, 4, 1 with parts, 5, 2, 4, 1. The wide ones have one mma to a tile.
SHAPES = [
    Shape(H=4, K=1, D=32, dtype="BF16"),
    Shape(H=8, K=1, D=64, S=32, dtype="F16"),
    Shape(H=1, K=1, D=48, dtype="F16"),
    Shape(H=10, K=2, D=32, S=8, dtype="BF16"),
    Shape(H=4, K=1, D=128, dtype="F16"),
    Shape(H=20, K=1, D=32, dtype="BF16"),
    Shape(H=3, K=1, D=80, S=64, dtype="BF16"),
    Shape(H=7, K=1, D=192, dtype="F16"),
    Shape(H=4, K=1, D=64, S=64, dtype="F16", window=700),
    Shape(H=16, K=1, D=64, dtype="BF16"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shared_blocks_read_once_give_the_same_bits(shape: Shape) -> None:
    """Trees of prefixes that part at the border of a chunk and within it."""
    case = grouped(shape)
    want, apart = reading(case, [0] * len(case.new))
    close(want, oracle(rounded(case)), case)
    for grid, seed in ((2, 2), (7, 3)):
        got, once = reading(case, case.shared, grid, seed)
        assert same(got, want), f"{grid} blocks of threads"
        assert once < 0.8 * apart
    got, read = reading(case, None, 5, seed=4)
    assert same(got, want) and read == apart, "by the kernel that knows nothing of sharing"


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[4]], ids=str)
def test_less_may_be_said_to_be_shared_than_is(shape: Shape) -> None:
    case = grouped(shape)
    want, apart = reading(case, [0] * len(case.new))
    reads = [reading(case, case.shared, 3)[1]]
    for less in ([max(0, n - shape.S) for n in case.shared], [n // 2 // shape.S * shape.S for n in case.shared], [0] * len(case.new)):
        got, read = reading(case, less, 3, seed=2)
        assert same(got, want)
        reads.append(read)
    assert reads[0] < reads[1] <= reads[3] == apart and reads[2] <= apart


FOUR, TWO, WIDE = (Shape(H=H, K=1, D=D, dtype="BF16") for H, D in ((4, 32), (8, 64), (4, 128)))
# Sequences, tokens in common and own tokens of each, blocks of threads, tokens that are read. Sixteen rows are those of four sequences, or
# two; two sixteens where there are more units than warps, and heads are not wide.
READ = [
    (FOUR, 2, 512, 16, 1, 512 + 2 * 16),
    (FOUR, 8, 256, 16, 1, 256 + 8 * 16),
    (FOUR, 8, 256, 16, 40, 2 * 256 + 8 * 16),  # as many units as there can be: one mma each
    (FOUR, 9, 256, 16, 1, 2 * 256 + 9 * 16),
    (FOUR, 4, 512, 60, 3, 512 + 4 * 60),
    (FOUR, 4, 400, 16, 1, 256 + 4 * 160),  # the chunk in which they part is read by each
    (FOUR, 4, 240, 16, 1, 4 * 256),
    (TWO, 8, 256, 16, 1, 2 * 256 + 8 * 16),
    (TWO, 8, 256, 16, 40, 4 * 256 + 8 * 16),
    (WIDE, 8, 256, 16, 1, 2 * 256 + 8 * 16),
    (TWO, 64, 512, 64, 100, 16 * 512 + 64 * 64),  # as a key/value head of the 1.1B shape, but for the length
    (WIDE, 64, 512, 64, 50, 16 * 512 + 64 * 64),  # and of the 8B shape
]


@pytest.mark.parametrize("shape, sequences, common, own, grid, tokens", READ)
def test_what_is_read_of_the_cache(shape: Shape, sequences: int, common: int, own: int, grid: int, tokens: int) -> None:
    case = behind(shape, [0] + [common] * (sequences - 1), [own] * sequences)
    whole = lambda n: -(-n // shape.S) * shape.S  # noqa: E731  of a block, what is not seen is left out or read as zeros
    want, apart = reading(case, [0] * sequences, grid)
    assert sequences * (common + own) <= apart <= sequences * whole(common + own)
    got, once = reading(case, case.shared, grid, seed=3)
    assert same(got, want) and tokens <= once <= tokens + sequences * (whole(own) - own)


def test_a_group_need_not_begin_where_a_bundle_would() -> None:
    """Three that share nothing stand before eight that do."""
    case = behind(FOUR, [0, 0, 0, 0] + [256] * 7, [20, 20, 20] + [16] * 8)
    got, once = reading(case, case.shared, 1)
    assert same(got, decode(case, seed=5)) and once == 3 * 20 + 256 + 8 * 16


@pytest.mark.parametrize("longest", [0, 2, 4])
def test_one_that_is_much_longer(longest: int) -> None:
    """Stretches of 512: its own tokens fill some of them, with those in common and without."""
    own = [1500 if b == longest else 30 for b in range(5)]
    case = behind(FOUR, [0, 768, 768, 512, 512], own, M=144)
    want, apart = reading(case, [0] * 5, section=512)
    close(want, oracle(rounded(case)), case)
    assert same(want, prefill(case, section=512))
    for grid, seed in ((1, 1), (3, 2), (17, 3)):
        got, once = reading(case, case.shared, grid, seed, section=512)
        assert same(got, want) and once < apart, f"{grid} blocks of threads"


def test_they_share_all_but_the_last_block() -> None:
    """Also where that is the first of a chunk, and where it is the last of one."""
    for tokens in (512, 496):
        case = behind(FOUR, [0] + [tokens] * 6, [1, 5, 16, 1, 2, 3, 16])
        got, once = reading(case, case.shared, 2)
        assert same(got, decode(case, seed=3)) and once < 0.7 * sum(case.context)


def test_more_sequences_than_lanes() -> None:
    """70 of them: those that share begin in one 32 and end in the third."""
    common = [0 if b % 25 == 7 or b == 0 else 256 for b in range(70)]
    case = behind(Shape(H=2, K=1, D=32, dtype="BF16"), common, [1 + 7 * b % 40 for b in range(70)])
    want, apart = reading(case, [0] * 70)
    for grid, seed in ((1, 1), (9, 2)):
        got, once = reading(case, case.shared, grid, seed)
        assert same(got, want) and once < apart / 3


def test_sequences_that_do_not_count_are_in_no_group() -> None:
    case = behind(FOUR, [0, 256, 256, 256, 256], [44, 34, 54, 39, 24])
    out = decode(case, count=2, shared_prefix_lens=case.shared)
    assert same(out[:2], decode(case)[:2]) and (out[2:].view(np.uint32) == 0xFFFFFFFF).all()
    assert (decode(case, count=0, shared_prefix_lens=case.shared).view(np.uint32) == 0xFFFFFFFF).all()


def test_padding_has_no_context() -> None:
    """As the engine lays it out: contexts of 0 and tables of anything behind the sequences that count."""
    case = behind(FOUR, [0, 256, 256, 0, 0], [44, 34, 54, 20, 20])
    want = decode(case)
    case.context[3:], case.tables[3:] = [0, 0], 2**30
    assert same(decode(case, grid=2, count=3, shared_prefix_lens=[0, 256, 256, 0, 0])[:3], want[:3])


def test_what_is_said_to_be_shared_is_read_from_the_one_before() -> None:
    """Sequence 1 is wrongly said to begin as sequence 0 does: it gets what it would get if its table said so, too."""
    case = make(FOUR, [1, 1, 1], [400, 330, 350])
    wrong, right = decode(case, shared_prefix_lens=[0, 320, 0]), decode(case)
    assert same(wrong[[0, 2]], right[[0, 2]]) and not same(wrong[1:2], right[1:2])
    case.tables[1, : 256 // case.shape.S] = case.tables[0, : 256 // case.shape.S]
    assert same(wrong, decode(case))


def test_too_much_said_to_be_shared_leaves_nothing_behind() -> None:
    """More than the one before has, or than there is: `decode` finds the counters at zero, and others as they are."""
    case = make(FOUR, [1] * 4, [300, 700, 260, 600])
    out = decode(case, shared_prefix_lens=[0, 640, 4096, 0])
    assert same(out[[0, 3]], decode(case)[[0, 3]])


def test_a_broken_sequence_does_not_reach_those_it_shares_with() -> None:
    case = behind(FOUR, [0] + [400] * 3, [30, 60, 90, 120])
    clean = decode(case)
    case.cache[case.tables[1, 440 // 16], :, :, 8] = 0xFFFF
    broken = decode(case, grid=2, shared_prefix_lens=case.shared)
    assert same(broken[[0, 2, 3]], clean[[0, 2, 3]]) and np.isnan(broken[1]).all()


def test_who_shares_changes_under_one_launch() -> None:
    """Scratch and counters are what the launch before left, by which others were together."""
    case = grouped(FOUR)
    want, B = decode(case), len(case.new)
    kernel, floats, counts = records.attention_decode("sm_90", B, told(case), GPU, cascade=True)
    kernel = dataclasses.replace(kernel, grid=(6, 1, 1))
    out, partial, counters = aligned(want.shape, np.float32), aligned((floats,), np.float32), aligned((counts,), np.uint32, 0)
    for seed, shared_prefix_lens in enumerate((case.shared, [0] * B, [n // 32 * 16 for n in case.shared], case.shared)):
        out[...] = np.nan
        ins = case.q, case.cache, case.tables, _ints(case.context), _ints([B]), _ints(shared_prefix_lens)
        emulate(kernel, out, partial, counters, *ins, seed=seed)
        assert same(out, want) and not counters.any()


@pytest.mark.parametrize("H, K, D", [(32, 4, 64), (32, 8, 128), (16, 8, 128), (64, 8, 128), (12, 12, 64)])
def test_what_a_launch_has_of_a_multiprocessor_is_what_it_has_without(H: int, K: int, D: int) -> None:
    """Grid and shared memory are one; room for those that follow stays within its bounds, and is there for prefixes of thousands."""
    gpu = records.GPU(132, 227 << 10, 228 << 10)
    for B, M in ((2, 512), (64, 512), (64, 8192), (256, 512)):
        told = records.Attention(H, K, D, 16, M, "BF16", "0.125f", 0)
        (alone, floats, _), (shared, more, _) = (records.attention_decode("sm_80", B, told, gpu, cascade=c) for c in (False, True))
        assert (alone.grid, alone.shared, alone.block) == (shared.grid, shared.shared, shared.block)
        assert 0 < 4 * (more - floats) <= records.FOLLOWING and dict(shared.defines)["CASCADE"] >= min(16, M // 16)
        assert alone.ins == 5 and shared.ins == 6 and "CASCADE" not in dict(alone.defines)


def test_nothing_is_asked_for_where_nothing_could_be_shared() -> None:
    """One sequence; heads whose rows and sums fill the registers; so many sequences that there is no room."""
    for B, H, D, M in ((1, 32, 64, 512), (64, 128, 128, 512), (64, 8, 256, 512), (256, 64, 128, 8192)):
        told = records.Attention(H, 8, D, 16, M, "BF16", "0.125f", 0)
        assert records.attention_decode("sm_80", B, told, GPU, cascade=True) == records.attention_decode("sm_80", B, told, GPU)
