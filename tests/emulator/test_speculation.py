"""Drafts on an emulated GPU: the tokens and log-probabilities are those of the same device without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tinyvllm.demo
from tests.emulator.driver import cuda_device
from tests.engine.drafting import Oracle, speculate
from tests.engine.test_rounds import all_free, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends.registry import choices, forget_choices
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.engine import speculation

OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, seed=0)
TEXTS = ["Once upon a time", "Hello! How are you?"]
WANTED = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, repetition_penalty=1.2, max_tokens=6, ignore_eos=True),
]


def check(device: str) -> None:
    """The engine is gone when this returns, so before the device: what is left of it would call a driver that is not there any more."""
    with LLM(MODEL, device=device, **OPTIONS, speculative_config="off") as gpu:
        expected = gpu.generate(TEXTS, WANTED)
        _, controller = speculate(gpu, Oracle(expected).half_right, 3)
        assert results(gpu.generate(TEXTS, WANTED)) == results(expected)
        assert all_free(gpu) and controller.accepted > 2


def check_heads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE's layer on the device's own kernels: none of its products is left to a generated one."""
    monkeypatch.setattr(speculation, "MAX_PROPOSE_SECONDS", 200.0)  # the emulator takes seconds
    options = OPTIONS | {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    heads = str(Path(tinyvllm.demo.__file__).parent / "heads")
    config = {"method": "eagle3", "model": heads, "num_speculative_tokens": 2}
    wanted = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    forget_choices()  # of engines before, whose families may need the reference
    with LLM(MODEL, device=device, **options, speculative_config="off") as plain:
        expected = results(plain.generate(TEXTS[:1], wanted))
    with LLM(MODEL, device=device, speculative_config=config, **options) as llm:
        found = llm.generate(TEXTS[:1], wanted)
        assert results(found) == expected and found[0].metrics.accepted_tokens > 0
        assert llm.engine.speculation is not None and llm.engine.speculation.on
        assert [choice for choice in choices() if choice.stem == "matmul" and choice.variant == "ref"] == []


@pytest.mark.long
def test_heads_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_device(seed=1):
        check_heads("CUDA", monkeypatch)


def test_cuda() -> None:
    with cuda_device(seed=1):
        check("CUDA")
