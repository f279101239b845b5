"""Beam search against transformers' own, on the bundled model: the same hypotheses, the same scores. Needs PyTorch (`make test-peers`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
transformers = pytest.importorskip("transformers", reason="transformers is installed by `make test-peers` only")

from tinyvllm import LLM  # noqa: E402
from tinyvllm.config.engine import DEFAULT_MODEL  # noqa: E402
from tinyvllm.request import BeamSearchParams  # noqa: E402

PROMPTS = ("Once upon a time there was a little", "The dog ran to the park. They played all day, and", "They were very happy")
MAX_TOKENS = 20
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A full stop ends a beam in addition to the model's own end token, which twenty tokens of a story do not reach."""
    with LLM(device="CPU", dtype="float32", max_model_len=128, max_num_seqs=16) as llm:
        assert llm.engine.tokenizer is not None
        (stop,) = llm.engine.tokenizer.encode(".", add_special_tokens=False)[-1:]
        llm.engine.eos_ids = llm.engine._builder.eos_ids = (*llm.engine.eos_ids, stop)
        yield llm


@pytest.fixture(scope="module")
def peer() -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(str(DEFAULT_MODEL), dtype=torch.float32, attn_implementation="eager").eval()


def theirs(
    peer: Any, prompt: list[int], width: int, penalty: float, stopping: bool | str, ends: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    with torch.no_grad():
        ids = torch.tensor([prompt])
        found = peer.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width,
            do_sample=False, length_penalty=penalty, early_stopping=stopping, max_new_tokens=MAX_TOKENS, output_scores=True,
            return_dict_in_generate=True, pad_token_id=2, eos_token_id=list(ends),
        )  # fmt: skip
    told = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), MAX_TOKENS)
        assert set(tokens[end:]) <= {2}
        told.append((tokens[:end], score))
    return told


@pytest.mark.parametrize("stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_same_hypotheses(llm: LLM, peer: Any, width: int, penalty: float, stopping: bool | str) -> None:
    params = BeamSearchParams(width, MAX_TOKENS, length_penalty=penalty, early_stopping=stopping)
    for output in llm.beam_search(list(PROMPTS), params):
        expected = theirs(peer, output.prompt_token_ids, width, penalty, stopping, llm.engine.eos_ids)
        assert [part.token_ids for part in output.outputs] == [tokens for tokens, _ in expected], output.prompt
        scores = [part.cumulative_logprob / len(part.token_ids) ** penalty for part in output.outputs]
        np.testing.assert_allclose(scores, [score for _, score in expected], rtol=0, atol=TOLERANCE, err_msg=str(output.prompt))
        for part in output.outputs:  # log-probabilities that add up
            drawn = [found[token].logprob for token, found in zip(part.token_ids, part.logprobs, strict=True)]
            assert part.cumulative_logprob == pytest.approx(sum(drawn), abs=1e-4)
            assert part.finish_reason == ("stop" if part.token_ids[-1] in llm.engine.eos_ids else "length")


def test_some_hypotheses_end_and_some_are_cut(llm: LLM) -> None:
    """Otherwise the comparison above would not cover the rules for both."""
    outputs = llm.beam_search(list(PROMPTS), BeamSearchParams(8, MAX_TOKENS, length_penalty=2.0, early_stopping="never"))
    assert {part.finish_reason for output in outputs for part in output.outputs} == {"stop", "length"}
