"""Reused decode steps: what they skip changes no token, for any option of a request and whenever its effect changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_rounds import MIXED, open_model, prompt, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.request import StructuredOutputsParams

GREEDY = dict(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with open_model(tiny_model, 1, num_blocks=64) as llm:
        yield llm


def twice(llm: LLM, monkeypatch: pytest.MonkeyPatch, params: list[SamplingParams]) -> tuple[list[Any], list[Any], int]:
    """The results with reused steps, those with a new schedule for each step, and the number of reused steps."""
    scheduler, prompts, went = llm.engine.scheduler, [prompt(i) for i in range(len(params))], []
    onward = scheduler._reuse

    def counted(unseen: int) -> Any:
        plan = onward(unseen)
        went.append(plan is not None)
        return plan

    monkeypatch.setattr(scheduler, "_reuse", counted)
    reused = results(llm.generate(prompts, params))
    monkeypatch.setattr(scheduler, "_reuse", lambda unseen: None)
    return reused, results(llm.generate(prompts, params)), sum(went)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 2},
        {"bad_words": ["e", "th"]},
        {"allowed_token_ids": list(range(97, 123))},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
    ],
    ids=lambda more: next(iter(more), "mixed"),
)
def test_the_same_as_with_a_new_schedule_each_step(llm, monkeypatch, more):
    constrained = [
        SamplingParams(**{**GREEDY, "temperature": t, "seed": 5, "repetition_penalty": r}, **more) for t, r in ((0.0, 1.0), (0.9, 1.2))
    ]
    reused, scheduled, count = twice(llm, monkeypatch, MIXED if not more else constrained)
    assert reused == scheduled and count > 15


def test_a_stop_token_is_possible_again_after_min_tokens(llm, monkeypatch):
    (free,) = results(llm.generate([prompt(0)], [SamplingParams(**GREEDY)]))
    stop = free[0][-1]
    params = SamplingParams(**GREEDY | {"max_tokens": 60}, stop_token_ids=[stop], min_tokens=12)
    reused, scheduled, count = twice(llm, monkeypatch, [params])
    assert reused == scheduled and count > 10
    tokens, reason = reused[0][0], reused[0][2]
    assert stop not in tokens[:12] and len(tokens) > 12 and (reason, tokens[-1]) == ("stop", stop)
