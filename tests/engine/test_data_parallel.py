"""AsyncLLM with several replicas on the CPU: answers, where requests go, what is shared, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_tensor_parallel import alive
from tests.tiny.adapters import write_adapter
from tinyvllm import LLM, AsyncLLM, LoRARequest, RequestError, RequestOutput, SamplingParams
from tinyvllm.engine import replica as replica_module
from tinyvllm.engine.replica import Replica, combined
from tinyvllm.engine.replica_link import portable
from tinyvllm.errors import ArgumentError, BusyError, InternalError, ModelError, OutOfMemoryError, RankError
from tinyvllm.lab.engine_target import EngineTarget
from tinyvllm.lab.sweep import Sweep
from tinyvllm.request import BeamSearchParams, StructuredOutputsParams

SMALL: dict[str, Any] = {"num_blocks": 96, "max_num_seqs": 4, "device": "CPU", "speculative_config": "off"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)
PROMPTS = [f"{letter} prompt" for letter in "abcdefgh"]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_model, data_parallel_size=2, enable_lora=True, max_loras=2, **SMALL)
    yield llm
    llm.close()


def other(llm: AsyncLLM) -> Replica:
    assert llm._replicas is not None
    (replica,) = llm._replicas._all
    return replica


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        newest = output
    return newest


async def counts(llm: AsyncLLM, name: str = "generated_tokens") -> list[int]:
    return [getattr(one, name) for one in await llm.all_metrics()]


def go_to(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, replica: Replica | None) -> None:
    """All requests go to one replica; None is that of this process."""
    monkeypatch.setattr(llm._replicas, "choose", lambda *_: replica)


async def until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come true")


def test_answers_are_those_of_one_engine_and_both_replicas_give_some(llm: AsyncLLM, tiny_model: Path) -> None:
    seeded = SamplingParams(temperature=0.9, seed=4, max_tokens=8, ignore_eos=True, logprobs=2)
    in_letters = SamplingParams(temperature=0.9, seed=6, max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[a-z]{8}"))
    beams = BeamSearchParams(2, 5)

    async def run() -> list[Any]:
        before = await counts(llm)
        found = [await asyncio.gather(*(last(llm.generate(text, params)) for text in PROMPTS)) for params in (GREEDY, seeded, in_letters)]
        assert [output.prompt for output in found[0]] == PROMPTS
        assert all(new > old for old, new in zip(before, await counts(llm), strict=True))
        best = [await llm.beam_search(text, beams) for text in PROMPTS[:4]]
        return [[(output.outputs[0].token_ids, output.outputs[0].logprobs, output.outputs[0].text) for output in one] for one in found] + [
            [[each.token_ids for each in output.outputs] for output in best]
        ]

    answers = asyncio.run(run())
    with LLM(tiny_model, **SMALL) as one:
        for params, found in zip((GREEDY, seeded, in_letters), answers, strict=False):
            outputs = one.generate(PROMPTS, params)
            assert found == [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.outputs[0].text) for output in outputs]
        assert answers[3] == [[each.token_ids for each in output.outputs] for output in one.beam_search(PROMPTS[:4], beams)]


def test_a_prompt_goes_where_its_beginning_was_computed(llm: AsyncLLM) -> None:
    """Four conversations of three turns, together: each turn finds the one before in the cache of its replica, whatever their order."""

    async def run() -> None:
        histories = {letter: f"{letter}: " + "0123456789" * 12 for letter in "wxyz"}
        for turn in range(3):
            letters = [*"wxyz"[turn:], *"wxyz"[:turn]]
            outputs = await asyncio.gather(*(last(llm.generate(histories[letter], GREEDY)) for letter in letters))
            assert all(output.num_cached_tokens >= turn * 48 for output in outputs), [output.num_cached_tokens for output in outputs]
            histories = {letter: text + f" turn {turn} " + "abcdefghij" * 6 for letter, text in histories.items()}

    asyncio.run(run())


def test_a_busy_replica_passes_requests_on(llm: AsyncLLM) -> None:
    """Requests with one beginning do not all wait for the replica that has it."""

    async def run() -> None:
        before = await counts(llm, "prompt_tokens")
        await asyncio.gather(*(last(llm.generate("m" * 200 + str(i), GREEDY)) for i in range(24)))
        assert all(new > old for old, new in zip(before, await counts(llm, "prompt_tokens"), strict=True))

    asyncio.run(run())


def test_outputs_of_another_replica_grow_and_deltas_are_whole(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_to(llm, monkeypatch, other(llm))

    async def run() -> None:
        outputs = [output async for output in llm.generate("hello", GREEDY, request_id="mine")]
        assert {output.request_id for output in outputs} == {"mine"} and [o.finished for o in outputs].count(True) == 1
        delta = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, output_kind="delta")
        tokens: list[int] = []
        async for output in llm.generate("hello", delta):
            tokens += output.outputs[0].token_ids
            await asyncio.sleep(0.02)  # slower than the engine: deltas are joined
        assert len(tokens) == 40 and tokens[:8] == outputs[-1].outputs[0].token_ids

    asyncio.run(run())


def test_errors_of_a_request_stay_its_own(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_to(llm, monkeypatch, other(llm))

    async def run() -> None:
        good, long, ids = await asyncio.gather(
            last(llm.generate("hello", GREEDY)),
            last(llm.generate("x" * 600, GREEDY, request_id="too-long")),
            last(llm.generate({"prompt_token_ids": [1 << 40]}, GREEDY)),
            return_exceptions=True,
        )
        assert isinstance(good, RequestOutput) and isinstance(long, RequestError) and isinstance(ids, RequestError)
        assert "request too-long:" in str(long) and "#" not in str(long)
        first = llm.generate("hello", LONG, request_id="twice")
        await anext(first)
        for replica in (other(llm), None):
            go_to(llm, monkeypatch, replica)
            with pytest.raises(ArgumentError, match="'twice' is in use"):
                await anext(llm.generate("hello", GREEDY, request_id="twice"))
        await first.aclose()

    asyncio.run(run())


def test_a_request_ends_by_its_id_and_when_its_caller_leaves(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = other(llm)
    go_to(llm, monkeypatch, replica)

    async def run() -> None:
        outputs = llm.generate("hello", LONG, request_id="long")
        await anext(outputs)
        assert replica.running == 1
        llm.abort("long")
        output = await last(outputs)
        assert output.finished and output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) < 450
        before = (await llm.all_metrics())[1].ended["abort"]
        async for _ in llm.generate("hello", LONG):
            break
        await until(lambda: replica.running == 0)
        for _ in range(1000):
            if (await llm.all_metrics())[1].ended["abort"] == before + 1:
                return
        raise AssertionError("it runs on")

    asyncio.run(run())


def test_functions_and_segments_stay_with_the_first_replica(llm: AsyncLLM) -> None:
    calls: list[int] = []

    def note(prompt: list[int], token_ids: list[int], logits: Any) -> Any:
        calls.append(len(token_ids))
        return logits

    async def run() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logits_processors=[note])
        await asyncio.gather(*(last(llm.generate(text, params)) for text in PROMPTS))
        assert len(calls) == 3 * len(PROMPTS)
        segment = await llm.segment("s" * 100)
        outputs = await asyncio.gather(*(last(llm.generate(segment + text, GREEDY)) for text in PROMPTS))
        assert all(output.num_cached_tokens >= 96 for output in outputs)
        segment.release()

    asyncio.run(run())


def test_adapters_are_loaded_by_the_replica_that_needs_them(
    llm: AsyncLLM, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "first", tiny_model, alpha=8.0, seed=1)
    write_adapter(tmp_path / "second", tiny_model, alpha=8.0, seed=2)
    folder = tmp_path / "first"

    async def run() -> list[list[int]]:
        found = []
        for replica in (None, other(llm)):
            go_to(llm, monkeypatch, replica)
            output = await last(llm.generate("hello", GREEDY, lora_request=LoRARequest("mine", lora_path=str(folder))))
            found.append(output.outputs[0].token_ids)
        await llm.unload_lora("mine")
        assert list(llm.adapters) == []
        os.rename(folder, tmp_path / "old")
        os.rename(tmp_path / "second", folder)
        await llm.load_lora("mine", str(folder))  # another one under the same name
        output = await last(llm.generate("hello", GREEDY, lora_request=LoRARequest("mine")))
        found.append(output.outputs[0].token_ids)
        await llm.unload_lora("mine")
        return found

    first, again, changed = asyncio.run(run())
    assert first == again != changed


def test_embeddings_are_divided(llm: AsyncLLM) -> None:
    prompts = [[65 + i, 66, 67] for i in range(5)]

    async def run() -> None:
        vectors = await llm.embed(prompts)
        assert vectors.shape[0] == 5 and vectors.dtype == np.float32
        one = await llm._embed(prompts, "mean", True)
        assert np.array_equal(vectors, one)
        assert len(await llm.embed(prompts[:1])) == 1

    asyncio.run(run())


def test_the_status_counts_all(llm: AsyncLLM) -> None:
    async def run() -> None:
        await until(lambda: len(llm.status()["replicas"]) == 2)
        status = llm.status()
        assert status["blocks"]["total"] == sum(one["blocks"]["total"] for one in status["replicas"]) == 2 * 96
        assert [one.engine for one in await llm.all_metrics()] == ["0", "1"]
        assert llm.predicted_wait() >= 0 and llm.config.all_seqs == 8

    asyncio.run(run())
    one = {"running": 1, "waiting": 2, "steps": 3, "tokens": 4, "blocks": {"used": 1}, "prefix": None, "segments": "s"}
    assert combined([one, one]) == {**one, "running": 2, "waiting": 4, "steps": 6, "tokens": 8, "blocks": {"used": 2}}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(signal.SIGKILL, r"replica 1 \(process \d+\) ended with code -9"), (signal.SIGSTOP, r"replica 1 \(process \d+\) hangs: no message")],
)
def test_a_replica_that_ends_or_hangs_ends_the_engine(
    sent: signal.Signals, reason: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests have the error, and those of the others and later ones, too; `watch` tells the server."""
    llm, told = AsyncLLM(tiny_model, data_parallel_size=2, **SMALL), []
    llm.watch(told.append)
    replica = other(llm)
    if sent == signal.SIGSTOP:
        monkeypatch.setattr(replica_module, "SILENT_SECONDS", 1.0)

    async def run() -> None:
        streams = []
        for place in (replica, None)[: 1 + (sent == signal.SIGKILL)]:  # the other one has ended when a silence is noticed
            go_to(llm, monkeypatch, place)
            streams.append(llm.generate("hello", LONG))
            await anext(streams[-1])
        call = asyncio.ensure_future(replica.call("embed", [[1, 2]] * 200, "mean", True))
        await asyncio.sleep(0)
        os.kill(replica.process.pid, sent)
        for stream in streams:
            with pytest.raises(RankError, match=reason):
                await last(stream)
        with pytest.raises(RankError, match=reason):
            await call
        with pytest.raises(Exception, match=reason):
            await last(llm.generate("hello", GREEDY))

    asyncio.run(run())
    assert not llm.alive and len(told) == 1 and isinstance(told[0], RankError)
    llm.close()
    assert not alive(replica.process.pid)


@pytest.mark.parametrize("to_the_replica", [True, False])
def test_a_message_that_cannot_be_read_ends_the_engine(to_the_replica: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either direction: a reader that had ended would leave requests waiting for ever."""
    llm = AsyncLLM(tiny_model, data_parallel_size=2, **SMALL)
    replica = other(llm)
    go_to(llm, monkeypatch, replica)

    async def run() -> None:
        stream = llm.generate("hello", LONG)
        await anext(stream)
        if to_the_replica:
            replica._link._connection.send_bytes(b"no pickle")
        else:
            monkeypatch.setattr(replica._link, "receive", lambda: 1 / 0)
        with pytest.raises(RankError, match="ended with code 1" if to_the_replica else "has sent what cannot be read: ZeroDivisionError"):
            await last(stream)

    asyncio.run(run())
    llm.close()
    assert not alive(replica.process.pid)


def test_closing_ends_the_processes(tiny_model: Path) -> None:
    llm = AsyncLLM(tiny_model, data_parallel_size=2, **SMALL)
    pid = other(llm).process.pid
    llm.close()
    assert not alive(pid)


def test_a_replica_that_cannot_start_says_why(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    config_of = replica_module._config_of

    def broken(config: Any, number: int, num_blocks: int) -> Any:
        made.append(number)
        return config_of(config, number, num_blocks if number == 1 else 1 << 40)

    monkeypatch.setattr(replica_module, "_config_of", broken)
    with pytest.raises(OutOfMemoryError, match="the KV cache needs"):
        AsyncLLM(tiny_model, data_parallel_size=3, **SMALL)
    assert made == [1, 2]


def test_what_has_one_engine_refuses_replicas(tiny_model: Path) -> None:
    for make in (LLM, lambda *given, **options: LLM(*given, plan=True, **options)):
        with pytest.raises(ArgumentError, match="data_parallel_size=2 is for AsyncLLM, serve and batch"):
            make(tiny_model, data_parallel_size=2, **SMALL)
    with pytest.raises(ArgumentError, match="data_parallel_size=2 is for AsyncLLM"):
        EngineTarget(Sweep(engine={"model": str(tiny_model), "data_parallel_size": 2}))


def test_a_replica_that_something_else_has_started_is_one_engine(tiny_model: Path) -> None:
    with LLM(tiny_model, data_parallel_size=2, data_parallel_rank=1, **SMALL) as llm:
        assert llm.engine.metrics.engine == "1" and llm.generate("hello", GREEDY)


def test_errors_survive_the_way_between_processes() -> None:
    import pickle

    for error in (BusyError("full", 2.5, "deadline"), ModelError("x" * 500), RequestError("no")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
    assert type(portable(ModelError("x"))) is ModelError
    held = RequestError("no")
    held.lock = threading.Lock()  # no pickle has it
    for error in (held, ZeroDivisionError("on purpose")):
        assert type(portable(error)) is InternalError and str(error) in str(portable(error))
