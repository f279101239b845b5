"""The shared memory of ranks: no two of its parts overlap, and each is as large as it is used."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm.distributed.memory import HEADER, Layout, SharedMemory


@pytest.mark.parametrize(("world", "stages"), [(1, 2), (2, 1), (2, 3)])
def test_parts_are_apart(world: int, stages: int) -> None:
    layout = Layout(world, stages, place=5, logits=7, stream=1500, inputs=1030)
    memory = SharedMemory(layout)
    memory.close_file()
    parts = [memory.group(stage)[: HEADER + 4 * (2 * world * 5 + 7)] for stage in range(stages)]
    receiving, places = range(layout.ranks - world), range(layout.places)
    parts += [memory.stream(rank, place, 1500).view(np.uint8) for rank in receiving for place in places]
    parts += [memory.inputs(place, 1030).view(np.uint8) for place in places]
    for number, part in enumerate(parts, start=1):
        assert not part.any(), "it overlaps one before it"
        part[:] = number
    assert all((part == number).all() for number, part in enumerate(parts, start=1)) and len(memory.bytes) == layout.nbytes


def test_ranks_count_against_the_layers() -> None:
    layout = Layout(2, 3, 0, 0, 0, 0)
    assert layout.ranks == 6 and [layout.stage(rank) for rank in range(6)] == [2, 2, 1, 1, 0, 0]


def test_all_stages_learn_that_a_step_is_given_up() -> None:
    memory = SharedMemory(Layout(2, 2, 1, 1, 1, 1))
    memory.close_file()
    memory.give_up()
    assert [int(memory.group(stage)[:4].view(np.int32)[0]) for stage in range(2)] == [1, 1]
