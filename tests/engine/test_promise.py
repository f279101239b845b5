"""The promise as a matrix: for any batch, cache, chunk size, preemption, rounds and overlap, the tokens of a request are the same.

One engine on the bundled model serves all of it; each cell gets its own scheduler, with its own pool and cache. Requests for
log-probabilities prevent rounds and overlap, so each cell runs twice: for the tokens, and with some requests for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from tinyvllm import LLM, RequestOutput, SamplingParams
from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.engine.loop import new_loop
from tinyvllm.request import RequestOptions
from tinyvllm.scheduler import Scheduler, SchedulerLimits

COUNT = 64
S = 16
SHARED = 2 * S  # tokens that prompts of one family begin with
FAMILIES = 4
LONG = 7  # tokens of an answer
ALONE = (0, 1, 6, 11)
SCORED = (0, 1, 2, 3, 12, 13, 34, 35)  # requests for log-probabilities, in the second run
WHOLE = 1024
CHUNKS = {"chunk 16": 16, "chunk 64": 64, "whole": WHOLE}
TOLERANCE = 1e-3

Results = dict[int, tuple[list[int], list[float]]]


def prompt(i: int) -> list[int]:
    family, own = np.random.default_rng(i % FAMILIES), np.random.default_rng(1000 + i)
    return [0, *family.integers(10, 3000, SHARED - 1).tolist(), *own.integers(10, 3000, 3 + i % 15).tolist()]


def params(i: int, scored: bool) -> SamplingParams:
    if i % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True, logprobs=0 if scored else None)
    filters: dict[str, Any] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02, "repetition_penalty": 1.2}][i // 2 % 4]
    return SamplingParams(temperature=0.8, seed=i, max_tokens=LONG, ignore_eos=True, logprobs=0 if scored else None, **filters)


class Promise:
    """An engine, and the result of each request when it runs alone."""

    def __init__(self) -> None:
        self.llm = LLM(
            device="CPU", max_model_len=128, max_num_seqs=COUNT, max_num_batched_tokens=WHOLE, num_blocks=400, swap_space="24MB",
            enable_prefix_caching=True,
        )  # fmt: skip
        self.engine = self.llm.engine
        self.rounds: set[int] = set()
        self.ahead = 0
        self.watch()
        self.furnish(COUNT, WHOLE, 400, None)
        self.expected = {i: self.serve([i], scored=True, cached=False)[i] for i in range(COUNT)}

    def watch(self) -> None:
        stats, stages = self.engine.stats, self.engine.stages
        step_launched, launch_whole = stats.step_launched, stages.launch_whole

        def count_rounds(schedule: Any, owners: Any, rounds: int) -> None:
            self.rounds.add(rounds)
            step_launched(schedule, owners, rounds)

        def count_ahead(step: Any) -> Any:
            self.ahead += 1
            return launch_whole(step)

        stats.step_launched = count_rounds  # type: ignore[method-assign]
        stages.launch_whole = count_ahead  # type: ignore[method-assign]

    def furnish(self, rows: int, budget: int, blocks: int, preemption: str | None, rounds: int = 1, overlap: bool = False) -> None:
        """A new scheduler for the next requests; its cache knows none of the blocks."""
        engine = self.engine
        assert not engine.has_work()
        pool = BlockPool(blocks, S)
        block_bytes = engine.runner.pool.block_bytes
        limits = SchedulerLimits(rows, budget, engine.runner.max_model_len, block_bytes=block_bytes, preemption=preemption)
        host = BlockPool(engine.runner.swap_blocks, S) if preemption == "swap" else None
        engine.requests.scheduler = engine.stats.scheduler = Scheduler(limits, pool, PrefixCache(pool, b"key"), host)
        engine.stats._prefix_counts, engine.stats._num_swaps = (0, 0, 0), 0
        engine.loop = new_loop(engine.stages, rounds, overlap)

    def serve(self, numbers: list[int], scored: bool, cached: bool) -> Results:
        """Requests together; each with its own salt unless the cache may hit."""
        for i in numbers:
            options = RequestOptions(cache_salt=None if cached else f"{i}, scored={scored}")
            self.engine.add(str(i), prompt(i), params(i, scored), options=options)
        outputs = self.finish()
        for i in numbers:
            found = outputs[str(i)].num_cached_tokens
            assert found >= SHARED if cached else found == 0
        self.preemptions = sum(output.metrics.preemptions for output in outputs.values())
        return {i: self.result(outputs[str(i)], scored) for i in numbers}

    def finish(self) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        while self.engine.has_work():
            outputs |= {output.request_id: output for output in self.engine.step()}
        scheduler = self.engine.scheduler
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert scheduler.host is None or scheduler.host.num_free == scheduler.host.num_blocks
        return outputs

    @staticmethod
    def result(output: RequestOutput, scored: bool) -> tuple[list[int], list[float]]:
        part = output.outputs[0]
        return part.token_ids, [p[t].logprob for t, p in zip(part.token_ids, part.logprobs, strict=True)] if scored else []

    def warm(self) -> None:
        """A request with the prefix of each family has run before."""
        for i in range(FAMILIES):
            self.engine.add(f"before {i}", [*prompt(i)[:SHARED], 5], SamplingParams(temperature=0.0, max_tokens=1))
        self.finish()

    def check(self, numbers: list[int], scored: bool, cached: bool) -> None:
        for i, (tokens, logprobs) in self.serve(numbers, scored, cached).items():
            assert tokens == self.expected[i][0], f"request {i}"
            if scored:
                np.testing.assert_allclose(logprobs, self.expected[i][1], rtol=0, atol=TOLERANCE, err_msg=f"request {i}")

    def interrupt(self, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        """If nothing would be preempted, the last in rank is, every few steps."""
        scheduler, turns = self.engine.scheduler, iter(range(10**9))
        follow = scheduler.follow

        def make_way(plan: Any) -> None:
            if next(turns) % every == every - 1 and scheduler.running:
                scheduler._preempt(scheduler.running[-1], plan)

        monkeypatch.setattr(scheduler, "_make_way", make_way)
        monkeypatch.setattr(scheduler, "follow", lambda schedule: follow(schedule) if next(turns) % every else None)


@pytest.fixture(scope="module")
def promise() -> Iterator[Promise]:
    promise = Promise()
    yield promise
    promise.llm.close()


@pytest.mark.parametrize("preemption", [None, "recompute", "swap"], ids=["no preemption", "recompute", "swap"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("rounds, overlap", list(product((1, 4), (False, True))), ids=["1", "1, overlap", "4", "4, overlap"])
@pytest.mark.parametrize("cached", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "64 together"])
def test_same_tokens(
    promise: Promise, monkeypatch: pytest.MonkeyPatch, chunk: str, preemption: str | None, rounds: int, overlap: bool, cached: bool,
    together: bool,
) -> None:  # fmt: skip
    budget = CHUNKS[chunk]
    scarce = together and preemption is not None and budget > 16  # chunks of 16 have so few run at a time that blocks never are
    promise.furnish(min(COUNT, budget), budget, (30 if budget < COUNT * 2 else 60) if scarce else 400, preemption, rounds, overlap)
    if cached:
        promise.warm()
    if preemption is not None and not scarce:
        promise.interrupt(monkeypatch, every=9 if together else 3)
    promise.rounds.clear()
    promise.ahead = preempted = 0
    for numbers in [list(range(COUNT))] if together else [[i] for i in ALONE]:
        promise.check(numbers, scored=False, cached=cached)
        preempted += promise.preemptions
    assert bool(preempted) == (preemption is not None), "the cell is not what it is meant to be"
    if preemption == "swap":
        assert promise.engine.scheduler.num_swaps > 0
    if preemption is None or together:
        assert (max(promise.rounds) > 1) == (rounds > 1) and (overlap and rounds == 1) <= (promise.ahead > 0)
    for numbers in [list(SCORED)] if together else [[i] for i in ALONE[:2]]:
        promise.check(numbers, scored=True, cached=cached)
