"""Steps that go on as they are: what is left out of them changes nothing, whatever a request asks for and whenever that changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_rounds import MIXED, open_model, prompt, told
from tinyvllm import LLM, SamplingParams
from tinyvllm.request import StructuredOutputsParams

GREEDY = dict(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with open_model(tiny_model, 1, num_blocks=64) as llm:
        yield llm


def twice(llm: LLM, monkeypatch: pytest.MonkeyPatch, params: list[SamplingParams]) -> tuple[list[Any], list[Any], int]:
    """What all together get when steps go on, and when each is scheduled anew; and how many went on."""
    scheduler, prompts, went = llm.engine.scheduler, [prompt(i) for i in range(len(params))], []
    onward = scheduler._reuse

    def counted(unseen: int) -> Any:
        plan = onward(unseen)
        went.append(plan is not None)
        return plan

    monkeypatch.setattr(scheduler, "_reuse", counted)
    going = told(llm.generate(prompts, params))
    monkeypatch.setattr(scheduler, "_reuse", lambda unseen: None)
    return going, told(llm.generate(prompts, params)), sum(went)


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
def test_the_same_as_if_each_were_scheduled_anew(llm, monkeypatch, more):
    shared_prefix_lens = [
        SamplingParams(**{**GREEDY, "temperature": t, "seed": 5, "repetition_penalty": r}, **more) for t, r in ((0.0, 1.0), (0.9, 1.2))
    ]
    going, anew, went = twice(llm, monkeypatch, MIXED if not more else shared_prefix_lens)
    assert going == anew and went > 15


def test_what_min_tokens_keeps_away_comes_when_they_are_there(llm, monkeypatch):
    (free,) = told(llm.generate([prompt(0)], [SamplingParams(**GREEDY)]))
    stop = free[0][-1]
    params = SamplingParams(**GREEDY | {"max_tokens": 60}, stop_token_ids=[stop], min_tokens=12)
    going, anew, went = twice(llm, monkeypatch, [params])
    assert going == anew and went > 10
    tokens, reason = going[0][0], going[0][2]
    assert stop not in tokens[:12] and len(tokens) > 12 and (reason, tokens[-1]) == ("stop", stop)
