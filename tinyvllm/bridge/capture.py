"""Steps that are captured once, and then replayed: call by call, or many times over behind the caller's back."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tinygrad import Context, Device, Tensor, TinyJit, UOp
from tinygrad.engine.realize import graph_cache
from tinygrad.uop.ops import Ops

from tinyvllm.backends.cpu.graph import CpuGraph
from tinyvllm.backends.cuda.copies import Mark
from tinyvllm.backends.cuda.driver import copies_of
from tinyvllm.backends.cuda.graph import CudaGraph
from tinyvllm.backends.metal.icb import MetalGraph
from tinyvllm.backends.metal.queue import Landing, queue_of
from tinyvllm.bridge.arena import shared_arenas


class Captured:
    """A function of tensors that is captured by TinyJit at its first call and replayed as one graph ever after.

    tinygrad runs a function once in the open before it captures; with all weights and inputs realized that run only costs a second
    scheduling of the whole step. A replay goes to the captured graph at once: TinyJit's check of the arguments takes longer than the
    launch. So arguments must be realized tensors of the first call's shapes, and whatever else the function reads must lie in buffers
    that stay. `variables` are the function's integer arguments, by name, with their bounds.
    """

    def __init__(self, function: Callable[..., Any], variables: Mapping[str, tuple[int, int]] | None = None):
        self._jit, self._variables = TinyJit(function), dict(variables or {})
        self._jit.cnt = 1
        self._graph: Callable[[tuple[UOp, ...], dict[str, int]], Any] | None = None
        self._result: Any

    def __call__(self, *tensors: Tensor, **values: int) -> Any:
        """The function's result, a tensor or several, in buffers that the next call overwrites. On the CPU it has run by then."""
        if self._graph is not None:
            self._graph(tuple(tensor.uop.base for tensor in tensors), values)
            return self._result
        result = self._first(*tensors, **values) if self._jit.captured is None else self._replay(*tensors, **values)
        if any(device.split(":")[0] == "CPU" for device in Device._opened_devices):  # what is no crew's job is a worker's, behind our back
            Device["CPU"].synchronize()
        return result

    def _replay(self, *tensors: Tensor, **values: int) -> Any:
        assert self._jit.captured is not None
        return self._jit.captured([tensor.uop.base for tensor in tensors], values)

    def _first(self, *tensors: Tensor, **values: int) -> Any:
        bound = {name: UOp.variable(name, *self._variables[name]).bind(value) for name, value in values.items()}
        with Context(JIT_BATCH_SIZE=0), shared_arenas():
            self._result = self._jit(*tensors, **bound)
        if self._jit.captured is not None:  # JIT=0 in the environment captures nothing
            self._graph = self._only_graph()
        return self._result

    def _only_graph(self) -> Callable[[tuple[UOp, ...], dict[str, int]], Any] | None:
        """The device graph, where the whole capture is one that takes the arguments as they come: a replay then passes the jit by."""
        assert self._jit.captured is not None
        calls = self._jit.captured.linear.src
        if len(calls) != 1 or calls[0].src[0].op is not Ops.CUSTOM_FUNCTION or self._jit.captured._written_uops & set(calls[0].src[1:]):
            return None
        arguments = [u.arg for u in calls[0].src[1:] if u.op is Ops.PARAM]
        graph = graph_cache.get(calls[0].src[0]) if arguments == list(range(len(arguments))) else None
        if graph is not None and graph.device == "CPU" and not any(graph.uop_replace):
            graph.uop_replace = []  # one empty list a kernel, which every replay would go through: 0.1 ms at 290 kernels
        return graph


CapturedCall = tuple[Captured, tuple[Tensor, ...], dict[str, int]]  # what is captured, its tensors and its variables' values


class PendingWork:
    """Work that goes on behind the caller's back, if there is any."""

    PATIENCE = 0.002  # seconds; looking more often costs the lanes more than it brings

    def __init__(self, work: Future[None] | Mark | Landing | None = None):
        self._work = work

    def wait(self) -> bool:
        """Wait a moment; whether all is done. Raises what the work has raised."""
        if self._work is None:
            return True
        try:
            self._work.result(self.PATIENCE)
        except TimeoutError:
            return False
        return True


def repeat(calls: list[CapturedCall], times: int) -> PendingWork:
    """Start these calls one after the other, all of them `times` times over. Each must have been made before.

    On the CPU that is one list of kernels for the crew, run from a thread of its own: the caller goes on meanwhile, may `peek` at buffers
    and must wait for the end before it launches or uploads anything. A CUDA or Metal device has them all in its queue on return.
    """
    graphs = [captured._graph for captured, _, _ in calls]
    if times > 0 and all(isinstance(graph, CpuGraph) for graph in graphs):
        for graph, (_, tensors, values) in zip(graphs, calls, strict=True):
            graph.bind(tuple(tensor.uop.base for tensor in tensors), values)  # type: ignore[union-attr]
        return PendingWork(_launcher().submit(CpuGraph.run, graphs, times))  # type: ignore[arg-type]
    for _ in range(times):
        for captured, tensors, values in calls:
            captured(*tensors, **values)
    if times > 0 and graphs and isinstance(graphs[-1], CudaGraph):
        return PendingWork(copies_of(graphs[-1].calls[0][2][0].device).mark())
    if times > 0 and graphs and isinstance(graphs[-1], MetalGraph):
        return PendingWork(queue_of(graphs[-1].calls[0][2][0].device).mark())
    return PendingWork()


@functools.cache
def _launcher() -> ThreadPoolExecutor:
    """The thread that is lane 0 of what runs behind the callers' backs. A forked child makes one of its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="tinyvllm-launcher")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_launcher.cache_clear)
