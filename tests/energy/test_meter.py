"""The meter, on a clock and counters that the test sets: what is idle, what steps are charged, and when the counters are read."""

from __future__ import annotations

import threading
import time

import pytest

from tinyvllm.energy import meter as module
from tinyvllm.energy.counters import CounterError, Counters
from tinyvllm.energy.meter import IDLE_SECONDS, MAX_WATTS, Account, Meter


class Machine:
    """A clock, and a counter that runs at `watts`."""

    name = "cpu package-0"

    def __init__(self, watts: float = 10.0) -> None:
        self.watts, self.now, self.counted, self.reads, self.closed = watts, 100.0, 0.0, 0, False

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.counted += self.watts * seconds

    def joules(self) -> float:
        self.reads += 1
        counted, self.counted = self.counted, 0.0
        return counted

    def close(self) -> None:
        self.closed = True

    def clock(self) -> float:
        return self.now


def meter_of(machine: Machine) -> Meter:
    return Meter(Counters([machine]), machine.clock, machine.run)


def step(machine: Machine, account: Account, seconds: float, watts: float) -> None:
    account.step_started(machine.now)
    before, machine.watts = machine.watts, watts
    machine.run(seconds)
    machine.watts = before
    account.step_finished(machine.now)


def test_steps_are_charged_what_is_above_the_idle_machine() -> None:
    machine = Machine(10.0)
    meter = meter_of(machine)
    account = meter.account()
    assert meter.idle_watts == pytest.approx(10.0)
    step(machine, account, 0.02, 60.0)
    machine.run(0.01)
    step(machine, account, 0.02, 60.0)
    meter.read()
    (interval,) = account.intervals
    assert interval.watts == pytest.approx(50.0) and interval.idle_watts == pytest.approx(10.0) and interval.end == machine.now
    assert meter.joules == {machine.name: pytest.approx(10 * (IDLE_SECONDS + 0.01) + 60 * 0.04)}


def test_a_long_step_is_not_idle_before_its_end() -> None:
    machine = Machine(10.0)
    meter = meter_of(machine)
    account = meter.account()
    account.step_started(machine.now)
    machine.watts = 60.0
    for _ in range(3):
        machine.run(1.0)
        meter.read()
    assert [interval.watts for interval in account.intervals] == pytest.approx([50.0] * 3) and meter.idle_watts == pytest.approx(10)


def test_idle_is_the_least_of_long_pauses() -> None:
    machine = Machine(30.0)
    meter = meter_of(machine)
    for watts, seconds, idle in ((20.0, IDLE_SECONDS, 20.0), (5.0, IDLE_SECONDS / 2, 20.0), (25.0, 10.0, 20.0)):
        machine.watts = watts
        machine.run(seconds)
        meter.read()
        assert meter.idle_watts == pytest.approx(idle)


def test_noise_below_idle_is_made_up_for() -> None:
    """Without that, the error of every short interval would add to what requests are charged, and never subtract."""
    machine, charged = Machine(10.0), 0.0
    meter = meter_of(machine)
    account = meter.account()
    for i in range(40):
        step(machine, account, 0.05, 30.0 if i % 2 else -5.0)  # the counter comes in lumps: 12.5 W in the mean
        meter.read()
        charged += account.intervals.popleft().watts * 0.05
    assert charged == pytest.approx(40 * 0.05 * 2.5, rel=0.3)


def test_engines_share_an_interval_by_their_seconds() -> None:
    machine = Machine(10.0)
    meter = meter_of(machine)
    first, second = meter.account(), meter.account()
    step(machine, first, 0.01, 60.0)
    step(machine, second, 0.03, 60.0)
    meter.read()
    charged = first.intervals[0].watts * 0.01 + second.intervals[0].watts * 0.03
    assert charged == pytest.approx(50 * 0.04)
    assert meter.remove(first) == 1 and meter.remove(second) == 0


def test_a_counter_that_was_reset_is_not_charged() -> None:
    machine = Machine(10.0)
    meter = meter_of(machine)
    account = meter.account()
    machine.counted = 2 * MAX_WATTS
    step(machine, account, 0.05, 60.0)
    meter.read()
    assert account.intervals[0].watts == 0 and not meter.measures and machine.closed
    assert "was reset" in meter.counters.not_measured[machine.name]


@pytest.mark.parametrize("reset", [True, False])
def test_a_counter_that_fails_takes_its_idle_power_away(reset: bool) -> None:
    """Or the other counters' joules would be compared with the idle power of all, and requests charged nothing."""
    cpu, gpu = Machine(10.0), Machine(40.0)
    gpu.name = "gpu 0"

    def run(seconds: float) -> None:
        cpu.run(seconds)
        gpu.run(seconds)

    meter = Meter(Counters([cpu, gpu]), cpu.clock, run)
    account = meter.account()
    assert meter.idle_watts == pytest.approx(50.0)
    gpu.counted = 2 * MAX_WATTS
    if not reset:
        gpu.joules = fail  # type: ignore[method-assign]
    for _ in range(2):
        step(cpu, account, 0.05, 60.0)
        meter.read()
    assert [interval.watts for interval in account.intervals] == pytest.approx([50.0] * 2)
    assert [interval.idle_watts for interval in account.intervals] == pytest.approx([10.0] * 2) and meter.idle_watts == pytest.approx(10.0)


def fail() -> float:
    raise CounterError("the driver is gone")


def test_without_counters_nothing_is_waited_for_and_no_thread_runs() -> None:
    machine = Machine()
    meter = Meter(Counters([], {"cpu": "no"}), machine.clock, machine.run)
    meter.start()
    assert machine.now == 100.0 and not meter.measures and not any(t.name == "tinyvllm-energy" for t in threading.enumerate())
    meter.close()


def test_the_thread_reads_while_steps_run_and_sleeps_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.001)
    machine = Machine()
    meter = Meter(Counters([machine]), time.perf_counter, lambda seconds: None)
    account = meter.account()
    meter.start()
    wait_until(lambda: meter.asleep)
    for _ in range(3):  # each step wakes it
        account.step_started(time.perf_counter())
        count = machine.reads
        wait_until(lambda count=count: machine.reads >= count + 3)
        account.step_finished(time.perf_counter())
        wait_until(lambda: meter.asleep)
    count = machine.reads
    assert meter.asleep and account.intervals
    meter.close()
    assert machine.reads == count and machine.closed and not any(t.name == "tinyvllm-energy" for t in threading.enumerate())


def wait_until(true: object) -> None:
    end = time.monotonic() + 60
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_closing_during_a_reading_does_not_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread clears the event that `close` has set, and must not wait for it then."""
    machine = Machine()
    meter = meter_of(machine)
    monkeypatch.setattr(module, "PERIOD", 0.0)
    monkeypatch.setattr(module, "IDLE_PERIOD", 0.0)
    waits: list[float] = []
    monkeypatch.setattr(meter._work, "wait", waits.append)

    def close_meanwhile() -> None:
        meter._closed.set()
        meter._work.set()

    monkeypatch.setattr(meter, "read", close_meanwhile)
    meter._run()
    assert not waits
