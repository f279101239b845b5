"""Begins and ends a trace of a running engine, between two of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tinyvllm.engine.stats import memory_bandwidth, multiply_rate
from tinyvllm.engine.tools.kernel_table import KernelRoof
from tinyvllm.engine.tools.trace import StepTrace
from tinyvllm.engine.tools.trace_output import TraceOutput
from tinyvllm.errors import BusyError

if TYPE_CHECKING:
    from tinyvllm.engine.engine import Engine


def start_trace(
    engine: Engine,
    output: TraceOutput,
    max_steps: int | None = None,
    on_end: Callable[[], None] = lambda: None,
    measure: bool = False,
) -> StepTrace:
    """Write the events of the next steps to `output`; BusyError while another trace runs.

    The first call of a process measures the memory's bandwidth, for 0.15 s, and with `measure` the rate of products if none is kept.
    """
    engine.check_open()
    if engine.trace is not None:
        raise BusyError("trace: another trace of this engine runs; try again when it has ended", 5.0, "trace")
    trace = StepTrace(output, engine.runner, engine.scheduler, _roof(engine, measure), max_steps, on_end)
    engine.observer.add(trace)
    engine.trace = trace
    if engine.stages.scheduled is not None:  # it may be reused
        trace.batch_changed(engine.stages.scheduled, engine.requests.owners)
    engine.observer.marks = engine.stages.marks = trace.marks
    return trace


def _roof(engine: Engine, measure: bool) -> KernelRoof:
    """What the engine's device does at most. Ranks share a machine: its rate of products is none of them's."""
    device, alone = engine.config.device, engine.config.num_ranks == 1
    return KernelRoof(memory_bandwidth(device), multiply_rate(device, engine.runner.weight_formats, measure) if alone else 0.0)


def stop_trace(engine: Engine, trace: StepTrace) -> None:
    """End a trace, and write what it has left. Nothing, if it has ended."""
    if engine.trace is trace:
        engine.observer.remove(trace)
        engine.trace = engine.observer.marks = engine.stages.marks = None
        trace.close()
