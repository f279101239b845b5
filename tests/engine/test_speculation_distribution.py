"""What is sampled with drafts has the model's distribution: counts of all strings of three tokens against their probabilities."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.engine.drafting import speculate
from tinyvllm import LLM, SamplingParams

ALLOWED, TEMPERATURE, PROMPT, COUNT = (200, 210, 220), 0.7, [5, 9, 14, 9], 720
CRITICAL = 54.05  # chi-square of 26 degrees of freedom, exceeded once in 1000


@pytest.mark.long
def test_strings_are_as_frequent_as_they_are_probable(tiny_model: Any) -> None:
    """The second and the third token are drawn in a step that checks guesses, of which about a third is accepted."""
    with LLM(tiny_model, device="CPU", max_model_len=32, max_num_seqs=48, speculative_config="off") as llm:
        expected = np.array([COUNT * probability(llm, text) for text in product(ALLOWED, repeat=3)]).reshape(3, 3, 3)
        assert abs(expected.sum() - COUNT) < 1e-6
        assert expected.min() > 5, "or chi-square does not hold"
        _, controller = speculate(llm, lambda tokens, count: [ALLOWED[len(tokens) % 3]] * count, 2)
        wanted = [
            SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=4, ignore_eos=True, allowed_token_ids=[*ALLOWED])
            for seed in range(COUNT)
        ]
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * COUNT, wanted)
    counts = np.zeros((3, 3, 3))
    for output in outputs:
        counts[tuple(ALLOWED.index(token) for token in output.outputs[0].token_ids[:3])] += 1
    assert ((counts - expected) ** 2 / expected).sum() < CRITICAL
    checked = sum(drafts for drafts, _ in controller.checked)
    assert 0.1 * checked < controller.accepted < 0.6 * checked, "guesses are accepted and rejected"


def probability(llm: LLM, text: tuple[int, ...]) -> float:
    """Of a text after PROMPT, where only ALLOWED may come."""
    logits = llm.prompt_logits([*PROMPT, *text])[len(PROMPT) - 1 : -1, list(ALLOWED)].astype(np.float64) / TEMPERATURE
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    return float(np.prod([chances[i, ALLOWED.index(token)] for i, token in enumerate(text)]))
