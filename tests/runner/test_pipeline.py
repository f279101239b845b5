"""Which layers and tensors a stage of a pipeline has."""

from __future__ import annotations

import itertools

import pytest

from tinyvllm.config.engine import DEFAULT_MODEL, EngineConfig
from tinyvllm.errors import ModelError
from tinyvllm.runner.opened import OpenedModel, open_model
from tinyvllm.runner.pipeline import PipelineStage, RankStart, divide, divide_layers


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (9, 1, 1, 1, 1, 1), (3, 1, 4, 1, 5, 9, 2, 6), (5,) * 7])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_largest_part_is_as_small_as_it_can_be(sizes: tuple[int, ...], parts: int) -> None:
    def largest(ends: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *ends)))

    ends = divide(sizes, parts)
    assert len(ends) == parts and ends[-1] == len(sizes) and all(a < b for a, b in itertools.pairwise((0, *ends)))
    assert largest(tuple(ends)) == min(largest((*inner, len(sizes))) for inner in itertools.combinations(range(1, len(sizes)), parts - 1))


def test_layers_are_divided_by_what_they_and_the_ends_take() -> None:
    layers = [(f"blk.{i}.ffn_up.weight", 10) for i in range(4)]
    assert divide_layers(layers, [0] * 4, 2, tied=False) == [2, 4]
    assert divide_layers([*layers, ("token_embd.weight", 20)], [0] * 4, 2, tied=False) == [1, 4]
    assert divide_layers([*layers, ("token_embd.weight", 20)], [0] * 4, 2, tied=True) == [2, 4], "the last stage has it, too"
    assert divide_layers([*layers, ("output.weight", 20), ("output_norm.weight", 1)], [0] * 4, 2, tied=False) == [3, 4]
    assert divide_layers([*layers, ("output.weight", 20)], [1000] * 4, 2, tied=False) == [2, 4], "a large cache outweighs the head"
    assert divide_layers(layers, [0, 0, 0, 30], 2, tied=False) == [3, 4], "one layer alone has a cache"


def test_layers_that_read_the_keys_of_others_are_in_the_last_stage() -> None:
    layers = [(f"blk.{i}.ffn_up.weight", 10) for i in range(6)]
    assert divide_layers(layers, [0] * 6, 2, tied=False) == [3, 6]
    assert divide_layers(layers, [0] * 6, 2, tied=False, undivided=4) == [2, 6]
    assert divide_layers(layers, [0] * 6, 3, tied=False, undivided=4) == [1, 2, 6]
    with pytest.raises(ModelError, match="pipeline_parallel_size=4: the last 4 of 6 layers are in one stage.*; use 3 stages at most"):
        divide_layers(layers, [0] * 6, 4, tied=False, undivided=4)


def opened_rank(whole: OpenedModel, config: EngineConfig, rank: int) -> OpenedModel:
    assert whole.memory is not None and whole.stage is not None
    return open_model(config, "CPU", RankStart(whole.memory, rank, whole.stage.ends))


def test_stages_hold_each_tensor_once_and_a_tied_table_twice() -> None:
    config = EngineConfig(str(DEFAULT_MODEL), device="CPU", pipeline_parallel_size=2, num_blocks=8, speculative_config=None)
    last = open_model(config, "CPU")
    first = opened_rank(last, config, 1)
    assert first.stage == PipelineStage(0, last.stage.ends, tied=True) and last.stage.has_head
    assert len(first.model.blk) + len(last.model.blk) == last.config.num_blocks
    names = [[held.name for held in one.outline().held] for one in (first, last)]
    whole = open_model(EngineConfig(str(DEFAULT_MODEL), device="CPU", speculative_config=None), "CPU")
    assert sorted(names[0] + names[1]) == sorted([*(held.name for held in whole.outline().held), "token_embd.weight"])
    assert "token_embd.weight" in names[0] and "output_norm.weight" in names[1]
    assert whole.weight_bytes == last.weight_bytes and whole.block_bytes == last.block_bytes, "a rank knows what all take"
