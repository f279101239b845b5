"""The CUDA kernels of ranks that divide contexts, in the emulator: each rank has the bits of one GPU.

Ranks run one after the other, as if the others were there: `Ranks`. Ranks that wait for each other are processes of their own:
tests/emulator/test_context.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.test_attention import GPU, decode, prefill, told
from tests.kernels.cuda.test_ranks import LATER, WORDS
from tests.kernels.cuda.tiles import laid, numbers
from tests.kernels.test_attention import Case, Shape, _ints, make, same, with_sinks
from tests.kernels.test_attention_ranks import parts_of
from tinyvllm.backends.cuda import context_plan, plan
from tinyvllm.backends.kernel import Kernel
from tinyvllm.integers import ceil_div
from tinyvllm.placement import RankGroup

TURN = 6  # launches have met before
PIECE = 4096  # float32: of kernels/cuda/gather_blocks.cu


class Ranks:
    """Sites of `world` ranks, whose words say that all have met in every round: a rank that runs waits for none."""

    def __init__(self, world: int, place: int):
        self.groups = [RankGroup(rank, world, None, place, 0) for rank in range(world)]
        self.sites = [aligned((WORDS + 8 * place,), np.uint8) for _ in range(world)]
        self.places = [site[WORDS:].view(np.float32).reshape(2, place) for site in self.sites]
        self.shared, self.turns = aligned((4096,), np.uint8, 0), [laid(np.array([TURN, 0], np.uint32)) for _ in range(world)]

    def emulate(self, kernel: Kernel, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray], seed: int = 0) -> None:
        """A kernel in which ranks meet: with `meeting` in `outs`."""
        for site in self.sites:
            site[:WORDS].view(np.uint32)[:] = LATER
        emulate(kernel, *outs, self.shared, *ins, seed=seed)

    def meeting(self, rank: int) -> list[np.ndarray]:
        """What a rank writes where it meets the others."""
        return [self.turns[rank], *self.sites]


def sectioned(kernel: Kernel, section: int) -> Kernel:
    return replace(kernel, defines=(*kernel.defines, ("SECTION", section)))


def decoded(case: Case, world: int, at_once: int, section: int, seed: int = 0) -> list[np.ndarray]:
    """The last row of each sequence, as each rank has it: `at_once` sequences a launch, in two places in turn."""
    s, (pools, tables) = case.shape, parts_of(case, world)
    B, M = tables.shape
    a = replace(told(case), M=M)
    ranks = Ranks(world, ceil_div(at_once * M * s.H * (s.D + 2), 4) * 4)
    last, counts, context = laid(case.q[case.starts[1:] - 1]), _ints([B]), _ints(case.context)
    outs = [aligned(last.shape, np.float32) for _ in range(world)]
    for first in range(0, B, at_once):
        count = min(at_once, B - first)
        for rank, group in enumerate(ranks.groups):
            assert context_plan.sequences_at_once(a, group) == at_once
            kernel = context_plan.attention_decode_ranks("sm_80", first, count, a, GPU, group)
            emulate(kernel, ranks.sites[rank], ranks.turns[rank], last, pools[rank], tables, context, counts, outs[rank], seed=seed)
        for rank, group in enumerate(ranks.groups):
            kernel = sectioned(context_plan.merge_ranks("sm_80", first, count, a, group), section)
            ranks.emulate(kernel, [outs[rank], *ranks.meeting(rank)], [context, *s.sink_arrays, counts], seed)
    assert all(turns.tolist() == [TURN + ceil_div(B, at_once), 0] for turns in ranks.turns)
    return outs


CONTEXTS = [1, 256, 300, 1100, 257, 2, 770]
SHAPES = [
    Shape(H=8, K=2, D=64, S=256, dtype="BF16"),
    with_sinks(Shape(H=3, K=3, D=48, S=256, dtype="F16", cap=2.0)),
    Shape(H=4, K=2, D=128, S=256, dtype="F16", window=300),
    Shape(H=4, K=4, D=64, S=256, dtype="KV_INT8", window=70),
    Shape(H=20, K=1, D=32, S=256, dtype="KV_INT4"),
    Shape(H=2, K=1, D=512, S=256, dtype="BF16", window=520),
    Shape(H=4, K=1, D=96, S=256, dtype="KV_FP8"),
]
FEW = [(SHAPES[0], 2), (SHAPES[2], 4), (SHAPES[3], 2)]


@pytest.mark.parametrize(
    ("shape", "world"),
    [*FEW, *(pytest.param(shape, world, marks=pytest.mark.long) for shape in SHAPES for world in (2, 4, 8) if (shape, world) not in FEW)],
    ids=str,
)
def test_decodes_have_the_bits_of_one_gpu(shape: Shape, world: int) -> None:
    case = make(shape, [1] * len(CONTEXTS), CONTEXTS)
    for section, at_once in ((4096, 3), (512, 7)):
        want = decode(case, section=section)
        for rank, out in enumerate(decoded(case, world, at_once, section, seed=world)):
            assert same(out, want), (section, rank)


def test_more_sequences_than_a_warp_looks_at_together() -> None:
    """Some ranks have no key of most of them."""
    contexts = [1 + (37 * i) % 600 for i in range(40)]
    case = make(Shape(H=2, K=1, D=32, S=256, dtype="BF16"), [1] * 40, contexts)
    for out in decoded(case, 4, 40, 4096):
        assert same(out, decode(case))


NEW = [1, 1, 90, 3, 200]
LENGTHS = [300, 1, 700, 512, 200]
DECODES = 2


def gathered(case: Case, world: int, place: int) -> tuple[list[list[np.ndarray]], np.ndarray, list[np.ndarray], int]:
    """The blocks of all ranks as each has them, the tables, each rank's pool, and how many rounds that took."""
    pools, tables = parts_of(case, world)
    a, ranks = replace(told(case), M=tables.shape[1]), Ranks(world, place)
    ins = [case.q, tables, _ints(case.context), case.starts, _ints([DECODES, len(case.new) - DECODES])]
    held = [
        [pools[other] if other == rank else aligned(pools[other].shape, pools[other].dtype, 0) for other in range(world)]
        for rank in range(world)
    ]
    for turn in range(2):  # others' blocks are there once they have run
        for rank, group in enumerate(ranks.groups):
            ranks.turns[rank][:] = [TURN, 0]
            kernel = context_plan.gather_blocks("sm_80", a, pools[0][0].nbytes, group)
            ranks.emulate(kernel, [*ranks.meeting(rank), *held[rank]], ins, seed=turn)
    return held, tables, pools, int(ranks.turns[0][0]) - TURN


@pytest.mark.parametrize(
    ("shape", "world"),
    [*FEW, *(pytest.param(shape, world, marks=pytest.mark.long) for shape in SHAPES for world in (2, 4, 8) if (shape, world) not in FEW)],
    ids=str,
)
def test_rows_of_prompts_have_the_bits_of_one_gpu(shape: Shape, world: int) -> None:
    """Each rank has its own rows, and no other rank's that are far from them."""
    case = make(shape, NEW, LENGTHS)
    held, tables, _, rounds = gathered(case, world, 1 << 20)
    assert rounds == 1
    want, a, rows = prefill(case, first=DECODES), replace(told(case), M=tables.shape[1]), sum(NEW)
    for rank in range(world):
        group = RankGroup(rank, world, None, 4, 0)
        kernel = context_plan.attention_prefill("sm_80", rows, len(NEW), a, GPU, group)
        out = aligned(case.q.shape, np.float32)
        counts = [_ints([rows]), _ints([DECODES, len(NEW) - DECODES])]
        emulate(kernel, out, case.q, *held[rank], tables, _ints(case.context), case.starts, *shape.sink_arrays, *counts, seed=rank)
        first, end = max(DECODES, rank * rows // world), (rank + 1) * rows // world
        assert same(out[first:end], want[first:end]), rank
        assert np.isnan(out[:DECODES]).all() and np.isnan(out).all(axis=(1, 2)).sum() > rows // 4


def test_blocks_in_rounds() -> None:
    """More pieces than a place has room for: some of a block in one round, the others in the next. Further rounds need ranks that run."""
    case = make(SHAPES[0], NEW, LENGTHS)
    pieces = ceil_div(parts_of(case, 2)[0][0][0].nbytes, 4 * PIECE)
    held, tables, pools, rounds = gathered(case, 2, (pieces + 1) * PIECE * 2)
    seen = tables[DECODES:][tables[DECODES:] < 2**30]
    assert rounds == 2 and len(seen) == 4
    for rank, blocks in enumerate(held):
        for other in range(2):
            got, want = blocks[other][seen], pools[other][seen]
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
            rest = np.setdiff1d(np.arange(len(pools[0])), seen)
            assert rank == other or not blocks[other][rest].any(), "no other block is copied"


@pytest.mark.parametrize(("world", "T", "rows", "room"), [(2, 9, 9, 5), (2, 9, 9, 3), (4, 7, 6, 9), (8, 5, 3, 1), (2, 3, 0, 1)])
def test_rows_of_all_ranks(world: int, T: int, rows: int, room: int) -> None:
    """Each takes its own, and gets those of all, `room` of each rank at a time."""
    x, count, E = numbers(T, 48), laid(np.array([rows], np.int32)), 48
    ranks, parts = Ranks(world, room * E), []
    for rank, group in enumerate(ranks.groups):
        part, own = aligned((ceil_div(T, world), E), np.float32), aligned((1,), np.int32)
        emulate(context_plan.own_rows("sm_80", T, E, group), part, own, x, count)
        first, end = rank * rows // world, (rank + 1) * rows // world
        assert own.tolist() == [end - first]
        np.testing.assert_array_equal(part[: end - first], x[first:end])
        for number in range(ceil_div(end - first, room)):  # what the rank writes in each round
            some = part[number * room : min(end - first, (number + 1) * room)].reshape(-1)
            ranks.places[rank][(TURN + number) % 2, : len(some)] = some
        parts.append(part)
    rounds = ceil_div(ceil_div(rows, world), room)
    for rank, group in enumerate(ranks.groups):
        out = aligned((T, E), np.float32)
        ranks.emulate(context_plan.gather_rows("sm_80", T, E, group), [out, *ranks.meeting(rank)], [parts[rank], count])
        np.testing.assert_array_equal(out[:rows], x[:rows])
        assert np.isnan(out[rows:]).all() and ranks.turns[rank].tolist() == [TURN + rounds, 0]


def test_a_rank_stores_its_own_slots() -> None:
    """Of a block of tables each rank has 256 tokens, in order."""
    K, D, slots = 2, 32, [0, 255, 256, 511, 512, 3 * 512 + 300, -1]
    k, v = numbers(len(slots), K, D), numbers(len(slots), K, D, seed=1)
    pools = []
    for rank in range(2):
        pool = aligned((5, 2, K, 256, D), np.float32)
        kernel = plan.kv_append("sm_80", len(slots), K, 256, D, "F32", RankGroup(rank, 2, None, 4, 0))
        emulate(kernel, pool, pool, k, v, _ints(slots), _ints([len(slots)]))
        pools.append(pool)
    wanted: list[Any] = [np.full_like(pool, np.nan) for pool in pools]
    for row, slot in enumerate(slots[:-1]):
        block, at = divmod(slot, 512)
        wanted[at // 256][block, 0, :, at % 256], wanted[at // 256][block, 1, :, at % 256] = k[row], v[row]
    for got, want in zip(pools, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
