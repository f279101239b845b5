"""Decodes one step ahead of the host, as on a GPU: the next step is launched before the last one's tokens are looked at.

On the CPU a launch waits, so nothing is won by it here; but all that the host does is the same, and nobody can tell from the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_rounds import GREEDY, MIXED, all_free, prompt, told
from tinyvllm import LLM, SamplingParams
from tinyvllm.runner.runner import Runner


def open_model(model: Path, **options: Any) -> LLM:
    return LLM(model, **(dict(device="CPU", max_model_len=128, max_num_seqs=8) | options))


@pytest.fixture(scope="module")
def behind(tiny_model):
    with open_model(tiny_model) as llm:
        yield llm


@pytest.fixture
def overlapping(monkeypatch):
    monkeypatch.setattr(Runner, "overlaps", True)


@pytest.fixture(scope="module")
def ahead(tiny_model):
    with open_model(tiny_model) as llm:
        yield llm


def order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, launches of decodes and looks at their tokens, as they come."""
    events: list[str] = []
    decode, collect = llm.engine.runner.decode, llm.engine._collect

    def launched(*arguments: Any, **named: Any) -> Any:
        events.append("launch")
        return decode(*arguments, **named)

    def collected(step: Any) -> None:
        events.append("look")
        collect(step)

    monkeypatch.setattr(llm.engine.runner, "decode", launched)
    monkeypatch.setattr(llm.engine, "_collect", collected)
    return events


def same(behind: LLM, ahead: LLM, monkeypatch: pytest.MonkeyPatch, numbers: list[int], params: list[SamplingParams]) -> list[Any]:
    with monkeypatch.context() as waiting:
        waiting.setattr(Runner, "overlaps", False)
        expected = told(behind.generate([prompt(i) for i in numbers], params))
    assert told(ahead.generate([prompt(i) for i in numbers], params)) == expected
    assert all_free(ahead)
    return expected


def test_mixed_requests(behind, ahead, overlapping, monkeypatch):
    same(behind, ahead, monkeypatch, list(range(6)), MIXED)


def test_the_next_step_is_launched_before_the_last_is_looked_at(ahead, overlapping, monkeypatch):
    events = order(ahead, monkeypatch)
    ahead.generate([prompt(0)], [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)])
    assert events == ["launch", "launch", "look", "launch", "look", "launch", "look", "look"], "four behind the prompt's, none too many"


def test_steps_for_nobody_are_harmless(behind, ahead, overlapping, monkeypatch):
    """An end that nobody could know of: a step more runs, whose tokens no one gets, into blocks that the next request has already."""
    tokens = same(behind, ahead, monkeypatch, [0], [GREEDY])[0][0]
    at = next(i for i in range(4, 40) if tokens[i] not in tokens[:i])
    stopped = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[tokens[at]])
    events = order(ahead, monkeypatch)
    same(behind, ahead, monkeypatch, [0], [stopped])
    assert events.count("launch") == at + 1 and events[-1] == "look"
    same(behind, ahead, monkeypatch, [0, 1, 0, 2], [stopped, GREEDY, GREEDY, stopped])
    same(behind, ahead, monkeypatch, [1], [GREEDY])


def test_penalties_forget_a_surplus_token(behind, ahead, overlapping, monkeypatch):
    penalised = dict(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=20, ignore_eos=True)
    tokens = same(behind, ahead, monkeypatch, [1], [SamplingParams(**penalised)])[0][0]
    same(behind, ahead, monkeypatch, [1], [SamplingParams(**penalised, stop_token_ids=[tokens[2]])])
    same(behind, ahead, monkeypatch, [1], [SamplingParams(**penalised)])


def test_the_host_looks_at_each_token_where_it_must(behind, ahead, overlapping, monkeypatch):
    events = order(ahead, monkeypatch)
    same(behind, ahead, monkeypatch, [0], [SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)])
    assert events == []
    late = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=6, ignore_eos=True, stop_token_ids=[97, 98, 99])
    same(behind, ahead, monkeypatch, [0], [late])


def test_up_to_the_longest_sequence(behind, ahead, overlapping, monkeypatch):
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    expected = same(behind, ahead, monkeypatch, [1], [endless])
    assert len(expected[0][0]) + 40 == 128 and expected[0][2] == "length"


def test_few_blocks_and_preemption(tiny_model, overlapping, monkeypatch):
    few = dict(num_blocks=9, max_model_len=96)
    with open_model(tiny_model, **few) as behind, open_model(tiny_model, **few) as ahead:
        same(behind, ahead, monkeypatch, [1, 2, 4], [GREEDY] * 3)
        assert ahead.engine._ahead is None


def test_an_abort_while_a_step_is_ahead(ahead, overlapping):
    engine = ahead.engine
    for name, i in (("a", 0), ("b", 2)):
        engine.add(name, prompt(i)["prompt_token_ids"], GREEDY)
    while engine._ahead is None:
        engine.step()
    engine.abort("a")
    outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
    ended = {output.request_id: output.outputs[0] for output in outputs if output.finished}
    assert ended["a"].finish_reason == "abort" and len(ended["b"].token_ids) == 40
    assert all_free(ahead) and engine._ahead is None
    assert ended["b"].token_ids == ahead.generate([prompt(2)], [GREEDY])[0].outputs[0].token_ids
