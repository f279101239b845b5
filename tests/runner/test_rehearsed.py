"""Steps run on stand-ins: tensors of the sizes and formats that the loader would hold, without a number of the model's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runner.test_weights import GOLDEN, write
from tests.tiny import quantized
from tinyvllm.config import DEFAULT_MODEL, resolve
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.quant.codecs import readable_formats, unpack
from tinyvllm.quant.formats import FORMATS
from tinyvllm.runner import rehearsed
from tinyvllm.runner.opened import OpenedModel, open_model
from tinyvllm.runner.rehearsed import HOST_SEQUENCE, HOST_STEP, StandIns, StepSeconds, rehearsed_seconds

GPTQ = quantized.gptq_settings(4, 32, desc_act=True), quantized.gptq(4, 32, index=quantized.shuffled)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsed, "SECONDS", 0.0)
    monkeypatch.setattr(rehearsed, "RUNS", 1)


def opened(path: Path, **options: Any) -> OpenedModel:
    return open_model(resolve(path, device="CPU", **options), "CPU")


def rehearse(path: Path, **options: Any) -> StepSeconds:
    config = resolve(path, device="CPU", **options)
    model = open_model(config, "CPU")
    return rehearsed_seconds(config, model, model.outline().held, sequences=3, context=40, prompt=40)


@pytest.mark.parametrize("format", readable_formats())
def test_the_pattern_is_ordinary_numbers_in_every_format(format: str) -> None:
    blocks = 64
    data = rehearsed._pattern()[: blocks * FORMATS[format].nbytes].reshape(blocks, -1)
    numbers = np.abs(unpack(format, data))
    assert np.isfinite(numbers).all() and numbers.max() > 0 and numbers[numbers > 0].min() > np.finfo(np.float32).tiny


def test_tensors_of_a_size_share_memory_when_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(DEFAULT_MODEL)
    for distinct, shared in ((1 << 30, False), (0, True)):
        monkeypatch.setattr(rehearsed, "DISTINCT_BYTES", distinct)
        StandIns(model.stored, model.plan).load(model.model, model.recipes)
        first, second, *_ = (block.weights.ffn_down.weight.tensor.uop.base.buffer for block in model.model.blk)
        assert (first is second) == shared


@pytest.mark.parametrize("family", ["llama2", "qwen3moe", "gpt2"])
def test_steps_run(family: str) -> None:
    found = rehearse(GOLDEN / family)
    assert 0 < found.decode < 10 and 0 < found.decode_all < 10 and 0 < found.prompt < 10


def test_columns_in_an_order_of_their_own(tmp_path: Path) -> None:
    assert rehearse(quantized.write(tmp_path, *GPTQ) / "quantized").prompt > 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_long_prompt_is_one_layer_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Layers count as a second each, and those of the second kind as 1.5."""
    model = opened(DEFAULT_MODEL)
    kinds = [0, 1, 0, 0, 1, 0]
    ran: list[list[int]] = []

    def seconds(self: object, inputs: object, blocks: int, layers: Iterable[int]) -> float:
        ran.append(list(layers))
        return sum(1.5 if kinds[layer] else 1.0 for layer in ran[-1])

    monkeypatch.setattr(rehearsed, "layer_kinds", lambda *arguments: kinds)
    monkeypatch.setattr(rehearsed, "WHOLE_SECONDS", 100.0 if whole else 1.0)
    monkeypatch.setattr(rehearsed._Steps, "_seconds", seconds)
    found = rehearsed_seconds(resolve(DEFAULT_MODEL, device="CPU"), model, [], sequences=2, context=32, prompt=32)
    assert found.prompt == pytest.approx(7 + HOST_STEP + HOST_SEQUENCE)
    assert found.decode_all == pytest.approx(7 + HOST_STEP + 2 * HOST_SEQUENCE)
    assert ran[0] == [0] and (ran[1] == [*range(6)] if whole else ran[1:3] == [[0, 1], [0, 2]])


def test_too_little_memory_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, hidden=256, intermediate=768)
    monkeypatch.setattr(rehearsed, "free_memory", lambda device: 1 << 30)
    with pytest.raises(OutOfMemoryError, match="to measure its steps takes 514 MiB, more than half of the 1024 MiB"):
        rehearse(tmp_path)
