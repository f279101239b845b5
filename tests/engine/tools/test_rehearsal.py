"""An engine on stand-ins: what it times is a whole step, and prompts take no time but where they are what is timed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.runner.test_weights import GOLDEN
from tests.tiny import quantized
from tinyvllm.config.engine import resolve
from tinyvllm.engine.stages import Stages
from tinyvllm.engine.tools import rehearsal
from tinyvllm.engine.tools.rehearsal import Rehearsal, StepSeconds, rehearsed_seconds
from tinyvllm.runner import rehearsed
from tinyvllm.runner.opened import open_model
from tinyvllm.runner.runner import Runner

GPTQ = quantized.gptq_settings(4, 32, desc_act=True), quantized.gptq(4, 32, index=quantized.shuffled)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rehearsal, rehearsed):
        monkeypatch.setattr(module, "SECONDS", 0.0)
        monkeypatch.setattr(module, "RUNS", 1)


def rehearse(path: Path, **options: Any) -> StepSeconds:
    config = resolve(path, device="CPU", **options)
    model = open_model(config, "CPU")
    return rehearsed_seconds(config, model, model.outline().held, sequences=3, context=40, prompt=40)


@pytest.mark.parametrize("family", ["llama2", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3moe", "gpt2"))])
def test_steps_run(family: str) -> None:
    found = rehearse(GOLDEN / family)
    assert 0 < found.decode < 10 and 0 < found.decode_all < 10 and 0 < found.prompt < 10


def test_columns_in_an_order_of_their_own(tmp_path: Path) -> None:
    assert rehearse(quantized.write(tmp_path, *GPTQ) / "quantized").prompt > 0


def test_a_step_is_all_that_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host work that takes 20 ms, and the kernels of decodes, but not those of prompts unless a prompt is timed."""
    prepare, launch, shapes = Stages.prepare, Runner.launch, list[Any]()
    monkeypatch.setattr(Stages, "prepare", lambda self, schedule: (time.sleep(0.02), prepare(self, schedule))[1])
    monkeypatch.setattr(Runner, "launch", lambda self, step: (shapes.append(step.plan.inputs.shape), launch(self, step))[1])
    config = resolve(GOLDEN / "llama2", device="CPU", num_scheduler_steps=2)
    model = open_model(config, "CPU")
    with Rehearsal(config, model, model.outline().held, 2, 40) as rehearsed_engine:
        assert 0.01 <= rehearsed_engine.decode(2) < 0.02 + 5  # two tokens a step
        assert shapes and not any(shape.chunks for shape in shapes) and {shape.decodes for shape in shapes} == {2}
        shapes.clear()
        assert rehearsed_engine.prefill(40) >= 0.02
        assert [shape.chunks for shape in shapes] == [1, 1]
