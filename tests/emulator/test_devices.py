"""Layers divided between an emulated GPU, which is rank 0's, and the CPU, in a process of its own that opens no other device."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator.driver import Driver, cuda_device
from tests.engine.test_tensor_parallel import alive, run_on, start
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.config.engine import resolve
from tinyvllm.engine.frontend import plan_engine
from tinyvllm.engine.tools.recording import read_run
from tinyvllm.engine.tools.replay import config_of
from tinyvllm.errors import ArgumentError, ModelError, OutOfMemoryError, RankError

OPTIONS: dict[str, Any] = dict(max_model_len=64, max_num_seqs=4, seed=0, num_blocks=16)
TEXTS = ["Once upon a time", "Hello! How are you?", "7 + 5 ="]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LETTERS = [{"prompt_token_ids": np.random.default_rng(seed).integers(3, 250, count).tolist()} for seed, count in enumerate((40, 9, 25, 3))]
DRAWN = [SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with cuda_device(seed=3, races=False) as driver:
        registry.forget_choices()
        yield driver


@pytest.fixture(scope="module")
def both(driver: Driver) -> Iterator[LLM]:
    """The bundled model of six layers, two of them on the GPU."""
    with LLM(MODEL, device="CUDA,CPU", gpu_layers=2, **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_greedy_tokens_are_those_of_one_device(both: LLM, driver: Driver) -> None:
    with LLM(MODEL, device="CPU", **OPTIONS) as cpu:
        expected, embedding = tokens(cpu, TEXTS), cpu.embed(TEXTS[0])
    before = len(driver.launched)
    assert tokens(both, TEXTS) == expected
    ran = driver.launched[before:]
    assert ran.count("embed") == ran.count("norm_head") > 0, "a step's angles, but not its tokens"
    assert ran.count("attention_decode") % 2 == 0
    assert len(both.engine.runner.model.blk) == 2 and both.config.devices == ("CUDA", "CPU")
    np.testing.assert_allclose(both.embed(TEXTS[0]), embedding, atol=0.02)


def float32(model: Path, device: str, **options: Any) -> list[list[int]]:
    """In chunks of 16 tokens, with fewer blocks than the sequences need at their end."""
    given = {**OPTIONS, "num_blocks": 7, "max_num_batched_tokens": 16, **options}
    with LLM(model, device=device, dtype="float32", **given) as llm:
        outputs = llm.generate(LETTERS, DRAWN)
        assert sum(output.metrics.preemptions for output in outputs), "the case is of no use"
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.long
def test_a_float32_model_has_the_tokens_of_one_device(tiny_model: Path, driver: Driver) -> None:
    """Greedy and drawn, in chunks, with preemptions and with steps in flight; no two logits are as close as the devices' sums."""
    assert float32(tiny_model, "CUDA,CPU") == float32(tiny_model, "CPU")


@pytest.mark.long
def test_tokens_do_not_depend_on_the_batch(both: LLM) -> None:
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=4, ignore_eos=True) for i in range(3)]
    assert tokens(both, TEXTS, params) == [tokens(both, [text], [param])[0] for text, param in zip(TEXTS, params, strict=True)]


def test_layers_are_divided_by_memory_as_planned(driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU with room for some of the layers. The plan's figures are those of the engine, and the log says them."""
    options = {**OPTIONS, "num_blocks": None, "max_num_batched_tokens": 32}
    config = resolve(MODEL, device="CUDA,CPU", **options)
    monkeypatch.setattr(driver, "_capacity", driver._capacity - driver.free() + (10 << 20))
    plan = plan_engine(config, speed=False)
    last, first = plan.sizes.ranks
    assert plan.device == "CUDA,CPU" and (last.device, last.free, first.device) == ("CUDA", 10 << 20, "CPU")
    assert first.layers[0] == 0 and 1 <= first.layers[1] == last.layers[0] < 5 and last.layers[1] == 6
    assert plan.sizes.start is not None and {choice.variant for choice in plan.kernels} >= {"sm_80"}
    with caplog.at_level(logging.WARNING, "tinyvllm"), LLM(MODEL, device="CUDA,CPU", **options) as llm:
        runner = llm.engine.runner
        assert len(runner.model.blk) == last.layers[1] - last.layers[0] and runner.pool.num_blocks == plan.sizes.start.num_blocks
        assert runner.weight_bytes == plan.sizes.memory.weights and runner.block_bytes == 16 * plan.sizes.memory.kv_token
        assert tokens(llm, TEXTS[:1])
    assert f"CUDA has layers {last.layers[0]} to 5 of 6 and the head: weights" in caplog.text and "of 10 MiB" in caplog.text
    assert f"CPU has layers 0 to {first.layers[1] - 1} and the embedding table" in caplog.text
    with pytest.raises(ArgumentError, match="--memory is the memory of one device, and device=CUDA,CPU has two"):
        plan_engine(config, 1 << 30)


def test_the_smaller_memory_decides_the_blocks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what the weights leave on a small host, or on a small GPU."""
    options: dict[str, Any] = {**OPTIONS, "gpu_layers": 2, "num_blocks": None, "max_num_seqs": 64, "max_model_len": 512}
    config = resolve(MODEL, device="CUDA,CPU", **options)

    def planned() -> tuple[list[int], int]:
        """The weights of each rank, and the blocks."""
        sizes = plan_engine(config, speed=False).sizes
        assert sizes.start is not None
        return [one.weights for one in sizes.ranks], sizes.start.num_blocks

    (last, first), wanted = planned()
    layer, room = 16 * 512, 64 << 20  # bytes of a block in a layer
    assert wanted == 64 * 512 // 16
    with monkeypatch.context() as patch:
        patch.setattr("tinyvllm.runner.opened.free_memory", lambda device: 1 << 30 if device == "CUDA" else first + room)
        assert 0.9 * room < 2 * planned()[1] * 4 * layer <= room
    monkeypatch.setattr(driver, "_capacity", driver._capacity - driver.free() + (8 << 20))
    blocks = planned()[1]
    assert blocks >= 512 // 16 and 0.9 * ((8 << 20) - last) < 2 * blocks * 2 * layer <= (8 << 20) - last
    with LLM(MODEL, device="CUDA,CPU", **options) as llm:
        assert llm.engine.runner.pool.num_blocks == blocks


def test_what_does_not_fit_is_refused_with_its_device(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="gpu_layers=6: the model has 6 layers, of which CUDA may have up to 5"):
        LLM(MODEL, device="CUDA,CPU", gpu_layers=6, **OPTIONS)
    with pytest.raises(OutOfMemoryError, match=r"the KV cache needs .* \(free memory of CUDA\)"):
        LLM(MODEL, device="CUDA,CPU", gpu_layers=2, **{**OPTIONS, "num_blocks": 1 << 20})
    monkeypatch.setattr(driver, "_capacity", driver._capacity - driver.free() + (1 << 20))
    with pytest.raises(OutOfMemoryError, match=r"the weights need .* 1 MiB can be allocated \(free memory of CUDA\)"):
        LLM(MODEL, device="CUDA,CPU", **OPTIONS)


def test_a_cpu_stage_that_is_killed_ends_the_engine(driver: Driver, tmp_path: Path) -> None:
    """Its recording has the devices as an engine takes them."""
    with LLM(MODEL, device="CUDA,CPU", gpu_layers=1, record=tmp_path / "run.jsonl", **{**OPTIONS, "max_model_len": 128}) as llm:
        (pid,) = start(llm)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 \(process \d+\) ended with code -9"):
            run_on(llm)
    assert not alive(pid)
    again = config_of(read_run(str(tmp_path / "run.jsonl")), {})
    assert (again.devices, again.gpu_layers, again.num_ranks) == (("CUDA", "CPU"), 1, 2)
