"""All of the scheduler's rules at once: random arrivals, ends and pressure, in a model of the cache that knows which token is where."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.scheduler.simulated_engine import Loan, SimulatedEngine
from tinyvllm.request import RequestOptions


def options_of(rng: random.Random) -> RequestOptions:
    return RequestOptions(
        priority=rng.choice((0, 0, 0, 1, -1)),
        deadline_ms=rng.choice((None, None, None, 40000.0)),
        ttft_deadline_ms=rng.choice((None, None, None, 9000.0)),
        key=rng.choice(("", "", "a", "b")),
        cache_salt=rng.choice((None, None, "salt")),
    )


@settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None)
class Machine(RuleBasedStateMachine):
    engine: SimulatedEngine | None = None

    @initialize(
        rows=st.integers(1, 6), budget=st.integers(1, 24), longest=st.integers(2, 40), blocks=st.integers(1, 12), size=st.integers(1, 5),
        hosted=st.sampled_from((0, 4, 30)), caching=st.booleans(), preemption=st.sampled_from((None, "swap", "recompute")),
        rounds=st.sampled_from((1, 3)), ahead=st.booleans(), drafts=st.sampled_from((0, 0, 7)), window=st.sampled_from((0, 0, 1, 4, 9)),
        groups=st.sampled_from(((0, 1), (0, 1), (1, 1), (1, 3), (2, 1))), seed=st.integers(0, 99),
    )  # fmt: skip
    def build(self, seed: int, blocks: int, window: int, groups: tuple[int, int], **options) -> None:
        groups = groups if window else (0, 1)
        self.engine = SimulatedEngine(**options, blocks=blocks * sum(groups), window=window, groups=groups, seed=seed)
        self.engine.scheduler.rates.observe_step(100, 1.0)
        self.random = random.Random(seed)

    @rule(tokens=st.integers(0, 30), wanted=st.integers(1, 40), width=st.integers(1, 4), beams=st.booleans(), plain=st.booleans())
    def add(self, tokens: int, wanted: int, width: int, beams: bool, plain: bool) -> None:
        self.engine.add(tokens, wanted, RequestOptions() if plain else options_of(self.random), width, beams)
        self.engine.check()

    @rule(times=st.integers(1, 8))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            self.engine.now += 0.1

    @rule(which=st.integers(0, 99))
    def step_with_an_abort_inside(self, which: int) -> None:
        self.engine.step(abort_inside=which)

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        self.engine.abort(which)
        self.engine.check()

    @rule(seconds=st.sampled_from((0.5, 10.0)))
    def time_passes(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(blocks=st.integers(1, 4), steps=st.integers(1, 5))
    def another_owner_borrows(self, blocks: int, steps: int) -> None:
        if self.engine.loan is None:
            self.engine.loan = Loan(min(blocks, self.engine.scheduler.pool.num_blocks), steps)

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.drain()


TestMachine = Machine.TestCase

KINDS = {
    "plain": {},
    "cached": dict(caching=True),
    "swap": dict(hosted=40, preemption="swap"),
    "swap, few host blocks, cached": dict(hosted=5, preemption="swap", caching=True),
    "auto, cached": dict(hosted=40, caching=True),
    "recompute, rounds, cached": dict(hosted=40, preemption="recompute", caching=True, rounds=4),
    "ahead, swap, cached": dict(hosted=40, preemption="swap", caching=True, ahead=True),
    "ahead, rounds": dict(ahead=True, rounds=3),
    "drafts, cached": dict(drafts=7, caching=True),
    "drafts, ahead": dict(drafts=2, ahead=True, hosted=40, caching=True),
    "window": dict(window=11),
    "window, cached": dict(window=6, caching=True),
    "window, swap, few host blocks, cached": dict(window=10, hosted=5, preemption="swap", caching=True),
    "window, swap, rounds": dict(window=7, hosted=40, preemption="swap", rounds=4),
    "window, ahead, drafts, cached": dict(window=9, ahead=True, drafts=7, caching=True),
    "groups, cached": dict(window=7, groups=(1, 1), caching=True),
    "groups, swap, few host blocks, cached": dict(window=10, groups=(1, 3), hosted=20, preemption="swap", caching=True),
    "groups, swap, rounds": dict(window=7, groups=(2, 1), hosted=120, preemption="swap", rounds=4),
    "groups, ahead, drafts, cached": dict(window=9, groups=(1, 2), ahead=True, drafts=7, caching=True),
}


SEEDS = [
    pytest.param(k, s, marks=[pytest.mark.long] * (k.startswith("groups") and (s, k) != (0, "groups, cached")))
    for s in range(3)
    for k in KINDS
]


@pytest.mark.parametrize("kind, seed", SEEDS)
def test_long_runs_under_pressure(kind: str, seed: int) -> None:
    """Long answers in few blocks, so that preemption is the rule; forks, beams, terms, loans, queue limits."""
    rng = random.Random(repr((seed, kind)))
    size, blocks = rng.randint(1, 6), rng.randint(8, 16)
    room = size * blocks
    total = blocks * sum(KINDS[kind].get("groups", (0, 1)))
    engine = SimulatedEngine(rng.randint(3, 8), rng.randint(2, 40), room * rng.randint(3, 5) // 4, total, size, seed=seed, **KINDS[kind])
    engine.scheduler.limits = replace(engine.scheduler.limits, max_queued_reqs=12, max_queued_tokens=room * 4)
    engine.scheduler.rates.observe_step(1, 0.02)
    crowd = 3 if "ahead" in kind else 20  # what runs ahead wants quiet
    for _ in range(1200):
        dice = rng.random()
        if dice < 0.3 and len(engine.living) < crowd:
            options = RequestOptions() if rng.random() < 0.5 else options_of(rng)
            tokens = rng.randint(0, room if dice < 0.02 else room // 4)
            engine.add(tokens, rng.randint(1, room), options, rng.choice((1, 1, 1, 2, 4)), rng.random() < 0.3)
        elif dice < 0.315:
            engine.abort(rng.randrange(99))
        elif dice < 0.34 and engine.loan is None:
            engine.loan = Loan(rng.randint(1, total // 2), rng.randint(1, 6))
        elif dice < 0.36:
            engine.now += rng.choice((0.1, 5.0))
        else:
            engine.step(abort_inside=rng.randrange(99) if dice > 0.99 else None)
            engine.now += 0.05
        engine.check()
    engine.drain()
    assert_seen(engine.seen, kind)


def test_a_prompt_gets_what_a_preemption_leaves() -> None:
    """Of the budget: in these runs a running prompt got nothing after a preemption, with tokens and slots to spare."""
    test_long_runs_under_pressure("cached", 11)
    test_long_runs_under_pressure("swap", 14)


def assert_seen(seen: Counter[str], kind: str) -> None:
    """What the run was meant to meet."""
    assert seen["preempted"] > 5 and seen["stop"] + seen["length"] > 20 and seen["abort"] > 5 and seen["lent"] > 0, seen
    if kind.startswith("drafts"):
        assert seen["drafts"] > 30 and seen["accepted"] > 20, seen
    if kind.startswith("swap"):
        assert seen["swapped"] > 10, seen
    if kind.startswith("ahead"):
        assert seen["ahead"] > 3, seen


def test_counts_hold_over_many_steps() -> None:
    """Nothing is compared on the way but whose tokens are read, by a model that is asked for everything at the end."""
    rng = random.Random(11)
    engine = SimulatedEngine(4, 24, 100, 20, 4, hosted=12, caching=True)
    for turn in range(15_000):
        while len(engine.living) < 6:
            engine.add(1 + int(rng.random() * 20), 1 + int(rng.random() * rng.random() * 90), width=rng.choice((1, 1, 2)))
        if turn % 50 == 0:
            engine.abort(turn)
        engine.step(checked=False)
        if turn % 1000 == 0:
            engine.check()
            engine.check_contents()
    engine.drain(checked=False)
    assert engine.seen["preempted"] > 500 and engine.seen["length"] > 10, engine.seen
