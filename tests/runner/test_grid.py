"""What the ranks of a grid have of a model."""

from __future__ import annotations

from tests.runner.test_pipeline import opened_rank
from tinyvllm.config.engine import DEFAULT_MODEL, EngineConfig
from tinyvllm.placement import Placement
from tinyvllm.runner.grid import context_ranks, tensor_ranks
from tinyvllm.runner.opened import OpenedModel, open_model

CPU = Placement("CPU")
ALONE = EngineConfig(str(DEFAULT_MODEL), device="CPU", num_blocks=8, speculative_config=None)
SIZES = {"tensor_parallel_size": 2, "context_parallel_size": 2, "pipeline_parallel_size": 2}


def names(opened: OpenedModel) -> list[str]:
    return [held.name for held in opened.outline().held]


def test_neighbours_have_the_same_weights_and_others_parts_of_them() -> None:
    config = EngineConfig(str(DEFAULT_MODEL), device="CPU", num_blocks=8, speculative_config=None, block_size=512, **SIZES)
    first, whole = open_model(config, "CPU"), open_model(ALONE, "CPU")
    ranks = [first, *(opened_rank(first, config, rank) for rank in range(1, 8))]
    assert [one.stage.number for one in ranks if one.stage] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert sum(len(one.model.blk) * one.block.nbytes for one in ranks) == first.block_bytes == 512 // 16 * whole.block_bytes
    for one, copy in zip(ranks[::2], ranks[1::2], strict=True):
        assert one.split is not None and copy.split is not None and one.split.group.rank == copy.split.group.rank
        without = {"token_embd.weight", "output_norm.weight"} if one.stage is not None and one.stage.has_head else set()
        assert {*names(one)} - {*names(copy)} == without, "only ranks with the first part of contexts have a head"
    assert sorted(names(ranks[0]) + names(ranks[4])) == sorted([*names(whole), "token_embd.weight"]), "as two stages of one process"
    copied = sum(copy.outline().own_bytes for copy in ranks[1::2])
    assert abs(first.copies - copied) < copied / 50 and first.weight_bytes == whole.weight_bytes + first.copies


def test_a_rank_meets_those_of_its_row_and_those_of_its_column() -> None:
    config = EngineConfig(str(DEFAULT_MODEL), device="CPU", num_blocks=8, speculative_config=None, block_size=512, **SIZES)
    memory = open_model(config, "CPU").memory
    assert memory is not None
    groups = [(tensor_ranks(memory, rank, CPU), context_ranks(memory, rank, CPU)) for rank in range(4)]
    assert [(one.rank, other.rank) for one, other in groups if one and other] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(one.world_size == other.world_size == 2 for one, other in groups if one and other)
