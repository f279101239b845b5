"""Beam search through the engine: the log-probabilities that it ranks by are those of the tokens that it gives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tinyvllm import LLM, SamplingParams
from tinyvllm.request import BeamSearchParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """With the full stop as an end token in addition to the model's own."""
    with LLM(device="CPU", dtype="float32", max_model_len=96, max_num_seqs=8) as llm:
        assert llm.engine.tokenizer is not None
        ends = (*llm.engine.eos_ids, llm.engine.tokenizer.encode(".", add_special_tokens=False)[-1])
        llm.engine.eos_ids = llm.engine._builder.eos_ids = ends
        yield llm


def scored(llm: LLM, prompt: list[int], tokens: list[int]) -> list[float]:
    """What the model itself says of an answer."""
    logits = llm.prompt_logits(prompt + tokens)[len(prompt) - 1 : -1].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits[np.arange(len(tokens)), tokens].tolist()


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_log_probabilities_are_those_of_the_tokens(llm: LLM, width: int, batched: bool) -> None:
    """Also after rounds without a fork and without an end, where a beam continues with another token than the device has drawn."""
    engine = llm.engine
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("Once upon a time there was a little")
    params = BeamSearchParams(width, 24, length_penalty=1.0, early_stopping="never")
    engine.add("search", prompt, params)
    if batched:
        engine.add("other", prompt[:4], SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True, repetition_penalty=1.2))
        engine.add("again", prompt, params)
    ended = {}
    while engine.has_work():
        ended |= {output.request_id: output.outputs for output in engine.step() if output.finished}
    for part in ended["search"]:
        drawn = [found[token].logprob for token, found in zip(part.token_ids, part.logprobs, strict=True)]
        np.testing.assert_allclose(drawn, scored(llm, prompt, part.token_ids), rtol=0, atol=1e-3)
        texts = [found[token].decoded_token for token, found in zip(part.token_ids, part.logprobs, strict=True)]
        assert texts == [engine.tokenizer.token_text(token) for token in part.token_ids]
        assert part.cumulative_logprob == pytest.approx(sum(drawn), abs=1e-4)
    if batched:
        assert [part.token_ids for part in ended["again"]] == [part.token_ids for part in ended["search"]]
        (alone,) = llm.generate(
            {"prompt_token_ids": prompt[:4]},
            SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
        )
        assert ended["other"][0].token_ids == alone.outputs[0].token_ids
