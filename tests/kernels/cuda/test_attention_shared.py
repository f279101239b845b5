"""attention_decode of the CUDA backend where sequences share blocks: each has the bits that it has alone; shared blocks are read once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.test_attention import GPU, close, decode, prefill, rounded, told
from tests.kernels.test_attention import Case, Shape, _ints, grouped, make, oracle, same, with_sinks
from tinyvllm.backends.cuda import attention_plan
from tinyvllm.backends.cuda import plan as records
from tinyvllm.backends.shapes import Attention
from tinyvllm.quant.kv import KV_FORMATS


def reading(
    case: Case, shared_prefix_lens: list[int] | None, grid: int | None = None, seed: int = 1, section: int = 4096
) -> tuple[np.ndarray, int]:
    """The output, and the number of tokens that were read from the cache."""
    read: list[int] = []
    out = decode(case, grid, None, section, seed, shared_prefix_lens, read)
    return out, read[4] // (2 * case.shape.K * -(-case.shape.H // case.shape.K // 16) * case.shape.D * 2)


def after_prefixes(shape: Shape, common: list[int], own: list[int], M: int | None = None) -> Case:
    """`common[b]` tokens are in the blocks of the sequence before, which has at least as many."""
    contexts = [o + max(common[b : b + 2]) for b, o in enumerate(own)]
    return make(shape, [1] * len(own), contexts, M=M, shared=common)


# Sequences in sixteen rows: 4, 2, 16, 3, 4, 1 with parts, 5, 2, 4, 1. Wide heads have one pass over a tile.
SHAPES = [
    Shape(H=4, K=1, D=32, dtype="BF16"),
    Shape(H=8, K=1, D=64, S=32, dtype="F16"),
    Shape(H=1, K=1, D=48, dtype="F16"),
    Shape(H=10, K=2, D=32, S=8, dtype="BF16"),
    with_sinks(Shape(H=4, K=1, D=128, dtype="F16", cap=2.0)),
    Shape(H=20, K=1, D=32, dtype="BF16"),
    Shape(H=3, K=1, D=80, S=64, dtype="BF16"),
    Shape(H=7, K=1, D=192, dtype="F16"),
    Shape(H=4, K=1, D=64, S=64, dtype="F16", window=700),
    Shape(H=16, K=1, D=64, dtype="BF16"),
    Shape(H=8, K=1, D=64, S=16, dtype="KV_FP8"),
    Shape(H=4, K=1, D=128, S=32, dtype="KV_INT8"),
    Shape(H=4, K=1, D=32, S=8, dtype="KV_INT4"),
]


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if i % 3 == 1 else pytest.mark.long) for i, s in enumerate(SHAPES)], ids=str)
def test_shared_blocks_read_once_give_the_same_bits(shape: Shape) -> None:
    """Trees of prefixes that diverge at the border of a partition and within one."""
    case = grouped(shape)
    want, separate = reading(case, [0] * len(case.new))
    close(want, oracle(rounded(case)), case)
    for grid, seed in ((2, 2), (7, 3)):
        got, once = reading(case, case.shared, grid, seed)
        assert same(got, want), f"{grid} thread blocks"
        assert once < 0.8 * separate
    got, read = reading(case, None, 5, seed=4)
    assert same(got, want) and read == separate, "by the kernel without CASCADE"


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[4]], ids=str)
def test_shared_prefix_lens_may_be_too_small(shape: Shape) -> None:
    case = grouped(shape)
    want, separate = reading(case, [0] * len(case.new))
    reads = [reading(case, case.shared, 3)[1]]
    for less in ([max(0, n - shape.S) for n in case.shared], [n // 2 // shape.S * shape.S for n in case.shared], [0] * len(case.new)):
        got, read = reading(case, less, 3, seed=2)
        assert same(got, want)
        reads.append(read)
    assert reads[0] < reads[1] <= reads[3] == separate and reads[2] <= separate


FOUR, TWO, WIDE = (Shape(H=H, K=1, D=D, dtype="BF16") for H, D in ((4, 32), (8, 64), (4, 128)))
# Sequences, shared tokens and own tokens of each, thread blocks, tokens that are read. Sixteen rows are those of four sequences, or two;
# a tile has two passes where there are more units than warps and heads are not wide.
READ = [
    (FOUR, 2, 512, 16, 1, 512 + 2 * 16),
    (FOUR, 8, 256, 16, 1, 256 + 8 * 16),
    (FOUR, 8, 256, 16, 40, 2 * 256 + 8 * 16),  # the maximum of units: one pass each
    (FOUR, 9, 256, 16, 1, 2 * 256 + 9 * 16),
    (FOUR, 4, 512, 60, 3, 512 + 4 * 60),
    (FOUR, 4, 400, 16, 1, 256 + 4 * 160),  # the partition in which they diverge is read by each
    (FOUR, 4, 240, 16, 1, 4 * 256),
    (TWO, 8, 256, 16, 1, 2 * 256 + 8 * 16),
    (TWO, 8, 256, 16, 40, 4 * 256 + 8 * 16),
    (WIDE, 8, 256, 16, 1, 2 * 256 + 8 * 16),
    (TWO, 64, 512, 64, 100, 16 * 512 + 64 * 64),  # as a KV head of the 1.1B shape, except for the length
    (WIDE, 64, 512, 64, 50, 16 * 512 + 64 * 64),  # and of the 8B shape
]


@pytest.mark.parametrize("shape, sequences, common, own, grid, tokens", READ)
def test_tokens_read_from_the_cache(shape: Shape, sequences: int, common: int, own: int, grid: int, tokens: int) -> None:
    case = after_prefixes(shape, [0] + [common] * (sequences - 1), [own] * sequences)
    whole = lambda n: -(-n // shape.S) * shape.S  # noqa: E731  hidden tokens of a block are skipped or read as zeros
    want, separate = reading(case, [0] * sequences, grid)
    assert sequences * (common + own) <= separate <= sequences * whole(common + own)
    got, once = reading(case, case.shared, grid, seed=3)
    assert same(got, want) and tokens <= once <= tokens + sequences * (whole(own) - own)


def test_traffic_of_packed_caches() -> None:
    """256 sequences: of the cache, and of all that is read, queries and tables too."""
    cache, total = {}, {}
    for dtype in ("BF16", *KV_FORMATS):
        case = make(Shape(H=4, K=1, D=64, dtype=dtype), [1] * 256, [48 + b % 5 * 16 for b in range(256)])
        read: list[int] = []
        decode(case, grid=64, read=read)
        cache[dtype], total[dtype] = read[4], sum(read)
    assert {name: round(number / cache["BF16"], 3) for name, number in cache.items()} == {
        "BF16": 1,
        "KV_FP8": 0.516,
        "KV_INT8": 0.516,
        "KV_INT4": 0.266,
    }
    assert total["KV_FP8"] == total["KV_INT8"] < 0.6 * total["BF16"] and total["KV_INT4"] < 0.37 * total["BF16"]


def test_a_group_may_begin_inside_a_bundle() -> None:
    """Three sequences that share nothing come before eight that do."""
    case = after_prefixes(FOUR, [0, 0, 0, 0] + [256] * 7, [20, 20, 20] + [16] * 8)
    got, once = reading(case, case.shared, 1)
    assert same(got, decode(case, seed=5)) and once == 3 * 20 + 256 + 8 * 16


@pytest.mark.parametrize("longest", [0, 2, 4])
def test_one_sequence_that_is_much_longer(longest: int) -> None:
    """Sections of 512: its own tokens fill some of them, with and without shared ones."""
    own = [1500 if b == longest else 30 for b in range(5)]
    case = after_prefixes(FOUR, [0, 768, 768, 512, 512], own, M=144)
    want, separate = reading(case, [0] * 5, section=512)
    close(want, oracle(rounded(case)), case)
    assert same(want, prefill(case, section=512))
    for grid, seed in ((1, 1), (3, 2), (17, 3)):
        got, once = reading(case, case.shared, grid, seed, section=512)
        assert same(got, want) and once < separate, f"{grid} thread blocks"


def test_all_but_the_last_block_is_shared() -> None:
    """Also where that is the first of a partition, and where it is the last of one."""
    for tokens in (512, 496):
        case = after_prefixes(FOUR, [0] + [tokens] * 6, [1, 5, 16, 1, 2, 3, 16])
        got, once = reading(case, case.shared, 2)
        assert same(got, decode(case, seed=3)) and once < 0.7 * sum(case.context)


def test_more_sequences_than_lanes() -> None:
    """70 of them: a group that shares begins among the first 32 and ends among the third."""
    common = [0 if b % 25 == 7 or b == 0 else 256 for b in range(70)]
    case = after_prefixes(Shape(H=2, K=1, D=32, dtype="BF16"), common, [1 + 7 * b % 40 for b in range(70)])
    want, separate = reading(case, [0] * 70)
    for grid, seed in ((1, 1), (9, 2)):
        got, once = reading(case, case.shared, grid, seed)
        assert same(got, want) and once < separate / 3


def test_sequences_that_do_not_count_are_in_no_group() -> None:
    case = after_prefixes(FOUR, [0, 256, 256, 256, 256], [44, 34, 54, 39, 24])
    out = decode(case, count=2, shared_prefix_lens=case.shared)
    assert same(out[:2], decode(case)[:2]) and (out[2:].view(np.uint32) == 0xFFFFFFFF).all()
    assert (decode(case, count=0, shared_prefix_lens=case.shared).view(np.uint32) == 0xFFFFFFFF).all()


def test_padding_has_no_context() -> None:
    """As in the engine: contexts of 0 and arbitrary tables after the sequences that count."""
    case = after_prefixes(FOUR, [0, 256, 256, 0, 0], [44, 34, 54, 20, 20])
    want = decode(case)
    case.context[3:], case.tables[3:] = [0, 0], 2**30
    assert same(decode(case, grid=2, count=3, shared_prefix_lens=[0, 256, 256, 0, 0])[:3], want[:3])


def test_shared_tokens_are_read_from_the_sequence_before() -> None:
    """Sequence 1 is wrongly declared to share with sequence 0: it gets what it would get with such a table."""
    case = make(FOUR, [1, 1, 1], [400, 330, 350])
    wrong, right = decode(case, shared_prefix_lens=[0, 320, 0]), decode(case)
    assert same(wrong[[0, 2]], right[[0, 2]]) and not same(wrong[1:2], right[1:2])
    case.tables[1, : 256 // case.shape.S] = case.tables[0, : 256 // case.shape.S]
    assert same(wrong, decode(case))


def test_too_large_shared_prefix_lens_leave_the_counters_at_zero() -> None:
    """More than the sequence before has, or than there is: `decode` checks the counters, and other sequences are unaffected."""
    case = make(FOUR, [1] * 4, [300, 700, 260, 600])
    out = decode(case, shared_prefix_lens=[0, 640, 4096, 0])
    assert same(out[[0, 3]], decode(case)[[0, 3]])


def test_a_broken_sequence_does_not_affect_those_it_shares_with() -> None:
    case = after_prefixes(FOUR, [0] + [400] * 3, [30, 60, 90, 120])
    clean = decode(case)
    case.cache[case.tables[1, 440 // 16], :, :, 8] = 0xFFFF
    broken = decode(case, grid=2, shared_prefix_lens=case.shared)
    assert same(broken[[0, 2, 3]], clean[[0, 2, 3]]) and np.isnan(broken[1]).all()


def test_sharing_changes_between_launches() -> None:
    """Scratch and counters are what the previous launch left, in which other sequences shared."""
    case = grouped(FOUR)
    want, B = decode(case), len(case.new)
    kernel, floats, counts = attention_plan.attention_decode("sm_90", B, told(case), GPU, cascade=True)
    kernel = dataclasses.replace(kernel, grid=(6, 1, 1))
    out, partial, counters = aligned(want.shape, np.float32), aligned((floats,), np.float32), aligned((counts,), np.uint32, 0)
    for seed, shared_prefix_lens in enumerate((case.shared, [0] * B, [n // 32 * 16 for n in case.shared], case.shared)):
        out[...] = np.nan
        ins = case.q, case.cache, case.tables, _ints(case.context), _ints([B]), _ints(shared_prefix_lens)
        emulate(kernel, out, partial, counters, *ins, seed=seed)
        assert same(out, want) and not counters.any()


@pytest.mark.parametrize("H, K, D", [(32, 4, 64), (32, 8, 128), (16, 8, 128), (64, 8, 128), (12, 12, 64)])
def test_occupancy_is_the_same_with_and_without_sharing(H: int, K: int, D: int) -> None:
    """Grid and shared memory are equal; the space of followers stays within its limit, and suffices for prefixes of thousands of tokens."""
    gpu = records.GPU(132, 227 << 10, 228 << 10)
    for B, M in ((8, 512), (64, 512), (64, 8192), (256, 512)):
        told = Attention(H, K, D, 16, M, "BF16", "0.125f", 0)
        (alone, floats, _), (shared, more, _) = (attention_plan.attention_decode("sm_80", B, told, gpu, cascade=c) for c in (False, True))
        assert (alone.grid, alone.shared, alone.block) == (shared.grid, shared.shared, shared.block)
        assert 0 < 4 * (more - floats) <= attention_plan.FOLLOWING and shared.integers[1] >= min(16, M // 16)
        assert alone.ins == 5 and shared.ins == 6 and "CASCADE" not in dict(alone.defines)


def test_no_cascade_where_nothing_could_be_shared() -> None:
    """One sequence; heads whose rows and sums fill the registers; too many sequences for the space of followers."""
    for B, H, D, M in ((1, 32, 64, 512), (64, 128, 128, 512), (64, 8, 256, 512), (256, 64, 128, 8192)):
        told = Attention(H, 8, D, 16, M, "BF16", "0.125f", 0)
        assert attention_plan.attention_decode("sm_80", B, told, GPU, cascade=True) == attention_plan.attention_decode(
            "sm_80", B, told, GPU
        )
