"""The energy of steps, split over requests by their rows; from the engine to the usage, the metrics and the closing line."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.energy.test_meter import Machine, meter_of
from tinyvllm import LLM, SamplingParams
from tinyvllm.cli import main
from tinyvllm.cli.progress import Tally, closing_line
from tinyvllm.energy import meter as meters
from tinyvllm.energy.counters import Counters
from tinyvllm.engine.energy import MAX_SPANS, OFF, EngineEnergy
from tinyvllm.engine.output import RequestState
from tinyvllm.request import Energy, RequestOptions
from tinyvllm.scheduler import Schedule, Scheduled

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def state(number: int, energy: bool = True) -> RequestState:
    options = RequestOptions(energy=energy)
    return RequestState(str(number), None, [1, 2, 3], SamplingParams(), None, (), 64, 0.0, number, options)


class Steps:
    """Steps of an engine at 60 W on a machine that draws 10 W."""

    def __init__(self) -> None:
        self.machine = Machine(10.0)
        self.meter = meter_of(self.machine)
        self.energy = EngineEnergy(self.meter.account())

    def run(self, requests: dict[RequestState, int], seconds: float, reused: bool = False) -> None:
        entries = [Scheduled(request.sequences[0], 0, rows, 1) for request, rows in requests.items()]
        schedule = Schedule(entries)
        schedule.reused = reused
        self.energy.step_started()
        self.energy.step_launched(schedule, {request.sequences[0].sequence_id: request for request in requests}, 1)
        self.machine.watts = 60.0
        self.machine.run(seconds)
        self.machine.watts = 10.0
        self.energy.step_finished()


def test_a_step_is_shared_by_rows() -> None:
    steps, first, second, third = Steps(), state(0), state(1), state(2, energy=False)
    steps.run({first: 6, second: 1, third: 1}, 0.04)
    steps.run({first: 1, second: 1}, 0.02)
    steps.run({first: 1, second: 1}, 0.02, reused=True)
    steps.meter.read()
    first.sequences[0].output_token_ids += [5, 6]
    energy = steps.energy.bill(first)
    assert energy.joules == pytest.approx(50 * (0.04 * 6 / 8 + 0.04 / 2)) and energy.idle_joules == pytest.approx(10 * (0.03 + 0.02))
    assert energy.joules_per_output_token == pytest.approx(energy.joules / 2) and energy.counters == ("cpu package-0",)
    assert steps.energy.bill(second).joules == pytest.approx(50 * (0.04 / 8 + 0.04 / 2))
    totals = steps.energy.totals
    assert (totals.active, totals.idle, totals.idle_watts) == pytest.approx((50 * 0.08, 10 * 0.08, 10.0))
    steps.run({third: 1}, 0.02)
    assert not steps.energy._uses


def test_what_no_reading_covers_has_the_power_of_the_last_one() -> None:
    steps, request = Steps(), state(0)
    steps.run({request: 1}, 0.04)
    steps.meter.read()
    steps.run({request: 1}, 0.02)
    assert steps.energy.bill(request).joules == pytest.approx(50 * 0.06)


def test_a_request_within_the_first_period_is_read_for_once() -> None:
    steps, request = Steps(), state(0)
    steps.run({request: 1}, 0.02)
    reads = steps.machine.reads
    assert steps.energy.bill(request).joules == pytest.approx(50 * 0.02) and steps.machine.reads == reads + 1


def test_a_reading_within_a_step_divides_it() -> None:
    steps, request = Steps(), state(0)
    steps.energy.step_started()
    entry = Scheduled(request.sequences[0], 0, 1, 1)
    steps.energy.step_launched(Schedule([entry]), {request.sequences[0].sequence_id: request}, 1)
    for watts in (60.0, 110.0):
        steps.machine.watts = watts
        steps.machine.run(0.05)
        steps.meter.read()
    steps.energy.step_finished()
    assert steps.energy.bill(request).joules == pytest.approx(0.05 * (50 + 100))


def test_steps_without_a_reading_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyvllm.engine.energy.MAX_SPANS", 8)
    steps, request = Steps(), state(0)
    for _ in range(50):
        steps.run({request: 1}, 0.001)
        assert len(steps.energy._spans) <= 8
    assert steps.energy.bill(request).joules == pytest.approx(50 * 0.05) and MAX_SPANS > 8


def test_energies_of_one_call_add() -> None:
    one = Energy.of(2.0, 1.0, 4, ("cpu package-0",), {})
    assert one + one == Energy.of(4.0, 2.0, 8, ("cpu package-0",), {}) and (one + OFF).joules is None


# ---- a whole engine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine whose counter has one joule more at each reading, and none while nothing has run yet."""

    class Counting(Machine):
        def joules(self) -> float:
            self.reads += 1
            return 0.0 if self.reads <= 2 else 1.0

    machine = Counting()
    monkeypatch.setattr(meters, "open_counters", lambda device, gpus: Counters([machine], {"gpu": "there is none"}))
    yield machine
    assert not meters._open and not [thread for thread in threading.enumerate() if thread.name == "tinyvllm-energy"]


def test_an_engine_from_outputs_to_metrics(tiny_model: Path, machine: Machine) -> None:
    with LLM(tiny_model, num_blocks=32, energy=True) as llm:
        (plain,) = llm.generate("hello", PARAMS)
        outputs = llm.generate(["hello", "what else"], PARAMS, options=RequestOptions(energy=True))
        (receipt,) = llm.generate("hello", PARAMS, options=RequestOptions(receipt=True))
        assert plain.energy is None and receipt.energy is None and receipt.receipt is not None
        for energy in (*(output.energy for output in outputs), receipt.receipt.energy):
            assert energy is not None and energy.joules is not None and energy.joules > 0 and energy.output_tokens == 6
            assert energy.counters == ("cpu package-0",) and energy.not_measured == {"gpu": "there is none"}
        assert outputs[0].outputs[0].token_ids == plain.outputs[0].token_ids
        assert llm.engine.energy is not None
        line = closing_line(llm, Tally.of(outputs))
        totals = llm.engine.energy.totals
        assert (
            f"; {totals.active:.1f} J above idle ({totals.active / 24:.3g} J a token), 0.0 J idle; gpu not measured: there is none" in line
        )
        from prometheus_client import generate_latest

        before = machine.reads
        text = generate_latest(llm.engine.metrics.registry).decode()
        labels = f'engine="0",model_name="{llm.engine.metrics.model_name}"'
        assert f'tinyvllm:energy_joules_total{{{labels},part="active"}} {totals.active}' in text
        (counted,) = re.findall(r'tinyvllm:energy_counter_joules_total{counter="cpu package-0",[^}]*} ([0-9.]+)', text)
        assert before - 2 <= float(counted) <= machine.reads - 2  # the meter's thread may have read meanwhile
        assert 'part="gpu",reason="there is none"} 1.0' in text
        json.dumps([asdict(output.energy) for output in outputs if output.energy])
    assert machine.closed


def test_a_start_that_fails_closes_the_meter(tiny_model: Path, machine: Machine) -> None:
    from tinyvllm import TinyvllmError

    with pytest.raises(TinyvllmError):
        LLM(tiny_model, num_blocks=32, energy=True, kv_cache_dtype="int8", max_model_len=10**9)
    assert machine.closed


def test_the_command_line_says_why_nothing_is_measured(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "open_counters", lambda device, gpus: Counters([], {"cpu": "reading it is not permitted"}))
    arguments = ["--model", str(tiny_model), "--prompt", "hello", "--max-tokens", "3", "--num-blocks", "32", "--energy"]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(arguments) == 0
    assert "; energy: cpu not measured: reading it is not permitted" in err.getvalue()


def test_unasked_for_it_is_not_there_and_asked_for_it_says_how(tiny_model: Path) -> None:
    with LLM(tiny_model, num_blocks=32) as llm:
        (output,) = llm.generate("hello", PARAMS, options=RequestOptions(energy=True))
        assert output.energy == OFF and "--energy" in OFF.not_measured["all"] and llm.engine.energy is None
        assert "J above" not in closing_line(llm, Tally.of([output]))
