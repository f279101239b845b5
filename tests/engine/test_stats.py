"""What a step cost: rates by the token, receipts by the step."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import make, make_sequence, run
from tinyvllm import SamplingParams
from tinyvllm.engine import stats as module
from tinyvllm.engine.output import RequestState
from tinyvllm.engine.stats import Costs, EngineStats
from tinyvllm.metrics import NoMetrics
from tinyvllm.request import RequestOptions
from tinyvllm.scheduler import Schedule, Scheduled


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def step(accounts: EngineStats, clock: Clock, schedule: Schedule, owners: list, rounds: int, seconds: float) -> None:
    accounts.begin()
    accounts.launched(schedule, {entry.sequence.sequence_id: owner for entry, owner in zip(schedule.entries, owners, strict=True)}, rounds)
    clock.now += seconds
    accounts.spent("run")
    accounts.end()


def state(n: int) -> RequestState:
    params = SamplingParams(n=n, seed=1)
    return RequestState("r", None, [1, 2, 3], params, None, (), 64, 0.0, options=RequestOptions(receipt=True))


def test_rounds_are_so_many_steps(clock: Clock) -> None:
    """Or what is predicted for an answer would be as many times too long, and its deadline refused."""
    accounts, one = EngineStats(NoMetrics(), Costs(1000, 10, lambda: 1.0), make()), state(1)
    schedule = Schedule([Scheduled(one.sequences[0], 3, 1, 1)])
    step(accounts, clock, schedule, [one], 4, 0.4)
    assert accounts.scheduler.rates.decode_step == pytest.approx(0.1)
    schedule.reused = True
    step(accounts, clock, schedule, [one], 1, 0.1)
    assert accounts.scheduler.rates.decode_step == pytest.approx(0.1) and one.receipt.steps == 5


def test_a_step_is_on_a_receipt_once(clock: Clock) -> None:
    """However many continuations it had in it."""
    accounts, three = EngineStats(NoMetrics(), Costs(1200, 10, lambda: 1.0), make()), state(3)
    other = make_sequence(9, 3)
    schedule = Schedule([Scheduled(s, 3, 1, 1) for s in (*three.sequences, other)])
    plain = RequestState("plain", None, [1], SamplingParams(seed=1), None, (), 64, 0.0)
    step(accounts, clock, schedule, [three] * 3 + [plain], 1, 0.2)
    assert three.receipt.steps == 1 and three.receipt.batch_sizes == {4: 1} and three.receipt.device_seconds == pytest.approx(0.2)
    assert three.receipt.bytes_moved == pytest.approx(3 * (1200 / 4 + 5 * 10))
    assert plain.receipt.steps == 0


def test_who_waits_for_the_beginning_that_another_computes_is_told_apart(clock: Clock) -> None:
    scheduler = make(rows=3, budget=100, longest=512, blocks=300, caching=True)
    for n in range(2):
        scheduler.add(make_sequence(n, [*range(1000, 1400), n]))
    for _ in range(2):
        run(scheduler)
    accounts = EngineStats(NoMetrics(), Costs(1000, 10, lambda: 1.0), scheduler)
    accounts.begin()
    accounts.end()
    assert (accounts.stats.running, accounts.stats.waiting, accounts.stats.deferred) == (1, 1, 1)
