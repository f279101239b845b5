"""Ranks on real GPUs: two of them, or one that both share. tests/emulator/test_ranks.py has more, on emulated ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu import answers
from tests.gpu.operands import DEVICE, EMULATED
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(EMULATED or DEVICE != "CUDA", reason="ranks are processes, each with a real GPU")
PROMPTS = [{"prompt_token_ids": list(ids)} for ids in answers.PROMPTS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)


def outputs(**options: Any) -> tuple[list[list[int]], list[float]]:
    with LLM(DEFAULT_MODEL, device=DEVICE, dtype="bfloat16", max_model_len=512, max_num_seqs=4, num_blocks=128, **options) as llm:
        found = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    return [list(one.token_ids) for one in found], [p.logprob for one in found for step in one.logprobs for p in step.values()]


def test_two_ranks_have_the_tokens_of_one_wherever_they_meet(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each other's memory, if they reach it, and in the host's: the same bits. One GPU adds in another order."""
    monkeypatch.setenv("TINYVLLM_SHARE_GPUS", "1")
    one, close = outputs()
    two, scores = outputs(tensor_parallel_size=2)
    monkeypatch.setenv("TINYVLLM_PEER_ACCESS", "0")
    assert outputs(tensor_parallel_size=2) == (two, scores)
    assert [ids[:4] for ids in two] == [ids[:4] for ids in one]
    first = slice(0, 4)
    np.testing.assert_allclose(scores[first], close[first], atol=0.1)


def test_two_parts_of_contexts_have_the_bits_of_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks next to decodes, of contexts that both ranks have some of, in each other's memory and in the host's."""
    monkeypatch.setenv("TINYVLLM_SHARE_GPUS", "1")
    prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(3, 3000, n).tolist()} for n in (300, 40, 900)]
    found = []
    for size, blocks, reach in ((1, 128, "1"), (2, 4, "1"), (2, 4, "0")):
        monkeypatch.setenv("TINYVLLM_PEER_ACCESS", reach)
        options = dict(max_model_len=1024, max_num_seqs=4, num_blocks=blocks, max_num_batched_tokens=256, skip_tokenizer_init=True)
        with LLM(DEFAULT_MODEL, device=DEVICE, dtype="bfloat16", context_parallel_size=size, **options) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
        found.append([(list(one.token_ids), [p.logprob for step in one.logprobs for p in step.values()]) for one in outputs])
    assert found[0] == found[1] == found[2]


def test_two_stages_have_the_bits_of_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_SHARE_GPUS", "1")
    assert outputs(pipeline_parallel_size=2) == outputs()
