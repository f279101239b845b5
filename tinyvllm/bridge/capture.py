"""Steps that are captured once and then replayed: one call at a time, or repeatedly in the background."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tinygrad import Device, Tensor, UOp
from tinygrad.engine.realize import graph_cache, run_linear
from tinygrad.helpers import JIT, disable_gc
from tinygrad.nn.state import get_parameters
from tinygrad.uop.ops import Ops

from tinyvllm.bridge.graph import JobGraph, StepGraph
from tinyvllm.bridge.hooks import QueueEvent, hooks_of
from tinyvllm.bridge.kept import KeptStep
from tinyvllm.bridge.lowering import lowered
from tinyvllm.bridge.recording import computed, forget_recorded, recording
from tinyvllm.bridge.tensors import undoing_assignments
from tinyvllm.bridge.waiting import synchronize
from tinyvllm.errors import ReplacedKernelError
from tinyvllm.host_memory import require
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import Placement


class Captured:
    """A function of tensors that is captured at its first call and that later calls replay as one graph.

    tinygrad's TinyJit runs a function once without capturing it, schedules all of it at once, and checks the arguments of each replay for
    longer than the launch takes. Here the first call records (recording.py), and a replay calls the captured graph directly. So the
    arguments must be realized tensors of the first call's shapes, and everything else that the function reads must be in persistent
    buffers. `variables` are the function's integer arguments, by name, with their bounds. A first call that raises leaves no capture
    and no assignment: the next one captures again. With `kept`, a first call replays what an earlier process has captured, and the
    function is not called.
    """

    def __init__(self, function: Callable[..., Any], variables: Mapping[str, tuple[int, int]] | None = None, kept: KeptStep | None = None):
        self._function, self._variables, self._kept = function, dict(variables or {}), kept
        self._calls: UOp | None = None  # the captured calls, graphs among them
        self._graph: Callable[[tuple[UOp, ...], dict[str, int]], Any] | None = None
        self._result: Any
        self._shared: list[Tensor] = []  # results of functions that other captures contain, too

    def __call__(self, *tensors: Tensor, **values: int) -> Any:
        """The function's result, a tensor or several, in buffers that the next call overwrites. On the CPU it has run on return."""
        if self._graph is None and self._calls is None and self._kept is not None and JIT == 1:
            self._load(tensors)
        if self._graph is not None:
            self._graph(tuple(tensor.uop.base for tensor in tensors), values)
            return self._result
        if self._calls is None:
            self._first(*tensors, **values)
        else:
            self._replay(tensors, values)
        if any(Placement(device).is_cpu for device in Device._opened_devices):  # not a JobGraph: tinygrad's worker thread may still run it
            synchronize("CPU")
        return self._result

    @property
    def captured(self) -> bool:
        """Whether a first call has succeeded."""
        return self._calls is not None or self._graph is not None

    def _load(self, tensors: tuple[Tensor, ...]) -> None:
        """Take what an earlier process has captured, if that was kept."""
        assert self._kept is not None
        start = time.perf_counter()
        loaded = self._kept.load(tensors, self._variables)
        if loaded is not None:
            try:
                _before_first_run()
            except ReplacedKernelError:  # the step has a kernel that is not chosen any more
                return
            self._graph, self._result = loaded
            _work.loaded, _work.seconds = _work.loaded + 1, _work.seconds + time.perf_counter() - start

    def _replay(self, tensors: tuple[Tensor, ...], values: dict[str, int]) -> None:
        assert self._calls is not None
        run_linear(self._calls, values, input_uops=tuple(tensor.uop.base for tensor in tensors), jit=True)

    def _first(self, *tensors: Tensor, **values: int) -> None:
        require(0, "a step of a new shape")
        _work.count, start = _work.count + 1, time.perf_counter()
        bound = {name: UOp.variable(name, *self._variables[name]).bind(value) for name, value in values.items()}
        try:
            while not self._capture(tensors, bound, values):  # each time, a kernel is chosen no more: there is an end
                pass
        finally:
            _work.seconds += time.perf_counter() - start
        if self._calls is not None:  # JIT=0 in the environment captures nothing
            self._graph = self._only_graph(len(tensors))
            if self._kept is not None and isinstance(self._graph, StepGraph):
                self._kept.keep(self._graph, tensors, self._variables, self._result, self._shared)
                self._shared = []

    def _capture(self, tensors: tuple[Tensor, ...], bound: dict[str, UOp], values: dict[str, int]) -> bool:
        """Call the function and capture it; False if one of its kernels was replaced by another, which the next call chooses."""
        try:
            with undoing_assignments(), disable_gc():  # which would look through all nodes of the process, a fifth of the time
                if not JIT:
                    self._result = computed(self._function(*tensors, **bound))
                    return True
                with recording() as recorded:
                    self._result = computed(self._function(*tensors, **bound))
                    self._shared = recorded.results
                    self._calls = lowered(recorded.calls, [tensor.uop.base for tensor in tensors], get_parameters(self._result))
                _before_first_run()
                self._replay(tensors, values)
        except BaseException as error:
            self._calls = None  # they may exist with half of their buffers
            forget_recorded()
            if isinstance(error, ReplacedKernelError):
                return False
            raise
        return True

    def _only_graph(self, inputs: int) -> Callable[[tuple[UOp, ...], dict[str, int]], Any] | None:
        """The device graph, if the whole capture is one graph that takes the arguments in order: a replay then is a call of it."""
        assert self._calls is not None
        calls = self._calls.src
        if len(calls) != 1 or calls[0].src[0].op is not Ops.CUSTOM_FUNCTION:
            return None
        arguments = [u.arg for u in calls[0].src[1:] if u.op is Ops.PARAM]
        return graph_cache.get(calls[0].src[0]) if arguments == list(range(inputs)) else None


def captures_steps() -> bool:
    """Whether a `Captured` captures: not with JIT=0 in the environment, a setting of tinygrad's."""
    return bool(JIT)


_checks: list[Callable[[], None]] = []


def check_before_first_run(check: Callable[[], None]) -> None:
    """From now on call this whenever a step has been captured or loaded, before it runs for the first time.

    It may compute and launch. ReplacedKernelError if a kernel of the step is not chosen any more: the step is captured again.
    """
    _checks.append(check)


def _before_first_run() -> None:
    for check in _checks:
        check()


@dataclass
class CaptureWork:
    """What first calls have cost this process: captures and captures of earlier processes that were loaded instead, and the seconds that
    both took, with all compiling for them."""

    count: int = 0
    seconds: float = 0.0
    loaded: int = 0


_work = CaptureWork()


def capture_work() -> CaptureWork:
    """The captures of this process so far."""
    return CaptureWork(_work.count, _work.seconds, _work.loaded)  # `replace` takes 3 us, 40 between two steps of a model


CapturedCall = tuple[Captured, tuple[Tensor, ...], dict[str, int]]  # a captured step, its tensors and its variables' values


class PendingWork:
    """Work that runs in the background, if there is any."""

    POLL_SECONDS = 0.002  # polling more often costs the computing threads more than it gains

    def __init__(self, work: Future[None] | QueueEvent | None = None):
        self._work = work

    def wait(self) -> bool:
        """Wait for POLL_SECONDS at most; whether all is done. Raises what the work has raised."""
        if self._work is None:
            return True
        try:
            self._work.result(self.POLL_SECONDS)
        except TimeoutError:
            return False
        return True


def repeat(calls: list[CapturedCall], times: int, background: bool = True) -> PendingWork:
    """Start these calls one after the other, and repeat the sequence `times` times. Each must have been called before.

    On the CPU this is one job for the thread pool, in the background run from a thread of its own: the caller continues meanwhile, may
    `peek` at buffers, and must wait for the end before it launches or uploads anything. A caller with nothing else to do saves the change
    of threads. A CUDA or Metal device has all launches in its queue on return.
    """
    graphs = [captured._graph for captured, _, _ in calls]
    jobs = [graph for graph in graphs if isinstance(graph, JobGraph)]
    if times > 0 and jobs and len(jobs) == len(graphs):
        for graph, (_, tensors, values) in zip(jobs, calls, strict=True):
            graph.bind(tuple(tensor.uop.base for tensor in tensors), values)
        if background:
            return PendingWork(_launcher().submit(jobs[0].run, jobs, times))
        jobs[0].run(jobs, times)
        return PendingWork()
    for _ in range(times):
        for captured, tensors, values in calls:
            captured(*tensors, **values)
    if times > 0 and graphs and isinstance(last := graphs[-1], StepGraph):
        copies = hooks_of(last.device_name).copies
        return PendingWork() if copies is None else PendingWork(copies.mark())
    return PendingWork()


@functools.cache
def _launcher() -> ThreadPoolExecutor:
    """The thread that is thread 0 of the pool for background work. A forked child makes one of its own.

    It is started here: an executor whose thread cannot be started keeps the work, and a later thread would run it on other inputs.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="tinyvllm-launcher")
    executor.submit(int).result()
    return executor


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_launcher.cache_clear)
