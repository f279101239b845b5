"""RunAheadLoop: decodes one step ahead of the host, as on a GPU; the next step is launched before the tokens of the last one are read.

On the CPU a launch waits, so this is not faster here; but the host does the same as on a GPU, and the tokens are those of the plain loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_rounds import GREEDY, MIXED, all_free, prompt, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.loop import RunAheadLoop


def open_model(model: Path, **options: Any) -> LLM:
    """Without drafts: the tests count launches, and accepted drafts make them fewer."""
    return LLM(model, **(dict(device="CPU", max_model_len=128, max_num_seqs=8, speculative_config="off") | options))


@pytest.fixture(scope="module")
def plain(tiny_model):
    with open_model(tiny_model, async_scheduling=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def ahead(tiny_model):
    with open_model(tiny_model, async_scheduling=True) as llm:
        assert isinstance(llm.engine.loop, RunAheadLoop)
        yield llm


def order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, launches of decodes and reads of their tokens, as they come."""
    events: list[str] = []
    stages = llm.engine.stages
    launch, append = stages.launch_whole, stages.append_rounds

    def launch_and_note(*arguments: Any, **named: Any) -> Any:
        events.append("launch")
        return launch(*arguments, **named)

    def append_and_note(*arguments: Any) -> None:
        events.append("read")
        append(*arguments)

    monkeypatch.setattr(stages, "launch_whole", launch_and_note)
    monkeypatch.setattr(stages, "append_rounds", append_and_note)
    return events


def same(plain: LLM, ahead: LLM, numbers: list[int], params: list[SamplingParams]) -> list[Any]:
    expected = results(plain.generate([prompt(i) for i in numbers], params))
    assert results(ahead.generate([prompt(i) for i in numbers], params)) == expected
    assert all_free(ahead)
    return expected


def test_mixed_requests(plain, ahead):
    same(plain, ahead, list(range(6)), MIXED)


def test_the_next_step_is_launched_before_the_last_is_read(ahead, monkeypatch):
    events = order(ahead, monkeypatch)
    ahead.generate([prompt(0)], [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)])
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"], "four after the prompt's, no surplus"


def test_a_surplus_step_is_harmless(plain, ahead, monkeypatch):
    """After an end that the host could not know of, one more step runs; its tokens are dropped, its blocks belong to the next request."""
    tokens = same(plain, ahead, [0], [GREEDY])[0][0]
    at = next(i for i in range(4, 40) if tokens[i] not in tokens[:i])
    stopped = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[tokens[at]])
    events = order(ahead, monkeypatch)
    same(plain, ahead, [0], [stopped])
    assert events.count("launch") == at + 1 and events[-1] == "read"
    same(plain, ahead, [0, 1, 0, 2], [stopped, GREEDY, GREEDY, stopped])
    same(plain, ahead, [1], [GREEDY])


def test_penalties_forget_a_surplus_token(plain, ahead):
    penalised = dict(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=20, ignore_eos=True)
    tokens = same(plain, ahead, [1], [SamplingParams(**penalised)])[0][0]
    same(plain, ahead, [1], [SamplingParams(**penalised, stop_token_ids=[tokens[2]])])
    same(plain, ahead, [1], [SamplingParams(**penalised)])


def test_the_host_reads_each_token_if_it_must(plain, ahead, monkeypatch):
    events = order(ahead, monkeypatch)
    same(plain, ahead, [0], [SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)])
    assert events == []
    late = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=6, ignore_eos=True, stop_token_ids=[97, 98, 99])
    same(plain, ahead, [0], [late])


def test_up_to_the_longest_sequence(plain, ahead):
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    expected = same(plain, ahead, [1], [endless])
    assert len(expected[0][0]) + 40 == 128 and expected[0][2] == "length"


def test_few_blocks_and_preemption(tiny_model):
    few = dict(num_blocks=9, max_model_len=96)
    with open_model(tiny_model, **few) as plain, open_model(tiny_model, **few, async_scheduling=True) as ahead:
        same(plain, ahead, [1, 2, 4], [GREEDY] * 3)
        assert not ahead.engine.loop.in_flight


def test_an_abort_while_a_step_is_in_flight(ahead):
    engine = ahead.engine
    for name, i in (("a", 0), ("b", 2)):
        engine.add(name, prompt(i)["prompt_token_ids"], GREEDY)
    while not engine.loop.in_flight:
        engine.step()
    engine.abort("a")
    outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
    ended = {output.request_id: output.outputs[0] for output in outputs if output.finished}
    assert ended["a"].finish_reason == "abort" and len(ended["b"].token_ids) == 40
    assert all_free(ahead) and not engine.loop.in_flight
    assert ended["b"].token_ids == ahead.generate([prompt(2)], [GREEDY])[0].outputs[0].token_ids
