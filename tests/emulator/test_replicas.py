"""Replicas on emulated GPUs of their own: their tokens, which GPUs they see, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.emulator.driver import Driver
from tests.emulator.rank import on_gpus
from tests.emulator.test_ranks import GREEDY, OPTIONS, TEXTS, tokens
from tinyvllm import LLM, AsyncLLM
from tinyvllm.backends import registry
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.config.engine import resolve
from tinyvllm.errors import ArgumentError
from tinyvllm.runner import grid


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with on_gpus(4, seed=3, races=False) as driver:
        registry.forget_choices()
        yield driver


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_tokens_are_those_of_one_replica(ranks: int, driver: Driver) -> None:
    options = {**OPTIONS, "device": "CUDA", "tensor_parallel_size": ranks}
    with LLM(MODEL, **options) as one:
        expected = tokens(one)
    llm = AsyncLLM(MODEL, data_parallel_size=2, **options)

    async def run(text: str) -> list[int]:
        async for output in llm.generate(text, GREEDY):
            newest = output
        return newest.outputs[0].token_ids

    async def run_all() -> list[list[int]]:
        found = await asyncio.gather(*map(run, TEXTS))
        assert [bool(one.generated_tokens) for one in await llm.all_metrics()] == [True, True]
        return found

    try:
        assert asyncio.run(run_all()) == expected
    finally:
        llm.close()


def test_each_replica_sees_the_gpus_of_its_ranks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    four, two = (resolve(MODEL, device="CUDA", data_parallel_size=size, tensor_parallel_size=4 // size) for size in (4, 2))
    assert grid.replica_environments(four) == [{name: str(number)} for number in range(4)]
    assert grid.replica_environments(two) == [{name: "0,1"}, {name: "2,3"}]
    monkeypatch.setenv(name, "GPU-a,GPU-b,5,6")
    assert grid.replica_environments(two) == [{name: "GPU-a,GPU-b"}, {name: "5,6"}]
    with pytest.raises(ArgumentError, match="8 ranks need as many GPUs, and there are 4"):
        AsyncLLM(MODEL, device="CUDA", data_parallel_size=8)
    monkeypatch.setattr(grid, "choose_device", lambda choice: "METAL")
    with pytest.raises(ArgumentError, match="data_parallel_size=2: there is one METAL here"):
        grid.replica_environments(two)
