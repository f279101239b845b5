"""While nothing recurs, an engine with a lookup drafter runs as one without: by counts of what is called."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.drafting import Fixed
from tests.engine.test_rounds import all_free, results
from tests.speculate.texts import sequence
from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.draft_loop import TIMED
from tinyvllm.engine.speculation import Speculation
from tinyvllm.request import RequestOptions
from tinyvllm.scheduler import Schedule, Scheduled
from tinyvllm.speculate.controller import AdaptiveController
from tinyvllm.speculate.ngram import NgramDrafter
from tinyvllm.speculate.suffix import FIRST_MATCH, SuffixDrafter

OPTIONS: dict[str, Any] = dict(device="CPU", max_model_len=128, max_num_seqs=4)
LOOKS = (1, 5, 11, 20, 33, 49, 65)  # lengths of an output in which nothing recurs
ONCE = {"prompt_token_ids": [0, *range(10, 40)]}
REPEATS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, allowed_token_ids=[*range(400, 406)])


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    llms = {"plain": LLM(**OPTIONS), "run-ahead": LLM(**OPTIONS, async_scheduling=True), "rounds": LLM(**OPTIONS, num_scheduler_steps=4)}
    yield llms
    for llm in llms.values():
        llm.close()


class Every(Fixed):
    """Takes every draft, of what recurs at a look."""

    pauses = True


class Quiet(SuffixDrafter):
    """Finds nothing, whatever the text."""

    def recurs(self, sequence: Any, tenant: str, times: int = 1) -> bool:
        super().recurs(sequence, tenant, times)
        return False


def count_calls(calls: Counter[str], owner: Any, *names: str) -> None:
    for name in names:
        method = getattr(owner, name)

        def call(*arguments: Any, _name: str = name, _method: Any = method) -> Any:
            calls[_name] += 1
            return _method(*arguments)

        setattr(owner, name, call)


@pytest.mark.parametrize("name", ["plain", "run-ahead", "rounds"])
def test_where_nothing_recurs_nothing_is_called(engines: dict[str, LLM], name: str) -> None:
    """Looks at a few tokens; and schedules are reused, launched ahead and run in rounds as without a drafter."""
    llm, params = engines[name], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    engine, calls = llm.engine, Counter[str]()
    engine.stop_speculation()
    expected, runs = [], dict[str, Counter[str]]()
    for which in ("without", "with"):
        if which == "with":
            drafter, controller = Quiet(), AdaptiveController(8)
            engine.speculate(drafter, controller)
            count_calls(calls, drafter, "recurs", "propose")
            count_calls(calls, controller, "limits", "rest", "choose", "observe", "observe_step", "observe_proposal")
        runs[which] = Counter[str]()
        stages, schedules = engine.stages, engine.scheduler
        originals = [(stages, "launch_whole"), (stages, "launch"), (schedules, "schedule"), (schedules, "follow")]
        saved = [(owner, method, getattr(owner, method)) for owner, method in originals]
        count_calls(runs[which], stages, "launch_whole", "launch")
        count_calls(runs[which], schedules, "schedule", "follow")
        expected.append(results(llm.generate([ONCE] * 2, [params] * 2)))
        for owner, method, original in saved:
            setattr(owner, method, original)
    assert expected[0] == expected[1] and runs["with"] == runs["without"]
    assert calls.pop("observe_step") <= 80 // TIMED + 1
    assert calls.keys() == {"recurs"} and 2 * 6 <= calls["recurs"] <= 2 * 9, calls
    assert all_free(llm)


def calls_by_step(llm: LLM, num_sequences: int) -> list[int]:
    """Calls of functions in each step of decodes."""
    engine, params, counts, number = llm.engine, SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True), list[int](), [0]
    for i in range(num_sequences):
        engine.add(f"r{i}", ONCE["prompt_token_ids"], params, None, RequestOptions())
    engine.step()

    def count(frame: Any, event: str, argument: Any) -> None:
        number[0] += event in ("call", "c_call")

    while engine.has_work():
        number[0] = 0
        sys.setprofile(count)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        counts.append(number[0])
    return counts


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_what_a_step_adds_where_nothing_recurs(engines: dict[str, LLM], num_sequences: int) -> None:
    """In calls, whatever the clock says: a frame of its own loop in `follow` and in `run`; more only where it looks."""
    llm, counts = engines["plain"], []
    for drafts in (False, True):
        llm.engine.stop_speculation()
        if drafts:
            llm.engine.speculate(Quiet(), AdaptiveController(8))
        calls_by_step(llm, num_sequences)
        counts.append(calls_by_step(llm, num_sequences))
    plain, drafted = counts
    more = [b - a for a, b in zip(plain, drafted, strict=True)]
    timed = len(LOOKS) // TIMED + 1  # looks that time the step after them
    assert sum(each <= 5 for each in more) >= len(more) - len(LOOKS) - timed, more
    assert max(more) <= 40 + 40 * num_sequences and sum(more) <= 5 * len(more) + len(LOOKS) * (30 + 15 * num_sequences), more
    llm.engine.stop_speculation()


def test_what_has_ended_is_learned_out_of_the_requests_time(engines: dict[str, LLM]) -> None:
    """Idle, or next to the next prompt; not when the last token is drawn."""
    llm, drafter = engines["plain"], SuffixDrafter(first_match=FIRST_MATCH)
    llm.engine.speculate(drafter, AdaptiveController(8))
    speculation = llm.engine.speculation
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm.generate([ONCE], [params])
    assert drafter.outputs.nbytes == 0 and drafter._tenants and len(speculation._watch) == 1
    llm.engine.on_idle()
    assert drafter.outputs.nbytes and not drafter._tenants and not len(speculation._watch) and not speculation.on_idle()
    learned = drafter.outputs.nbytes
    other = {"prompt_token_ids": [0, *range(50, 90)]}
    llm.generate([other], [params])
    assert drafter.outputs.nbytes == learned
    llm.generate([other], [params])
    assert drafter.outputs.nbytes > learned, "no pause between requests: next to a prompt"
    llm.engine.stop_speculation()


def test_an_idle_engine_learns_in_parts(engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes meanwhile waits for one part, and what is left is not lost."""
    monkeypatch.setattr("tinyvllm.engine.speculation.IDLE_TOKENS", 16)
    llm, drafter = engines["plain"], SuffixDrafter(first_match=FIRST_MATCH)
    llm.engine.speculate(drafter, AdaptiveController(8))
    llm.generate([ONCE], [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)])
    assert [llm.engine.on_idle() for _ in range(2)] == [0.0, 0.0]
    assert llm.engine.speculation.on_idle() is False and drafter.outputs._num_pending == 0
    llm.engine.stop_speculation()


def test_what_waits_to_be_forgotten_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its tokens; and a sequence that was never looked at, as in large batches, leaves nothing to be done."""
    monkeypatch.setattr("tinyvllm.engine.speculation.MAX_ENDED_TOKENS", 20)
    requests: Any = SimpleNamespace(owners={})
    drafter = SuffixDrafter(first_match=FIRST_MATCH)
    speculation = Speculation(drafter, AdaptiveController(4), requests, 100, 100)
    ended = [sequence([*range(10 * i, 10 * i + 8)], [1], i) for i in range(4)]
    assert speculation.rests(Schedule([Scheduled(one, 8, 1, 1) for one in ended[:3]]))
    for one in ended:
        speculation.release(one)
    assert speculation._ended == ended[:2] and [*drafter._tenants] == [0, 1] and drafter.outputs._num_pending == 1
    assert not speculation.on_idle() and not drafter._tenants and speculation._num_ended_tokens == 0


@pytest.mark.parametrize("make", [lambda: SuffixDrafter(first_match=FIRST_MATCH), lambda: NgramDrafter(2)], ids=["suffix", "ngram"])
def test_text_that_begins_to_repeat_is_noticed(engines: dict[str, LLM], make: Any) -> None:
    """By a controller that takes every draft, the answers of six tokens' alphabet take a part of the steps."""
    llm = engines["plain"]
    llm.engine.stop_speculation()
    expected = results(llm.generate([ONCE], [REPEATS]))
    controller = Every(8)
    llm.engine.speculate(make(), controller)
    assert results(llm.generate([ONCE], [REPEATS])) == expected and controller.accepted > 20
    llm.engine.stop_speculation()


@pytest.mark.parametrize("method", ["recurs", "learn_past", "forget"])
def test_a_lookup_that_fails_is_switched_off(engines: dict[str, LLM], caplog: pytest.LogCaptureFixture, method: str) -> None:
    llm, drafter = engines["plain"], SuffixDrafter(first_match=FIRST_MATCH)
    setattr(drafter, method, lambda *arguments: 1 / 0)
    llm.engine.stop_speculation()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = results(llm.generate([ONCE], [params]))
    llm.engine.speculate(drafter, AdaptiveController(8))
    for _ in range(3):
        assert results(llm.generate([ONCE], [params])) == expected
    llm.engine.on_idle()
    speculation = llm.engine.speculation
    assert not speculation.on and not speculation._ended and not speculation._observed and all_free(llm)
    assert len([record for record in caplog.records if "switched off" in record.getMessage()]) == 1
    llm.engine.stop_speculation()


def test_a_rest_ends_with_its_batch(engines: dict[str, LLM]) -> None:
    """The output of a sequence that has ended is not what the next batch waits for."""
    llm, calls = engines["plain"], Counter[str]()
    drafter = Quiet()
    llm.engine.speculate(drafter, AdaptiveController(8))
    count_calls(calls, drafter, "recurs")
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (7, 40, 60)]
    for number, one in enumerate(params):
        llm.engine.add(f"r{number}", ONCE["prompt_token_ids"], one, None, RequestOptions())
        llm.engine.step()
    while llm.engine.has_work():
        llm.engine.step()
    assert calls["recurs"] >= sum(sum(look <= count for look in LOOKS) for count in (7, 40, 60)) - 1
    llm.engine.stop_speculation()


def test_the_rest_of_a_batch_is_not_another_batchs() -> None:
    """Also where nothing was asked between them, as while a prompt is scored."""
    requests: Any = SimpleNamespace(owners={})
    first, second = sequence([1, 2], [3]), sequence([4, 5], [6], 1)
    drafter = Quiet()
    speculation = Speculation(drafter, AdaptiveController(4), requests, 100, 100)
    assert speculation.rests(Schedule([Scheduled(first, 2, 1, 1)])) and speculation.rests(
        Schedule([Scheduled(first, 2, 1, 1)], reused=True)
    )
    drafter.recurs = lambda sequence, tenant, times=1: True  # type: ignore[method-assign]
    assert not speculation.rests(Schedule([Scheduled(second, 2, 1, 1)]))
    assert not speculation.rests(Schedule([Scheduled(second, 2, 1, 1)], reused=True))


def test_a_fixed_number_of_drafts_has_no_looks() -> None:
    """Each draft that there is."""
    requests: Any = SimpleNamespace(owners={})
    speculation = Speculation(Quiet(), Fixed(2), requests, 100, 100)
    repeated = sequence([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3], [4])
    schedule = Schedule([Scheduled(repeated, 11, 1, 1)])
    assert not speculation.rests(schedule) and speculation.propose(schedule) == {0: [1, 2]}
    speculation.release(repeated)
    assert not speculation.drafter._tenants and speculation.on_idle() is False  # type: ignore[attr-defined]
