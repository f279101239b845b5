"""One request never harms the others: an exception planted at each stage of one request's life ends that request only.

Every test runs four requests, one of them a victim. The tokens of the others are those that they have alone, the victim's caller gets an
error, and no block, row or table entry is left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.soak_traffic import check_empty
from tinyvllm import LLM, AsyncLLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.engine import recovery
from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.output import RequestState
from tinyvllm.engine.scoring import PromptScore
from tinyvllm.errors import InternalError, KernelError, OutOfMemoryError
from tinyvllm.request import BeamSearchParams, RequestOptions, RequestOutput, StructuredOutputsParams
from tinyvllm.runner import kv
from tinyvllm.sampling import sampler
from tinyvllm.text.detokenize import StopAutomaton

VICTIM = "victim"
TOKENS = 14


class PlantedError(Exception):
    """What a defect would raise."""


def prompt(tokens: int, seed: int) -> list[int]:
    return [256, *np.random.default_rng(seed).integers(32, 127, tokens - 1).tolist()]


OTHERS: dict[str, tuple[list[int], Any]] = {
    "greedy": (prompt(9, 1), SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)),
    "seeded": (prompt(40, 2), SamplingParams(temperature=0.9, seed=3, top_k=20, max_tokens=TOKENS, ignore_eos=True, frequency_penalty=0.3)),
    "several": (prompt(21, 3), SamplingParams(temperature=0.8, seed=4, n=2, max_tokens=TOKENS, ignore_eos=True)),
}
VICTIMS: dict[str, Any] = {
    "plain": SamplingParams(temperature=0.7, seed=50, n=2, max_tokens=TOKENS, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, max_tokens=TOKENS, ignore_eos=True),
    "scored": SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=TOKENS, ignore_eos=True),
    "stop": SamplingParams(temperature=0.0, stop=["zzz"], min_tokens=12, max_tokens=TOKENS),
    "grammar": SamplingParams(
        temperature=0.0, max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(regex="[a-z ]{30}"), bad_words=["ab"]
    ),
    "beams": BeamSearchParams(3, TOKENS, ignore_eos=True),
}
OPTIONS: dict[str, Any] = dict(device="CPU", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, num_blocks=40)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "ahead"])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, async_scheduling=request.param, **OPTIONS) as llm:
        yield llm


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in range(300):
        if not engine.has_work():
            return outputs
        outputs |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not come to an end")


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [part.token_ids for part in output.outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[list[int]]]:
    tokens = {}
    for name, (token_ids, params) in OTHERS.items():
        llm.engine.add(name, token_ids, params)
        tokens[name] = tokens_of(finish(llm.engine)[name])
    return tokens


Function = Callable[..., Any]
Names = Callable[..., str]  # the id of the request that a call is for


def plant(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, request_of: Names, error: type[BaseException], after: int, times: int
) -> list[int]:
    """Make a method raise for calls `after` and later that are for the victim, `times` times; the list counts how often it raised."""
    function: Function = getattr(owner, name)
    calls, raised = [0], [0]

    def planted(*args: Any, **kwargs: Any) -> Any:
        if request_of(*args, **kwargs) == VICTIM:
            calls[0] += 1
            if calls[0] > after and raised[0] < times:
                raised[0] += 1
                raise error("on purpose")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, planted)
    return raised


def of_sequence(sequence: Any, *rest: Any, **more: Any) -> str:
    return str(sequence.request_id)


def of_sequences(sequences: Any, *rest: Any, **more: Any) -> str:
    return next((s.request_id for s in sequences if s.request_id == VICTIM), "")


def of_id(request_id: str, *rest: Any, **more: Any) -> str:
    return request_id


def of_second(first: Any, second: Any, *rest: Any, **more: Any) -> str:
    return of_sequences(second)


def of_prompt(score: Any, *rest: Any, **more: Any) -> str:
    return str(score.request_id)


def of_step(step: Any, *rest: Any, **more: Any) -> str:
    return of_sequences([entry.sequence for entry in step.logit_rows])


def of_schedule(schedule: Any, *rest: Any, **more: Any) -> str:
    return of_sequences([entry.sequence for entry in schedule.entries])


def of_parameters(params: SamplingParams, *rest: Any, **more: Any) -> str:
    return VICTIM if params.seed in (50, 51) else ""


# stage: (the object that has the method, its name, what its call is for, the victim's parameters, calls that succeed before)
Stage = tuple[Callable[[Engine], Any], str, Names, str, int]
IN_PLACE: dict[str, Stage] = {
    "joining the sampler": (lambda e: e.sampler, "add", of_sequence, "plain", 0),
    "joining the sampler after siblings": (lambda e: e.sampler, "add", of_sequence, "plain", 1),
    "a row of sampling parameters": (
        lambda e: sampler,
        "parameter_row",
        of_parameters,
        "plain",
        0,
    ),
    "statistics of a token": (lambda e: e.stats, "tokens_appended", of_sequence, "plain", 3),
    "statistics of the end": (lambda e: e.stats, "request_finished", of_sequence, "plain", 0),
    "a token": (lambda e: RequestState, "append", lambda self, *rest: self.request_id, "plain", 4),
    "the end": (lambda e: RequestState, "finish", lambda self, *rest: self.request_id, "plain", 0),
    "the output": (lambda e: RequestState, "output", lambda self: self.request_id, "plain", 2),
    "logprobs": (lambda e: RequestState, "_with_texts", lambda self, *rest: self.request_id, "logprobs", 3),
    "leaving the constraints": (lambda e: e.constraints, "remove", of_sequence, "grammar", 0),
    "leaving the scheduler": (lambda e: e.scheduler, "finish", of_sequence, "plain", 0),
    "the grammar": (lambda e: e.constraints, "accept", of_sequence, "grammar", 3),
    "prompt_logprobs": (lambda e: e.requests, "set_prompt_logprobs", of_id, "scored", 0),
    "scoring": (lambda e: PromptScore, "add", of_prompt, "scored", 0),
    "a beam's token": (lambda e: BeamState, "append", of_prompt, "beams", 5),
    "the next beams": (lambda e: BeamState, "next_round", of_prompt, "beams", 3),
    "a fork": (lambda e: e.scheduler, "fork", lambda parent, child: child.request_id, "beams", 2),
}
IN_THE_SCHEDULER: dict[str, Stage] = {
    "publishing its blocks": (lambda e: e.scheduler.prefixes, "publish", of_sequence, "plain", 0),
    "its hashes": (lambda e: e.scheduler.prefixes, "match", of_sequence, "plain", 0),
}
IN_A_STEP: dict[str, Stage] = {
    "min_tokens reached": (lambda e: e.sampler, "_release_withheld", of_sequences, "stop", 4),
    "preparing the draw": (lambda e: e.sampler, "prepare", of_sequences, "plain", 3),
    "masks": (lambda e: e.constraints, "start_masks", of_sequences, "grammar", 3),
    "sending masks": (lambda e: e.constraints, "apply", of_second, "grammar", 3),
    "log-probabilities": (lambda e: e.sampler, "logprobs", of_second, "logprobs", 3),
    "preparing the step": (lambda e: e.runner, "prepare", of_schedule, "plain", 2),
    "the forward pass": (lambda e: e.runner, "launch", of_step, "grammar", 4),
    "the first chunk": (lambda e: e.runner, "launch", lambda step: of_sequences([e.sequence for e in [*step.logit_rows]]), "plain", 0),
    "beams' forward pass": (lambda e: e.runner, "launch", of_step, "beams", 4),
}


def run_with_victim(engine: Engine, params: Any) -> dict[str, RequestOutput]:
    for name, (token_ids, other) in OTHERS.items():
        engine.add(name, token_ids, other)
    engine.add(VICTIM, prompt(30, 9), params)
    outputs = finish(engine)
    check_empty(engine)
    return outputs


@pytest.mark.parametrize("stage", IN_PLACE)
def test_an_exception_for_one_request_ends_that_request_only(llm, alone, monkeypatch, stage: str) -> None:
    where, name, request_of, params, after = IN_PLACE[stage]
    raised = plant(monkeypatch, where(llm.engine), name, request_of, PlantedError, after, times=1)
    outputs = run_with_victim(llm.engine, VICTIMS[params])
    assert raised == [1], "the plant was not reached"
    assert isinstance(outputs[VICTIM].failure, InternalError) and "PlantedError in" in str(outputs[VICTIM].failure)
    assert [part.finish_reason for part in outputs[VICTIM].outputs] == ["error"] * len(outputs[VICTIM].outputs)
    assert {name: tokens_of(outputs[name]) for name in OTHERS} == alone


@pytest.mark.parametrize("stage", [*IN_THE_SCHEDULER, *IN_A_STEP])
def test_a_step_that_fails_with_one_request_ends_that_request_only(llm, alone, monkeypatch, stage: str) -> None:
    where, name, request_of, params, after = (IN_THE_SCHEDULER | IN_A_STEP)[stage]
    raised = plant(monkeypatch, where(llm.engine), name, request_of, PlantedError, after, times=1000)
    outputs = run_with_victim(llm.engine, VICTIMS[params])
    if not raised[0]:
        pytest.skip("this loop does without that stage")
    assert isinstance(outputs[VICTIM].failure, InternalError)
    assert {name: tokens_of(outputs[name]) for name in OTHERS} == alone


@pytest.mark.parametrize("stage", IN_A_STEP)
def test_a_step_that_fails_once_harms_no_request(llm, alone, monkeypatch, stage: str) -> None:
    where, name, request_of, params, after = IN_A_STEP[stage]
    llm.engine.add(VICTIM, prompt(30, 9), VICTIMS[params])
    undisturbed = tokens_of(finish(llm.engine)[VICTIM])
    plant(monkeypatch, where(llm.engine), name, request_of, PlantedError, after, times=1)
    outputs = run_with_victim(llm.engine, VICTIMS[params])
    assert {name: tokens_of(outputs[name]) for name in OTHERS} == alone
    assert outputs[VICTIM].failure is None and tokens_of(outputs[VICTIM]) == undisturbed


@pytest.mark.parametrize("error", [MemoryError, PlantedError, KernelError], ids=lambda error: error.__name__)
def test_the_caller_gets_a_named_error(llm, monkeypatch, error: type[Exception]) -> None:
    plant(monkeypatch, llm.engine.runner, "prepare", of_schedule, error, 1, times=1000)
    outputs = run_with_victim(llm.engine, VICTIMS["plain"])
    expected = {MemoryError: OutOfMemoryError, PlantedError: InternalError, KernelError: KernelError}[error]
    assert type(outputs[VICTIM].failure) is expected


STAGES_OF_ADMISSION: dict[str, tuple[Callable[[Engine], Any], str, Names]] = {
    "building": (lambda e: e._builder, "build", of_id),
    "its constraints": (lambda e: e.requests, "constrain", of_sequence),
    "taking constraints in": (lambda e: e.constraints, "initial_tokens", of_sequence),
    "the queue": (lambda e: e.scheduler, "add", of_sequence),
    "the queue's entry": (lambda e: e.scheduler.waiting, "push", of_sequence),
    "its statistics": (lambda e: e.stats, "request_added", of_sequence),
    "scoring": (lambda e: e.scoring, "add", of_id),
}


@pytest.mark.parametrize("error", [MemoryError, PlantedError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("stage", STAGES_OF_ADMISSION)
def test_an_admission_that_raises_leaves_nothing(llm, alone, monkeypatch, stage: str, error: type[Exception]) -> None:
    where, name, request_of = STAGES_OF_ADMISSION[stage]
    plant(monkeypatch, where(llm.engine), name, request_of, error, 0, times=1)
    params = replace(VICTIMS["grammar"], prompt_logprobs=1, n=2)
    for other, (token_ids, other_params) in OTHERS.items():
        llm.engine.add(other, token_ids, other_params)
    with pytest.raises(InternalError if error is PlantedError else OutOfMemoryError, match="request victim: .* in admission"):
        llm.engine.add(VICTIM, prompt(30, 9), params, options=RequestOptions(deadline_ms=1e8))
    outputs = finish(llm.engine)
    check_empty(llm.engine)
    assert {name: tokens_of(outputs[name]) for name in OTHERS} == alone
    llm.engine.add(VICTIM, prompt(30, 9), params)
    assert finish(llm.engine)[VICTIM].failure is None, "the id is free again, and the next request of this kind works"


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("stage", ["the observers", "the end"])
def test_an_abort_that_raises_frees_everything(llm, alone, monkeypatch, stage: str, steps: int) -> None:
    engine = llm.engine
    owner, name, request_of = (engine.stats, "request_aborted", of_id) if stage == "the observers" else (RequestState, "finish", of_prompt)
    plant(monkeypatch, owner, name, request_of, PlantedError, 0, times=1)
    for other, (token_ids, params) in OTHERS.items():
        engine.add(other, token_ids, params)
    engine.add(VICTIM, prompt(30, 9), VICTIMS["plain"])
    outputs = {output.request_id: output for _ in range(steps) for output in engine.step()}
    engine.abort(VICTIM)
    outputs |= finish(engine)
    check_empty(engine)
    assert isinstance(outputs[VICTIM].failure, InternalError)
    assert {name: tokens_of(outputs[name]) for name in OTHERS} == alone


@pytest.mark.parametrize("event", ["step_started", "phase_ended", "step_scheduled", "step_launched", "step_finished"])
def test_an_observer_that_fails_for_a_step_changes_no_request(llm, alone, monkeypatch, caplog, event: str) -> None:
    def broken(*args: object) -> None:
        raise PlantedError("on purpose")

    monkeypatch.setattr(llm.engine.stats, event, broken)
    monkeypatch.setattr(llm.engine.observer, "_logged", set())
    outputs = run_with_victim(llm.engine, VICTIMS["plain"])
    assert outputs[VICTIM].failure is None and {name: tokens_of(outputs[name]) for name in OTHERS} == alone
    assert [record.getMessage() for record in caplog.records] == [
        f"EngineStats.{event} failed; the engine continues, and this is logged once"
    ]


def test_a_device_that_fails_every_step_ends_the_engine(llm, monkeypatch) -> None:
    def broken(*args: object) -> None:
        raise PlantedError("on purpose")

    monkeypatch.setattr(llm.engine.runner, "prepare", broken)
    with pytest.raises(PlantedError):
        for number in range(2 * recovery.MAX_FAILED_STEPS):
            llm.engine.add(f"r{number}", [5, 6], OTHERS["greedy"][1])
            finish(llm.engine)
    monkeypatch.undo()
    for number in range(2 * recovery.MAX_FAILED_STEPS):
        llm.engine.abort(f"r{number}")
    assert finish(llm.engine) and not llm.engine.has_work()


def test_the_library_returns_the_others_and_raises_if_all_fail(llm, alone, monkeypatch) -> None:
    def append(self: RequestState, sequence: Any, token: int, logprobs: Any) -> Any:
        if len(self.prompt_token_ids) == 30:
            raise PlantedError("on purpose")
        return original(self, sequence, token, logprobs)

    original = RequestState.append
    monkeypatch.setattr(RequestState, "append", append)
    victim = {"prompt_token_ids": prompt(30, 9)}
    greedy = OTHERS["greedy"]
    good, bad = llm.generate([{"prompt_token_ids": greedy[0]}, victim], greedy[1])
    assert tokens_of(good) == alone["greedy"] and bad.outputs[0].finish_reason == "error" and "PlantedError" in bad.outputs[0].error
    for run in (lambda: llm.generate(victim, greedy[1]), lambda: list(llm.stream(victim, greedy[1]))):
        with pytest.raises(InternalError, match="PlantedError in taking a token"):
            run()
    check_empty(llm.engine)


def test_concurrent_callers(tiny_model: Path, alone: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through AsyncLLM the error is raised to its own caller, under the caller's request id."""
    llm = AsyncLLM(tiny_model, **OPTIONS)

    async def last(name: str, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        return [output async for output in llm.generate({"prompt_token_ids": token_ids}, params, name)][-1]

    async def run(victim: SamplingParams) -> None:
        everything = [last(name, *other) for name, other in OTHERS.items()]
        *others, error = await asyncio.gather(*everything, last(VICTIM, prompt(30, 9), victim), return_exceptions=True)
        assert {name: tokens_of(output) for name, output in zip(OTHERS, others, strict=True)} == alone
        assert isinstance(error, InternalError) and str(error).startswith("request victim: ")
        assert llm.alive

    def of_state(self: RequestState, *rest: object) -> str:
        return VICTIM if self.request_id.startswith(VICTIM) else ""

    for owner, name in ((RequestState, "append"), (RequestState, "output"), (RequestState, "__init__")):
        with monkeypatch.context() as patch:
            request_of = of_state if name != "__init__" else lambda self, request_id, *rest, **more: request_id[: len(VICTIM)]
            raised = plant(patch, owner, name, request_of, PlantedError, 0, times=1)
            asyncio.run(run(VICTIMS["plain"]))
            assert raised == [1]
    llm.close()


def test_words_are_tokenised_in_neither_the_event_loop_nor_the_engines_thread(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 bad words of 60,000 characters held all requests for 40 s. The longest that are allowed are prepared in a thread of their own."""
    llm, threads = AsyncLLM(tiny_model, **OPTIONS), []
    encode, build = type(llm.tokenizer).encode_within, StopAutomaton.__init__

    def encode_and_note(self: Any, text: str) -> Any:
        threads.append(threading.current_thread())
        return encode(self, text)

    def build_and_note(self: StopAutomaton, stops: Any) -> None:
        threads.append(threading.current_thread())
        build(self, stops)

    monkeypatch.setattr(type(llm.tokenizer), "encode_within", encode_and_note)
    monkeypatch.setattr(StopAutomaton, "__init__", build_and_note)
    words = ["w" * 1000 + chr(97 + i) for i in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=2, bad_words=words, stop=words)

    async def run() -> None:
        for _ in range(2):
            assert [output async for output in llm.generate({"prompt_token_ids": [5]}, params)][-1].finished

    asyncio.run(run())
    assert len(threads) == 2 * 16 + 1, "each word with and without a space, all stop strings at once, for both requests together"
    assert not {llm._own.thread, threading.current_thread()}.intersection(threads)
    llm.close()


def test_a_copy_of_blocks_that_fails_half_way_is_not_repeated(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reference, the copy is an assignment to the pool of each layer. Memory runs out after the first, once."""
    monkeypatch.setenv("TINYVLLM_KERNELS", "kv_copy=ref")
    registry.forget_choices()
    copies, failures = kv.copy_blocks, []

    def fail_once(pool: Any, pairs: Any, count: Any) -> Any:
        if pool is llm.engine.runner.pool.layers[1].keys and not failures:
            failures.append(1)
            raise MemoryError("planted")
        return copies(pool, pairs, count)

    with LLM(tiny_model, **OPTIONS) as llm:
        prompts = [{"prompt_token_ids": prompt(21, i)} for i in range(4)]
        params = SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=TOKENS, ignore_eos=True)
        singles = [replace(params, n=1, seed=4 + i) for i in range(2)]
        alone = [[tokens_of(llm.generate(one, single)[0])[0] for single in singles] for one in prompts]
        monkeypatch.setattr(kv, "copy_blocks", fail_once)
        for _ in range(3):  # the blocks of one sequence are later those of others
            assert [tokens_of(output) for output in llm.generate(prompts, params)] == alone
        assert failures
    registry.forget_choices()
