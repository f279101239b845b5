"""Drafts on an emulated GPU: the tokens and log-probabilities are those of the same device without drafts."""

from __future__ import annotations

from typing import Any

from tests.emulator.driver import cuda_device
from tests.engine.drafting import Oracle, speculate
from tests.engine.test_rounds import all_free, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.config import DEFAULT_MODEL as MODEL

OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, seed=0)
TEXTS = ["Once upon a time", "Hello! How are you?"]
WANTED = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, repetition_penalty=1.2, max_tokens=6, ignore_eos=True),
]


def check(device: str) -> None:
    """The engine is gone when this returns, so before the device: what is left of it would call a driver that is not there any more."""
    with LLM(MODEL, device=device, **OPTIONS) as gpu:
        expected = gpu.generate(TEXTS, WANTED)
        _, controller = speculate(gpu, Oracle(expected).half_right, 3)
        assert results(gpu.generate(TEXTS, WANTED)) == results(expected)
        assert all_free(gpu) and controller.accepted > 2


def test_cuda() -> None:
    with cuda_device(seed=1):
        check("CUDA")
