"""The CUDA kernels in which ranks meet: sums and logits of one rank, next to what others have left in the sites beforehand.

Ranks that wait for each other are processes of their own: tests/emulator/test_ranks.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.tiles import laid, numbers
from tinyvllm.backends.cuda import plan
from tinyvllm.integers import ceil_div
from tinyvllm.placement import RankGroup

WORDS = 2048  # bytes of a site before its places: kernels/cuda/include/meeting.cuh
LATER = 1 << 20  # a round that is never reached


class Sites:
    """Those of `group`, whose other ranks have met in every round and left `others(round, rank)`, float32 [count], in their places.

    Two rounds have places of their own. `shared` is the host's page.
    """

    def __init__(self, group: RankGroup, turn: int, others: dict[tuple[int, int], np.ndarray]):
        self.group, self.shared = group, aligned((4096,), np.uint8)
        self.bytes = [aligned((WORDS + 8 * group.place,), np.uint8) for _ in range(group.world_size)]
        self.words = [site[:WORDS].view(np.uint32).reshape(8, 64) for site in self.bytes]
        self.places = [site[WORDS:].view(np.float32).reshape(2, group.place) for site in self.bytes]
        self.shared[:] = 0
        for rank, words in enumerate(self.words):
            words[:] = LATER if rank == group.rank else turn
        for (number, rank), values in others.items():
            self.places[rank][(turn + number) % 2, : len(values)] = values
        self.turns = laid(np.array([turn, 0], np.uint32))

    @property
    def met(self) -> list[np.ndarray]:
        """The rounds in which the blocks of this rank have met, [64], as each of the other ranks sees it."""
        return [words[self.group.rank] for rank, words in enumerate(self.words) if rank != self.group.rank]


def tree(parts: list[np.ndarray]) -> np.ndarray:
    """The sum of all ranks' parts, float32."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def rounds_of(parts: list[np.ndarray], own: int, place: int, rows: int) -> dict[tuple[int, int], np.ndarray]:
    """What the other ranks write in each round: `place` numbers at a time."""
    found = {}
    for rank, part in enumerate(parts):
        flat = part[:rows].reshape(-1)
        for number in range(ceil_div(len(flat), place)):
            if rank != own:
                found[number, rank] = flat[number * place : (number + 1) * place]
    return found


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2), (8, 7)])
@pytest.mark.parametrize(("T", "O", "rows", "rounds"), [(1, 64, 1, 1), (5, 544, 4, 1), (9, 1024, 9, 2), (3, 64, 0, 0)])
def test_sums_of_all_ranks(world: int, rank: int, T: int, O: int, rows: int, rounds: int) -> None:
    parts = [numbers(T, O, seed=number) for number in range(world)]
    bias, residual = numbers(O, seed=20), numbers(T, O, seed=21)
    group = RankGroup(rank, world, None, ceil_div(rows * O, 4 * max(1, rounds)) * 4 or 4, 0)
    sites, turn = Sites(group, 6, rounds_of(parts, rank, group.place, rows)), 6
    out, kernel = aligned((T, O), np.float32), plan.all_reduce(plan.BASE, T, O, group, True, True, 0)
    emulate(
        kernel,
        out,
        sites.turns,
        *sites.bytes,
        sites.shared,
        laid(parts[rank]),
        laid(bias),
        laid(residual),
        laid(np.array([rows], np.int32)),
        seed=3,
    )
    np.testing.assert_array_equal(out[:rows], (tree(parts) + bias + residual)[:rows])
    assert np.isnan(out[rows:]).all(), "rows after the count are not touched"
    assert sites.turns.tolist() == [turn + rounds, 0]
    for met in sites.met:
        assert (met[: kernel.grid[0]] == turn + rounds).all() and (met[kernel.grid[0] :] == turn).all()
    if rounds:
        last = parts[rank][:rows].reshape(-1)[(rounds - 1) * group.place :]
        np.testing.assert_array_equal(sites.places[rank][(turn + rounds - 1) % 2, : len(last)], last)


def test_a_row_may_have_a_bias_of_its_own() -> None:
    parts, bias = [numbers(4, 64, seed=number) for number in range(2)], numbers(4, 64, seed=20)
    group = RankGroup(1, 2, None, 256, 0)
    sites, out = Sites(group, 0, rounds_of(parts, 1, 256, 4)), aligned((4, 64), np.float32)
    kernel = plan.all_reduce(plan.BASE, 4, 64, group, True, False, 64)
    emulate(kernel, out, sites.turns, *sites.bytes, sites.shared, laid(parts[1]), laid(bias), laid(np.array([4], np.int32)))
    np.testing.assert_array_equal(out, parts[0] + parts[1] + bias)


def test_a_rank_that_was_given_up_is_not_waited_for() -> None:
    group = RankGroup(0, 2, None, 64, 0)
    sites, out = Sites(group, 0, {}), aligned((1, 64), np.float32)
    sites.words[0][1] = 0  # has never met
    sites.shared[:4].view(np.uint32)[0] = 1
    kernel = plan.all_reduce(plan.BASE, 1, 64, group, False, False, 0)
    emulate(kernel, out, sites.turns, *sites.bytes, sites.shared, laid(numbers(1, 64)), laid(np.array([1], np.int32)))
    assert sites.turns.tolist() == [1, 0]


@pytest.mark.parametrize("V", [96, 100, 1000])
@pytest.mark.parametrize(("world", "rounds"), [(2, 1), (2, 2), (4, 1)])
def test_logits_of_all_ranks(V: int, world: int, rounds: int) -> None:
    """Rank 0 has them side by side; another one leaves its own."""
    N, sixteens = 3, ceil_div(V, 16)
    starts = [rank * sixteens // world * 16 for rank in range(world)] + [V]
    logits, most = numbers(4, V), ceil_div(sixteens, world) * 16
    place, count = most * ceil_div(N, rounds), laid(np.array([N], np.int32))
    parts = [np.ascontiguousarray(logits[:, start:end]) for start, end in zip(starts, starts[1:], strict=False)]
    rows, others = ceil_div(N, rounds), {}
    for rank in range(1, world):
        for number in range(rounds):
            others[number, rank] = parts[rank][:N][number * rows : (number + 1) * rows].reshape(-1)
    group = RankGroup(0, world, None, place, 0)
    sites, out = Sites(group, 3, others), aligned((4, V), np.float32)
    kernel = plan.gather_logits(plan.BASE, 4, V, parts[0].shape[1], group)
    emulate(kernel, out, sites.turns, *sites.bytes, sites.shared, laid(parts[0]), count, seed=5)
    np.testing.assert_array_equal(out[:N], logits[:N])
    assert np.isnan(out[N:]).all() and sites.turns.tolist() == [3 + rounds, 0]
    group = RankGroup(1, world, None, place, 0)
    sites, out = Sites(group, 3, {}), aligned((4, V), np.float32)
    emulate(
        plan.gather_logits(plan.BASE, 4, V, parts[1].shape[1], group), out, sites.turns, *sites.bytes, sites.shared, laid(parts[1]), count
    )
    np.testing.assert_array_equal(sites.places[1][(3 + rounds - 1) % 2, : len(others[rounds - 1, 1])], others[rounds - 1, 1])
    assert np.isnan(out).all(), "only rank 0 draws"
