"""Steps with drafts that fail, and drafters that fail, cost speed only: every request gets the tokens that it gets without drafts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.drafting import Fixed, Oracle, Scripted, speculate
from tests.engine.test_heads import config_of
from tests.engine.test_rounds import all_free, results
from tests.engine.test_speculation import ALL, OPTIONS, PROMPTS, StateReader, params, prompt
from tinyvllm import LLM, AsyncLLM, SamplingParams
from tinyvllm.request import RequestOutput
from tinyvllm.scheduler import Schedule
from tinyvllm.speculate.controller import AdaptiveController, WindowController
from tinyvllm.speculate.protocol import Draft

FEW = slice(0, 5)  # greedy, sampled, filters, penalties and a grammar: draws at once, and by turns
BATCH = dict(max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**OPTIONS, **BATCH) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(plain: LLM) -> Any:
    outputs = plain.generate(PROMPTS[FEW], ALL[FEW])
    oracle: Any = Oracle(outputs)
    oracle.expected = results(outputs)
    return oracle


@pytest.fixture
def llm(plain: LLM) -> Iterator[LLM]:
    """The same engine, which speculates during a test only."""
    yield plain
    plain.engine.stop_speculation()


PLACES: dict[str, Callable[[LLM], tuple[Any, str]]] = {
    "prepare": lambda llm: (llm.engine.runner, "prepare"),
    "launch": lambda llm: (llm.engine.runner, "launch"),
    "rows": lambda llm: (llm.engine.stages, "prepare_rows"),
    "draw": lambda llm: (llm.engine.stages, "draw_rows"),
    "log-probabilities": lambda llm: (llm.engine.sampler, "logprobs"),
    "states": lambda llm: (llm.engine.stages, "pass_states"),
}


@contextmanager
def faults(llm: LLM, place: str, error: Exception, when: Callable[[int, Schedule], bool]) -> Iterator[list[Schedule]]:
    """While a step with drafts is checked, a call at a place raises if `when` says so of the number of such calls and the schedule."""
    owner, name = PLACES[place](llm)
    loop, original = llm.engine.loop, getattr(owner, name)
    check, checking, failed = loop._run_check, [], []  # type: ignore[attr-defined]
    calls = 0

    def run_check(schedule: Schedule) -> None:
        checking.append(schedule)
        try:
            check(schedule)
        finally:
            checking.pop()

    def call(*given: Any, **named: Any) -> Any:
        nonlocal calls
        if checking:
            calls += 1
            if when(calls, checking[0]):
                failed.append(checking[0])
                raise error
        return original(*given, **named)

    loop._run_check = run_check  # type: ignore[attr-defined]
    setattr(owner, name, call)
    try:
        yield failed
    finally:
        setattr(owner, name, original)


def switched_off(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]


@pytest.mark.parametrize(("place", "error"), [(place, RuntimeError("planted")) for place in PLACES] + [("launch", MemoryError("planted"))])
def test_a_step_with_drafts_that_fails_once(llm: LLM, oracle: Any, place: str, error: Exception) -> None:
    """By turns, the third call is in the middle of a step, in which other sequences have their tokens already."""
    _, controller = speculate(llm, oracle.half_right, 3)
    with faults(llm, place, error, lambda call, schedule: call == 3) as failed:
        assert results(llm.generate(PROMPTS[FEW], ALL[FEW])) == oracle.expected
    assert len(failed) == 1 and llm.engine.recovery.num_failed
    assert all_free(llm) and llm.engine.speculation is not None and llm.engine.speculation.on and controller.checked
    assert results(llm.generate(PROMPTS[FEW], ALL[FEW])) == oracle.expected


def test_steps_with_drafts_that_always_fail_end_speculation_and_no_request(llm: LLM, oracle: Any, caplog: pytest.LogCaptureFixture) -> None:
    speculate(llm, oracle.half_right, 3)
    with faults(llm, "launch", RuntimeError("planted"), lambda call, schedule: True) as failed, caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert results(llm.generate(PROMPTS[FEW], ALL[FEW])) == oracle.expected
    assert len(failed) == 3 and [line for line in switched_off(caplog) if "3 steps that checked drafts" in line]
    assert all_free(llm)


def test_memory_that_always_runs_out_for_drafts_ends_no_request(llm: LLM, oracle: Any) -> None:
    """A larger step may be too large; the sequences continue without drafts, and later ones get drafts again."""
    speculate(llm, oracle.half_right, 3)
    with faults(llm, "launch", MemoryError(), lambda call, schedule: True) as failed:
        for _ in range(4):
            assert results(llm.generate(PROMPTS[FEW], ALL[FEW])) == oracle.expected
    assert len(failed) > 3 and llm.engine.speculation is not None and llm.engine.speculation.on
    _, controller = speculate(llm, oracle.half_right, 3)
    assert results(llm.generate(PROMPTS[FEW], ALL[FEW])) == oracle.expected and controller.accepted


def test_drafts_that_make_steps_fail_are_not_tried_again(llm: LLM, oracle: Any) -> None:
    """The sequences of that step continue without drafts, later ones with theirs."""
    _, controller = speculate(llm, oracle.half_right, 3)
    length = len(PROMPTS[1]["prompt_token_ids"])

    def is_its_draft(call: int, schedule: Schedule) -> bool:
        return any(entry.drafts and len(entry.sequence.prompt_token_ids) == length for entry in schedule.entries)

    with faults(llm, "draw", RuntimeError("planted"), is_its_draft) as failed:
        assert results(llm.generate(PROMPTS[FEW], ALL[FEW])) == oracle.expected
        accepted = controller.accepted
        assert results(llm.generate(PROMPTS[2:5], ALL[2:5])) == oracle.expected[2:5]
    assert len(failed) == 1 and controller.accepted > accepted + 5


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_heads_after_a_step_that_failed(tiny_model: Any, tmp_path: Any, method: str) -> None:
    """The sequences are computed again, and so are the heads' entries."""
    wanted = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 0.9)]
    texts = [{"prompt_token_ids": [5, 9, 14, 9, 14, 9, 3]}, {"prompt_token_ids": [*range(20, 61)]}]
    options: dict[str, Any] = dict(device="CPU", num_blocks=24, max_num_seqs=2, max_num_batched_tokens=32)
    with LLM(str(tiny_model), **options, speculative_config=config_of(method, tmp_path)) as llm:
        expected = results(llm.generate(texts, wanted))
        with faults(llm, "log-probabilities", RuntimeError("planted"), lambda call, schedule: call == 4) as failed:
            assert results(llm.generate(texts, wanted)) == expected
        assert len(failed) == 1 and llm.engine.speculation is not None and llm.engine.speculation.on
        llm.engine.stop_speculation()
        assert results(llm.generate(texts, wanted)) == expected


# --- drafters that do not keep to the protocol


ODD: dict[str, Callable[[list[int]], Draft]] = {
    "too few": lambda right: Draft(right[:1]),
    "confidences that are no numbers": lambda right: Draft(right, [float("nan"), float("inf"), -5.0][: len(right)]),
    "too few confidences": lambda right: Draft(right, [0.9]),
    "too many confidences": lambda right: Draft(right, [0.9] * 40),
    "huge integers": lambda right: Draft([*right[:1], 1 << 80, *right[1:]]),
    "true and false": lambda right: Draft([True, False, True]),
}


@pytest.mark.parametrize("controller", [AdaptiveController, WindowController])
@pytest.mark.parametrize("how", ODD)
def test_odd_drafts_change_nothing(llm: LLM, oracle: Any, how: str, controller: Any) -> None:
    class Odd(Scripted):
        def propose(self, requests: Any) -> list[Draft]:
            return [ODD[how](oracle.right(r.sequence.token_ids(0, len(r.sequence)), r.max_drafts)) for r in requests]

    llm.engine.speculate(Odd(oracle.right), controller(4))
    assert results(llm.generate(PROMPTS[FEW], ALL[FEW])) == oracle.expected and all_free(llm)


@pytest.mark.parametrize("stop", [False, True])
def test_a_change_of_drafters_loses_no_step_in_flight(oracle: Any, stop: bool) -> None:
    """A drafter of hidden states has another loop: the tokens of the step in flight must be read before."""
    with LLM(**OPTIONS, **BATCH, async_scheduling=True) as llm:
        engine = llm.engine
        engine.add("a", PROMPTS[0]["prompt_token_ids"], ALL[0])
        engine.step()
        engine.step()
        assert engine.loop.in_flight
        if stop:
            speculate(llm, lambda tokens, count: [], 3)
            assert not engine.loop.in_flight
            engine.step()
            assert engine.loop.in_flight
            engine.stop_speculation()
        else:
            engine.speculate(StateReader(oracle.right), Fixed(3))
        outputs = [output for _ in range(60) if engine.has_work() for output in engine.step()]
        assert results(outputs[-1:]) == oracle.expected[:1] and all_free(llm)


# --- how outputs arrive


def test_prompt_logprobs_are_those_without_drafts(llm: LLM) -> None:
    """While a prompt is scored nothing is drafted; a request that runs meanwhile keeps its tokens."""
    wanted = [params("logprobs", prompt_logprobs=2), params("greedy"), params("penalties", prompt_logprobs=0)]
    texts = [prompt(1), prompt(2), prompt(4)]
    expected = llm.generate(texts, wanted)
    _, controller = speculate(llm, Oracle(expected).half_right, 3)
    outputs = llm.generate(texts, wanted)
    assert results(outputs) == results(expected) and controller.accepted
    assert [output.prompt_logprobs for output in outputs] == [output.prompt_logprobs for output in expected]


def test_deltas_of_a_stream_add_up(tiny_model: Any) -> None:
    """Several tokens come in one event; together they are the tokens, the text and the log-probabilities without drafts."""
    wanted: dict[str, Any] = dict(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1, allowed_token_ids=[*range(100, 108)])
    text, options = {"prompt_token_ids": [5, 9, 14, 9]}, dict(device="CPU", max_model_len=64)
    with LLM(tiny_model, **options, speculative_config="off") as without:
        (expected,) = results(without.generate([text], [SamplingParams(**wanted)]))

    async def events(llm: AsyncLLM) -> list[RequestOutput]:
        return [output async for output in llm.generate(text, SamplingParams(**wanted, output_kind="delta"))]

    streaming = AsyncLLM(tiny_model, **options, speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    try:
        parts = [event.outputs[0] for event in asyncio.run(events(streaming))]
    finally:
        streaming.close()
    assert max(len(part.token_ids) for part in parts) > 1, "a step gives several tokens"
    joined = [token for part in parts for token in part.token_ids], "".join(part.text for part in parts)
    assert joined == expected[:2] and [entry for part in parts for entry in part.logprobs or ()] == expected[4]
