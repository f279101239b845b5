"""AsyncLLM with the real engine in its thread: concurrent callers, cancelling, failures, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tinyvllm import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams, TinyvllmError
from tinyvllm.engine import fingerprint
from tinyvllm.engine.engine import Engine
from tinyvllm.storage import digests

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_model, num_blocks=64, max_num_seqs=4)
    yield llm
    llm.close()


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        newest = output
    return newest


def watch(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[RequestOutput]:
    """Every output of the engine from now on, for all requests."""
    seen: list[RequestOutput] = []
    publish = llm._own.publish

    def note(outputs: list[RequestOutput]) -> None:
        seen.extend(outputs)
        publish(outputs)

    monkeypatch.setattr(llm._own, "publish", note)
    return seen


async def end_of_request(seen: list[RequestOutput]) -> RequestOutput:
    for _ in range(3000):
        if seen and seen[-1].finished:
            return seen[-1]
        await asyncio.sleep(0.02)
    raise AssertionError("the request is still running")


def test_concurrent_callers_get_their_own(llm: AsyncLLM) -> None:
    async def run() -> None:
        prompts = ["hello", "b", "a longer prompt", "hello", "c", "d"]
        alone = [await last(llm.generate(p, GREEDY)) for p in prompts]
        together = await asyncio.gather(*(last(llm.generate(p, GREEDY)) for p in prompts))
        assert [o.prompt for o in together] == prompts and all(o.finished for o in together)
        assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
        chat = await last(llm.generate([{"role": "user", "content": "hi"}], GREEDY))
        assert chat.prompt == "<s><|user|>hi</s><|assistant|>"

    asyncio.run(run())


def test_outputs_grow(llm: AsyncLLM) -> None:
    async def run() -> list[RequestOutput]:
        return [output async for output in llm.generate("hello", GREEDY, request_id="mine")]

    outputs = asyncio.run(run())
    lengths = [len(o.outputs[0].token_ids) for o in outputs]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 8 and {o.request_id for o in outputs} == {"mine"}
    assert all(b.outputs[0].text.startswith(a.outputs[0].text) for a, b in zip(outputs, outputs[1:], strict=False))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_cancelled_caller_aborts_its_request(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(llm, monkeypatch)

    async def run() -> None:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.generate("hello", LONG):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        count = len(seen)
        assert (await end_of_request(seen)).outputs[0].finish_reason == "abort"
        assert len(seen) <= count + 2 and llm._own.mailboxes == {}  # the step that ran, and the one that tells of the end

    asyncio.run(run())


def test_leaving_the_iteration_aborts_the_request(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(llm, monkeypatch)

    async def run() -> None:
        async for _ in llm.generate("hello", LONG):
            break
        assert (await end_of_request(seen)).outputs[0].finish_reason == "abort"
        assert llm._own.mailboxes == {}

    asyncio.run(run())


def test_abort_by_id(llm: AsyncLLM) -> None:
    async def run() -> RequestOutput:
        outputs = llm.generate("hello", LONG, request_id="long")
        await anext(outputs)
        llm.abort("long")
        llm.abort("never heard of")
        return await last(outputs)

    output = asyncio.run(run())
    assert output.finished and output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) < 450


def test_a_refused_request_is_the_only_one_that_fails(llm: AsyncLLM) -> None:
    async def run() -> None:
        good, long, ids = await asyncio.gather(
            last(llm.generate("hello", GREEDY)),
            last(llm.generate("x" * 600, GREEDY)),
            last(llm.generate({"prompt_token_ids": [999]}, GREEDY)),
            return_exceptions=True,
        )
        assert isinstance(good, RequestOutput) and good.finished
        assert isinstance(long, RequestError) and isinstance(ids, RequestError)
        first = llm.generate("hello", LONG, request_id="twice")
        await anext(first)
        with pytest.raises(ValueError, match="'twice' is in use"):
            await anext(llm.generate("hello", GREEDY, request_id="twice"))
        await first.aclose()

    asyncio.run(run())


def test_a_name_is_free_as_soon_as_its_request_was_left(llm: AsyncLLM) -> None:
    async def run() -> None:
        alone = (await last(llm.generate("b", GREEDY))).outputs[0].token_ids
        for _ in range(5):
            left = llm.generate("hello", LONG, request_id="again")
            await anext(left)
            await left.aclose()
            outputs = [output async for output in llm.generate("b", GREEDY, request_id="again")]
            assert {(output.request_id, output.prompt) for output in outputs} == {("again", "b")}
            assert outputs[-1].outputs[0].token_ids == alone and outputs[-1].outputs[0].finish_reason == "length"
            task = asyncio.create_task(last(llm.generate("hello", LONG, request_id="again")))
            while not llm._own.mailboxes:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert llm._own.mailboxes == {}
        with pytest.raises(RequestError, match="request again: token id 999"):
            await anext(llm.generate({"prompt_token_ids": [999]}, GREEDY, request_id="again"))

    asyncio.run(run())


def test_an_output_of_the_old_request_does_not_reach_the_new_one(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread ends a step after the name has changed hands."""
    publish, held, go = llm._own.publish, threading.Event(), threading.Event()

    def late(outputs: list[RequestOutput]) -> None:
        if outputs[0].prompt == "hello" and len(outputs[0].outputs[0].token_ids) > 3:
            held.set()
            go.wait(60)
        publish(outputs)

    monkeypatch.setattr(llm._own, "publish", late)

    async def run() -> None:
        left = llm.generate("hello", LONG, request_id="again")
        await anext(left)
        assert await asyncio.to_thread(held.wait, 60)
        await left.aclose()
        new = asyncio.create_task(last(llm.generate("b", GREEDY, request_id="again")))
        while not (llm._own.mailboxes or new.done()):  # done: where the machine stood still for longer than the engine was held
            await asyncio.sleep(0.001)
        go.set()
        assert (await new).prompt == "b"
        seen = [output.prompt async for output in llm.generate("b", GREEDY, request_id="again")]
        assert set(seen) == {"b"}

    asyncio.run(run())


def test_callers_in_an_event_loop_that_is_gone(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.generate("hello", LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    assert len(asyncio.run(last(llm.generate("hello", GREEDY))).outputs[0].token_ids) == 8


def test_a_failure_of_the_engine_reaches_everyone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def fail(self: Engine) -> list[RequestOutput]:
        if len(self.requests) == 2:
            raise ZeroDivisionError("in the engine")
        return step(self)

    monkeypatch.setattr(Engine, "step", fail)
    llm = AsyncLLM(tiny_model, num_blocks=64)

    async def run() -> None:
        results = await asyncio.gather(*(last(llm.generate(p, LONG)) for p in "ab"), return_exceptions=True)
        assert [type(r) for r in results] == [ZeroDivisionError, ZeroDivisionError]
        with pytest.raises(TinyvllmError, match="ended.*in the engine"):
            await last(llm.generate("c", GREEDY))

    asyncio.run(run())
    llm.close()


def test_closing(tiny_model: Path) -> None:
    llm = AsyncLLM(tiny_model, num_blocks=64)

    async def run() -> None:
        running = asyncio.create_task(last(llm.generate("hello", LONG)))
        while not llm._own.mailboxes:  # until it is submitted
            await asyncio.sleep(0.001)
        await asyncio.to_thread(llm.close)
        with pytest.raises(TinyvllmError, match="closed while the request ran"):
            await running
        with pytest.raises(TinyvllmError, match="has ended"):
            await last(llm.generate("c", GREEDY))

    asyncio.run(run())
    llm.close()
    assert not llm._own.thread.is_alive()


def test_a_start_does_not_wait_for_the_digest_of_a_large_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, read = threading.Event(), digests.os.pread

    def slow(descriptor: int, size: int, at: int) -> bytes:
        assert threading.current_thread().name == "tinyvllm-fingerprint" and go_on.wait(60)
        return read(descriptor, size, at)

    monkeypatch.setattr(fingerprint, "SMALL_BYTES", 0)
    monkeypatch.setattr(digests, "_remembered", lambda place, state: None)
    monkeypatch.setattr(digests.os, "pread", slow)
    with closing(AsyncLLM(tiny_model, device="CPU", max_model_len=128, num_blocks=16)) as llm:
        assert llm.fingerprint is None and asyncio.run(last(llm.generate("hello", GREEDY))).finished
        go_on.set()
        llm._fingerprint._thread.join()
        assert llm.fingerprint is not None and llm.fingerprint.startswith("tinyvllm-")


def test_a_digest_in_the_background_ends_with_its_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closes, close = threading.Event(), fingerprint.Fingerprint.close

    def stop(self: fingerprint.Fingerprint) -> None:
        self._stop.set()
        closes.set()
        close(self)

    monkeypatch.setattr(fingerprint, "SMALL_BYTES", 0)
    monkeypatch.setattr(fingerprint.Fingerprint, "close", stop)
    monkeypatch.setattr(digests, "_remembered", lambda place, state: None)
    monkeypatch.setattr(digests, "PIECE_BYTES", 1000)
    monkeypatch.setattr(digests.os, "pread", lambda descriptor, size, at: closes.wait(60) and bytes(size))
    with closing(AsyncLLM(tiny_model, device="CPU", max_model_len=128, num_blocks=16)) as llm:
        pass
    assert llm.fingerprint is None and not llm._fingerprint._thread.is_alive()


def test_next_to_an_engine_of_another_thread(tiny_model: Path) -> None:
    """tinygrad's disk cache is one connection that belongs to the thread that opened it; their block sizes make both engines use it."""
    with LLM(tiny_model, num_blocks=16, block_size=32) as here:
        ids = here.generate("hello", GREEDY)[0].outputs[0].token_ids
    there = AsyncLLM(tiny_model, num_blocks=8, block_size=64)
    assert asyncio.run(last(there.generate("hello", GREEDY))).outputs[0].token_ids == ids
    there.close()


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(TinyvllmError):
        AsyncLLM(tmp_path)
