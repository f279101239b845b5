"""The usual steps are captured before anybody asks: whoever comes then waits for no capture, and gets what he gets without."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.engine.test_rounds import prompt, told
from tinyvllm import LLM, AsyncLLM, SamplingParams

OPTIONS: dict[str, Any] = dict(device="CPU", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
PARAMS = [SamplingParams(temperature=t, seed=4, max_tokens=20, ignore_eos=True) for t in (0.0, 0.8)]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is captured from now on."""
    from tinyvllm.bridge.capture import Captured

    seen, first = [], Captured._first

    def spy(self: Any, *tensors: Any, **values: int) -> Any:
        seen.append(self)
        return first(self, *tensors, **values)

    monkeypatch.setattr(Captured, "_first", spy)
    return seen


@pytest.mark.parametrize("ahead", [False, True])
def test_whoever_comes_waits_for_no_capture(tiny_model, captures, ahead):
    with LLM(tiny_model, **OPTIONS, async_scheduling=ahead) as llm:
        expected = [told(llm.generate([prompt(1)], [params])) for params in PARAMS]
    with LLM(tiny_model, **OPTIONS, async_scheduling=ahead, warm_up=True) as llm:
        assert not llm.engine.warm() and llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks
        captures.clear()
        assert [told(llm.generate([prompt(1)], [params])) for params in PARAMS] == expected and not captures
        engine = llm.engine
        for i in (0, 3):  # one decodes while the other's prompt comes
            engine.add(str(i), prompt(i)["prompt_token_ids"], PARAMS[0])
            engine.step()
            engine.step()
        while engine.has_work():
            engine.step()
        assert not captures


def test_steps_that_have_run_are_not_captured_once_more(tiny_model, captures):
    with LLM(tiny_model, **OPTIONS, warm_up=True) as llm:
        assert len({id(captured) for captured in captures}) == len(captures)
        count = len(llm.engine.runner._steps)
    with LLM(tiny_model, **OPTIONS) as llm:
        llm.generate([prompt(1)], [PARAMS[0]])
        from tinyvllm.runner.prepare import usual_shapes

        known = [llm.engine.runner.padded(shape) for shape in usual_shapes(4, 64)]
        assert len(known) == count and sum(step is None for step in known) == 2, "its prompt and its decodes"


def test_a_step_that_cannot_be_captured_is_said_and_ends_nothing(tiny_model, monkeypatch, caplog):
    from tinyvllm.runner.runner import Runner

    padded, count = Runner.padded, []

    def short_of_memory(self: Any, shape: Any) -> Any:
        count.append(shape)
        if len(count) > 2:
            raise MemoryError("no room for 64 rows")
        return padded(self, shape)

    monkeypatch.setattr(Runner, "padded", short_of_memory)
    with LLM(tiny_model, **OPTIONS, warm_up=True) as llm:
        assert len(count) == 3 and "no room for 64 rows" in caplog.text
        assert told(llm.generate([prompt(1)], [PARAMS[0]]))[0][2] == "length"


def test_a_server_captures_while_it_is_idle_and_at_once_serves_who_comes(tiny_model):
    async def talk() -> None:
        llm = AsyncLLM(tiny_model, **OPTIONS, warm_up=True)
        try:
            async for output in llm.generate(prompt(1), PARAMS[0]):
                last = output
            assert last.finished
            deadline = time.monotonic() + 60
            while await llm._ask(lambda engine: engine._warming is not None):
                assert time.monotonic() < deadline, "it never ends"
                await asyncio.sleep(0.05)
        finally:
            llm.close()

    asyncio.run(talk())
