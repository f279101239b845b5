"""Common steps are captured before the first request: requests wait for no capture, and get the same tokens as without."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.engine.test_heads import config_of
from tests.engine.test_rounds import prompt, results
from tinyvllm import LLM, AsyncLLM, SamplingParams
from tinyvllm.speculative import HEADS

OPTIONS: dict[str, Any] = dict(device="CPU", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
PARAMS = [SamplingParams(temperature=t, seed=4, max_tokens=20, ignore_eos=True) for t in (0.0, 0.8)]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures from now on."""
    from tinyvllm.bridge.capture import Captured

    captures, first = [], Captured._first

    def spy(self: Any, *tensors: Any, **values: int) -> Any:
        captures.append(self)
        return first(self, *tensors, **values)

    monkeypatch.setattr(Captured, "_first", spy)
    return captures


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_waits_for_no_capture(tiny_model, captures, ahead):
    with LLM(tiny_model, **OPTIONS, async_scheduling=ahead) as llm:
        expected = [results(llm.generate([prompt(1)], [params])) for params in PARAMS]
    with LLM(tiny_model, **OPTIONS, async_scheduling=ahead, warm_up=True) as llm:
        assert not llm.engine.warmup() and llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks
        captures.clear()
        assert [results(llm.generate([prompt(1)], [params])) for params in PARAMS] == expected and not captures
        engine = llm.engine
        for i in (0, 3):  # one decodes while the prompt of the other is computed
            engine.add(str(i), prompt(i)["prompt_token_ids"], PARAMS[0])
            engine.step()
            engine.step()
        while engine.has_work():
            engine.step()
        assert not captures


ONE = OPTIONS | dict(max_num_seqs=1, max_num_batched_tokens=16)
TEXTS = [{"prompt_token_ids": [5, 9, 14, 9, 14, 9, 3]}, {"prompt_token_ids": [*range(10, 50)]}]


@pytest.fixture(scope="module")
def without_drafts(tiny_model):
    with LLM(tiny_model, **ONE, speculative_config="off") as llm:
        return [results(llm.generate([text], [params])) for text in TEXTS for params in PARAMS]


@pytest.mark.parametrize(
    "method", ["draft_model", *(pytest.param(m, marks=pytest.mark.long) for m in ("eagle3", "suffix", "medusa", "eagle_lite"))]
)
def test_no_request_waits_for_a_capture_of_its_drafts(tiny_model, tmp_path, captures, without_drafts, method):
    """Nor for that of a step that checks drafts, with fewer drafts at the end, too; the tokens are those without drafts."""
    config = {"method": method, "model": str(tiny_model)} if method == "draft_model" else {"method": method}
    config |= config_of(method, tmp_path) if method in HEADS else {"num_speculative_tokens": 3}
    with LLM(tiny_model, **ONE, speculative_config=config, async_scheduling=method == "suffix", warm_up=True) as llm:
        captures.clear()
        assert [results(llm.generate([text], [params])) for text in TEXTS for params in PARAMS] == without_drafts
        assert not captures and llm.engine.speculation.on
        assert llm.engine.metrics.draft_tokens > 0


def test_steps_that_have_run_are_not_captured_again(tiny_model, captures):
    with LLM(tiny_model, **OPTIONS, warm_up=True) as llm:
        assert len({id(captured) for captured in captures}) == len(captures)
        count = len(llm.engine.runner._steps)
    with LLM(tiny_model, **OPTIONS) as llm:
        llm.generate([prompt(1)], [PARAMS[0]])
        from tinyvllm.runner.prepare import common_shapes

        steps = [llm.engine.runner.padded(shape) for shape in common_shapes(llm.config)]
        assert len(steps) == count and sum(step is None for step in steps) == 2, "its prompt and its decodes"


def test_a_failed_capture_is_logged_and_ends_the_warm_up_only(tiny_model, monkeypatch, caplog):
    from tinyvllm.runner.runner import Runner

    padded, forget, count, forgotten = Runner.padded, Runner.forget_device_state, [], []

    def short_of_memory(self: Any, shape: Any) -> Any:
        count.append(shape)
        if len(count) > 2:
            raise MemoryError("no room for 64 rows")
        return padded(self, shape)

    monkeypatch.setattr(Runner, "padded", short_of_memory)
    monkeypatch.setattr(Runner, "forget_device_state", lambda self: (forgotten.append(self), forget(self)))
    with LLM(tiny_model, **OPTIONS, warm_up=True) as llm:
        assert len(count) == 3 and "no room for 64 rows" in caplog.text
        assert forgotten == [llm.engine.runner], "the kernels' counters may be anything"
        assert results(llm.generate([prompt(1)], [PARAMS[0]]))[0][2] == "length"


def test_a_server_captures_while_it_is_idle_and_still_serves_at_once(tiny_model):
    async def talk() -> None:
        llm = AsyncLLM(tiny_model, **OPTIONS, warm_up=True)
        try:
            async for output in llm.generate(prompt(1), PARAMS[0]):
                last = output
            assert last.finished
            deadline = time.monotonic() + 300
            while await llm.between_steps(lambda engine: engine._warmup is not None):
                assert time.monotonic() < deadline, "the warm-up never ends"
                await asyncio.sleep(0.05)
        finally:
            llm.close()

    asyncio.run(talk())


@pytest.mark.parametrize("warm_up", [False, True])
def test_captures_with_a_slower_kernel_are_made_again(tiny_model, monkeypatch, captures, warm_up):
    """While nothing runs kernels are timed; if that changes a choice, what was captured before it is dropped, and no token changes."""
    from tinyvllm.backends import autotune

    timed, changes = [3, 0], [autotune.changes()]  # earlier tests of the process may have changed some

    def time_next() -> bool:
        timed[0], timed[1] = timed[0] - 1, timed[1] + 1
        return timed[0] >= 0

    with LLM(tiny_model, **OPTIONS, warm_up=warm_up) as llm:
        expected = results(llm.generate([prompt(1)], [PARAMS[0]]))
        steps = dict(llm.engine.runner._steps)
        monkeypatch.setattr(autotune, "time_next", time_next)
        monkeypatch.setattr(autotune, "changes", lambda: changes[0])
        llm.settle()
        assert timed[1] == 4 and dict(llm.engine.runner._steps) == steps, "no choice has changed"
        changes[0] += 2
        captures.clear()
        llm.settle()
        again = llm.engine.runner._steps
        assert set(again) == (set(steps) if warm_up else set()) and bool(captures) == warm_up
        assert not any(again[shape] is plan for shape, plan in steps.items() if shape in again)
        assert results(llm.generate([prompt(1)], [PARAMS[0]])) == expected


def test_a_kernel_that_cannot_be_timed_keeps_its_default(tiny_model, monkeypatch, caplog):
    from tinyvllm.backends import autotune

    turns = iter([RuntimeError("the GPU hangs"), True, False])

    def time_next() -> bool:
        if isinstance(turn := next(turns), Exception):
            raise turn
        return turn

    with LLM(tiny_model, **OPTIONS) as llm:
        expected = results(llm.generate([prompt(1)], [PARAMS[0]]))
        monkeypatch.setattr(autotune, "time_next", time_next)
        llm.settle()
        assert "a kernel keeps its default: RuntimeError: the GPU hangs" in caplog.text and not [*turns]
        assert results(llm.generate([prompt(1)], [PARAMS[0]])) == expected
