"""The promise as a matrix: whatever the company, the cache, the chunks, preemption, rounds and overlap, a request's tokens are the same.

One engine on the bundled model serves all of it; each cell gets a scheduler of its own, with a pool and a cache of its own. Where tokens
are drawn in rounds or ahead nobody may ask for log-probabilities, so each cell runs twice: for the tokens, and with some that ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tinyvllm import LLM, RequestOutput, SamplingParams
from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.request import RequestOptions
from tinyvllm.scheduler import Scheduler, SchedulerLimits

COUNT = 64
S = 16
SHARED = 2 * S  # tokens that prompts of one family begin with
FAMILIES = 4
LONG = 7  # tokens of an answer
ALONE = (0, 1, 6, 11)
ASKING = (0, 1, 2, 3, 12, 13, 34, 35)  # who wants log-probabilities, in the second run
WHOLE = 1024
CHUNKS = {"chunk 16": 16, "chunk 64": 64, "whole": WHOLE}
TOLERANCE = 1e-3

Told = dict[int, tuple[list[int], list[float]]]


def prompt(i: int) -> list[int]:
    family, own = np.random.default_rng(i % FAMILIES), np.random.default_rng(1000 + i)
    return [0, *family.integers(10, 3000, SHARED - 1).tolist(), *own.integers(10, 3000, 3 + i % 15).tolist()]


def params(i: int, asks: bool) -> SamplingParams:
    if i % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True, logprobs=0 if asks else None)
    filters: dict[str, Any] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02, "repetition_penalty": 1.2}][i // 2 % 4]
    return SamplingParams(temperature=0.8, seed=i, max_tokens=LONG, ignore_eos=True, logprobs=0 if asks else None, **filters)


class Promise:
    """An engine and what each request gives when nothing disturbs it."""

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
        self.expected = {i: self.serve([i], asks=True, cached=False)[i] for i in range(COUNT)}

    def watch(self) -> None:
        launched, ahead = self.engine.accounts.launched, self.engine._launch_ahead

        def tell(schedule: Any, owners: Any, rounds: int) -> None:
            self.rounds.add(rounds)
            launched(schedule, owners, rounds)

        def tell_ahead(*given: Any) -> None:
            self.ahead += 1
            ahead(*given)

        self.engine.accounts.launched = tell  # type: ignore[method-assign]
        self.engine._launch_ahead = tell_ahead  # type: ignore[method-assign]

    def furnish(self, rows: int, budget: int, blocks: int, preemption: str | None, rounds: int = 1, overlap: bool = False) -> None:
        """A scheduler of its own for what comes; no block holds anything that it could know of."""
        engine = self.engine
        assert not engine.has_work()
        engine.config = replace(engine.config, num_scheduler_steps=rounds, async_scheduling=overlap)
        pool = BlockPool(blocks, S)
        block_bytes = engine.runner.pool.block_bytes
        limits = SchedulerLimits(rows, budget, engine.runner.max_model_len, block_bytes=block_bytes, preemption=preemption)
        host = BlockPool(engine.runner.swap_blocks, S) if preemption == "swap" else None
        engine.scheduler = engine.accounts.scheduler = Scheduler(limits, pool, PrefixCache(pool, b"key"), host)
        engine.accounts._seen, engine.accounts._swaps = (0, 0, 0), 0

    def serve(self, numbers: list[int], asks: bool, cached: bool) -> Told:
        """Requests together; with salts of their own where nothing may be found."""
        for i in numbers:
            options = RequestOptions(cache_salt=None if cached else f"{i}, asks={asks}")
            self.engine.add(str(i), prompt(i), params(i, asks), options=options)
        outputs = self.finish()
        for i in numbers:
            found = outputs[str(i)].num_cached_tokens
            assert found >= SHARED if cached else found == 0
        self.preemptions = sum(output.metrics.preemptions for output in outputs.values())
        return {i: self.told(outputs[str(i)], asks) for i in numbers}

    def finish(self) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        while self.engine.has_work():
            outputs |= {output.request_id: output for output in self.engine.step()}
        scheduler = self.engine.scheduler
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert scheduler.host is None or scheduler.host.num_free == scheduler.host.num_blocks
        return outputs

    @staticmethod
    def told(output: RequestOutput, asks: bool) -> tuple[list[int], list[float]]:
        part = output.outputs[0]
        return part.token_ids, [p[t].logprob for t, p in zip(part.token_ids, part.logprobs, strict=True)] if asks else []

    def warm(self) -> None:
        """Somebody with each family's beginning was here before."""
        for i in range(FAMILIES):
            self.engine.add(f"before {i}", [*prompt(i)[:SHARED], 5], SamplingParams(temperature=0.0, max_tokens=1))
        self.finish()

    def check(self, numbers: list[int], asks: bool, cached: bool) -> None:
        for i, (tokens, logprobs) in self.serve(numbers, asks, cached).items():
            assert tokens == self.expected[i][0], f"request {i}"
            if asks:
                np.testing.assert_allclose(logprobs, self.expected[i][1], rtol=0, atol=TOLERANCE, err_msg=f"request {i}")

    def interrupt(self, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        """Where nobody would be preempted, the last in rank is, each few steps."""
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
        promise.check(numbers, asks=False, cached=cached)
        preempted += promise.preemptions
    assert bool(preempted) == (preemption is not None), "the cell is not what it is meant to be"
    if preemption == "swap":
        assert promise.engine.scheduler.num_swaps > 0
    if preemption is None or together:
        assert (max(promise.rounds) > 1) == (rounds > 1) and (overlap and rounds == 1) <= (promise.ahead > 0)
    for numbers in [list(ASKING)] if together else [[i] for i in ALONE[:2]]:
        promise.check(numbers, asks=True, cached=cached)
