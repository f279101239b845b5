"""The cost of a step: rates by the token, receipts by the step."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import make, make_sequence, run
from tinyvllm import SamplingParams
from tinyvllm.engine import stats as module
from tinyvllm.engine.output import RequestState
from tinyvllm.engine.stats import Costs, EngineStats, memory_bandwidth
from tinyvllm.metrics import NoMetrics
from tinyvllm.request import RequestOptions
from tinyvllm.runner.memory import READ_BYTES
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


def step(stats: EngineStats, clock: Clock, schedule: Schedule, owners: list, rounds: int, seconds: float) -> None:
    stats.step_started()
    stats.step_launched(
        schedule, {entry.sequence.sequence_id: owner for entry, owner in zip(schedule.entries, owners, strict=True)}, rounds
    )
    clock.now += seconds
    stats.phase_ended("run")
    stats.step_finished()


def state(n: int) -> RequestState:
    params = SamplingParams(n=n, seed=1)
    return RequestState("r", None, [1, 2, 3], params, None, (), 64, 0.0, options=RequestOptions(receipt=True))


@pytest.mark.parametrize("room, expected", [(10**9, 4.0), (READ_BYTES // 4, 1.0), (0, 0.0)])
def test_a_roof_without_room_to_measure_it(monkeypatch: pytest.MonkeyPatch, room: int, expected: float) -> None:
    """A KV cache takes what a GPU has: a request with a receipt failed for want of a gigabyte, and so did a trace."""

    def read(device: str, nbytes: int) -> float:
        if nbytes > room:
            raise MemoryError("no room")
        return 4.0 * nbytes / READ_BYTES

    monkeypatch.setattr("tinyvllm.runner.roof.measured_bandwidth", read)
    assert memory_bandwidth.__wrapped__("CUDA:7") == expected


def test_a_receipt_without_a_roof(clock: Clock) -> None:
    stats, one = EngineStats(NoMetrics(), Costs(1000, 10, lambda: 0.0), make()), state(1)
    step(stats, clock, Schedule([Scheduled(one.sequences[0], 3, 1, 1)]), [one], 1, 0.4)
    one.finish(one.sequences[0], "abort")
    output = one.output()
    assert output is not None and output.receipt is not None
    stats.request_finished(one, output)
    assert output.receipt.roof is None and output.receipt.device_seconds == pytest.approx(0.4)


def test_each_round_counts_as_a_step(clock: Clock) -> None:
    """Otherwise the predicted time of an answer would be a multiple of the real one, and deadlines would be refused."""
    stats, one = EngineStats(NoMetrics(), Costs(1000, 10, lambda: 1.0), make()), state(1)
    schedule = Schedule([Scheduled(one.sequences[0], 3, 1, 1)])
    step(stats, clock, schedule, [one], 4, 0.4)
    assert stats.scheduler.rates.decode_step == pytest.approx(0.1)
    schedule.reused = True
    step(stats, clock, schedule, [one], 1, 0.1)
    assert stats.scheduler.rates.decode_step == pytest.approx(0.1) and one.receipt.steps == 5


def test_a_step_is_on_a_receipt_once(clock: Clock) -> None:
    """For any number of continuations in it."""
    stats, three = EngineStats(NoMetrics(), Costs(1200, 10, lambda: 1.0), make()), state(3)
    other = make_sequence(9, 3)
    schedule = Schedule([Scheduled(s, 3, 1, 1) for s in (*three.sequences, other)])
    plain = RequestState("plain", None, [1], SamplingParams(seed=1), None, (), 64, 0.0)
    step(stats, clock, schedule, [three] * 3 + [plain], 1, 0.2)
    assert three.receipt.steps == 1 and three.receipt.batch_sizes == {4: 1} and three.receipt.device_seconds == pytest.approx(0.2)
    assert three.receipt.bytes_moved == pytest.approx(3 * (1200 / 4 + 5 * 10))
    assert plain.receipt.steps == 0


def test_a_request_that_waits_for_the_prefix_of_another_counts_as_deferred(clock: Clock) -> None:
    scheduler = make(rows=3, budget=100, longest=512, blocks=300, caching=True)
    for n in range(2):
        scheduler.add(make_sequence(n, [*range(1000, 1400), n]))
    for _ in range(2):
        run(scheduler)
    stats = EngineStats(NoMetrics(), Costs(1000, 10, lambda: 1.0), scheduler)
    stats.step_started()
    stats.step_finished()
    assert (stats.step.running, stats.step.waiting, stats.step.deferred) == (1, 1, 1)
