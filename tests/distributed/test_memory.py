"""The shared memory of ranks: no two of its parts overlap, and each is as large as it is used."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm.distributed.memory import HEADER, Layout, SharedMemory


@pytest.mark.parametrize(("tensor", "context", "stages"), [(1, 1, 2), (2, 1, 1), (2, 1, 3), (1, 4, 2), (4, 2, 2)])
def test_parts_are_apart(tensor: int, context: int, stages: int) -> None:
    layout = Layout(tensor, context, stages, sums=5, results=600, logits=7, stream=1500, inputs=1030)
    memory = SharedMemory(layout)
    memory.close_file()
    corners = [rank for rank in range(layout.ranks) if layout.cell(rank)[0] == 0]  # one rank of each group that adds sums
    parts = [memory.tensor_group(rank)[: HEADER + 4 * (2 * tensor * 5 + 7)] for rank in corners if tensor > 1]
    parts += [memory.context_group(rank)[: HEADER + 8 * context * 600] for rank in range(0, layout.ranks, context) if context > 1]
    receiving, places = range(layout.ranks - layout.world_size), range(layout.places)
    parts += [memory.stream(rank, place, 1500).view(np.uint8) for rank in receiving for place in places]
    parts += [memory.inputs(place, 1030).view(np.uint8) for place in places]
    for number, part in enumerate(parts, start=1):
        assert not part.any(), "it overlaps one before it"
        part[:] = number
    assert all((part == number).all() for number, part in enumerate(parts, start=1)) and len(memory.bytes) == layout.nbytes


def test_ranks_count_against_the_layers() -> None:
    layout = Layout(2, 1, 3, 0, 0, 0, 0, 0)
    assert layout.ranks == 6 and [layout.stage(rank) for rank in range(6)] == [2, 2, 1, 1, 0, 0]


def test_neighbours_have_the_same_weights() -> None:
    """And meet to merge contexts; they add sums with those that have the same part of the context, of the same stage."""
    memory = SharedMemory(layout := Layout(2, 2, 2, 1, 1, 1, 1, 1))
    memory.close_file()
    assert [layout.cell(rank) for rank in range(8)] == 2 * [(0, 0), (0, 1), (1, 0), (1, 1)]
    contexts = [layout.context_start(rank) for rank in range(8)]
    sums = [layout.tensor_start(rank) for rank in range(8)]
    assert contexts[::2] == contexts[1::2] and len({*contexts}) == 4
    assert [sums[rank] == sums[rank + 2] for rank in (0, 1, 4, 5)] == 4 * [True] and len({*sums, *contexts}) == 8


def test_all_groups_learn_that_a_step_is_given_up() -> None:
    memory = SharedMemory(Layout(2, 2, 2, 1, 1, 1, 1, 1))
    memory.close_file()
    memory.give_up()
    for group in (memory.tensor_group, memory.context_group):
        assert [int(group(rank)[:4].view(np.int32)[0]) for rank in range(8)] == 8 * [1]
