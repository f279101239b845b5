"""Base classes of a backend's graph: a captured step, replayed as one launch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from tinygrad import UOp
from tinygrad.device import Buffer
from tinygrad.engine.jit import GraphRunner
from tinygrad.uop.ops import Ops, ProgramInfo

from tinyvllm.bridge.kernel_times import KernelTime, KernelTimer
from tinyvllm.bridge.memory import buffer_of
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class GraphKernel:
    """One kernel of a captured step.

    info     tinygrad's ProgramInfo: name, sizes, variables, and which of the call's buffers are arguments (`globals`)
    runtime  the program as the device's runtime loaded it
    memory   tinygrad's opaque memory of every buffer of the call
    """

    info: Any
    runtime: Any
    memory: list[Any]

    @property
    def arguments(self) -> list[Any]:
        """The memory that the kernel takes, in the order of its arguments."""
        return [self.memory[i] for i in self.info.globals]

    @property
    def is_ours(self) -> bool:
        """Whether a backend launched it, which always gives `aux`; tinygrad gives its own kernels of a GPU none."""
        return bool(self.info.aux)

    @property
    def integers(self) -> list[int]:
        """The integers that follow: one for each variable, to be set at each replay, then those that the program always takes."""
        return [0] * len(self.info.vars) + list(getattr(self.runtime, "integers", ()))

    def argument_at(self, position: int) -> int:
        """Which argument the buffer at `position` of the call is; -1 if it is none."""
        return self.info.globals.index(position) if position in self.info.globals else -1


@dataclass(frozen=True)
class Launch:
    """One launch of a captured step.

    program  tinygrad's ProgramInfo
    binary   its machine code
    runtime  the program as the device's runtime loaded it
    buffers  of the call, allocated
    inputs   (position, i): input i of a replay is the buffer at this position
    flops, nbytes  the work that the kernel's plan states, for profiles; 0 where it states none
    """

    program: ProgramInfo
    binary: bytes
    runtime: Any
    buffers: list[Buffer]
    inputs: list[tuple[int, int]]
    flops: int = 0
    nbytes: int = 0

    def timed(self, start: float, seconds: float) -> KernelTime:
        """This launch in a profile."""
        return KernelTime(self.program.function_name, start, seconds, self.flops, self.nbytes)


def _stated_work(program: UOp) -> tuple[int, int]:
    """(operations, bytes) of a compiled program in tinygrad's graph. 0 where they depend on a variable: its largest value is meant."""
    work = program.src[0].arg.estimates
    return (0, 0) if work is None or program.arg.vars else (int(work.ops), int(work.mem))


class StepGraph(GraphRunner):
    """A captured step of one device. tinygrad constructs it and calls it for each replay.

    It is made of calls in tinygrad's graph, or of launches whose sizes depend on no variable (kept.py).

    A subclass encodes `self.kernels` and implements `__call__`. Of tinygrad's GraphRunner it uses:

    launches                     of the step, in their order
    vars                         names of the step's variables
    uop_replace[j]               (position, i): input i replaces the buffer at this position of kernel j
    updated_vars(values)         (j, i, value) of every variable argument
    updated_launch_dims(values)  (j, grid, block) of every kernel whose size depends on a variable
    """

    max_view_offset: int | None = None  # bytes from a buffer's start to a view of it, if the device limits them

    def __init__(self, linear: UOp | Sequence[Launch], input_uops: tuple[UOp, ...] = ()):
        if isinstance(linear, UOp):
            super().__init__(linear, input_uops)
            self.launches = [
                Launch(program.arg, program.src[4].arg, runtime, list(buffers), inputs, *_stated_work(program))
                for (_, program, buffers, _), runtime, inputs in zip(self.calls, self.runtimes, self.uop_replace, strict=True)
            ]
        else:
            self._take(linear)
        self.held: list[UOp] = []  # what must live as long as the step
        self.device_name: str = self.launches[0].buffers[0].device
        self.kernels = [GraphKernel(each.program, each.runtime, [buffer._buf for buffer in each.buffers]) for each in self.launches]

    def _take(self, launches: Sequence[Launch]) -> None:
        """Set what tinygrad's GraphRunner derives from calls."""
        self.launches = list(launches)
        self.runtimes = [each.runtime for each in launches]
        self.uop_replace = [each.inputs for each in launches]
        free = [{v.expr: i for i, v in enumerate(each.program.vars) if v.expr not in each.program.runtimevars} for each in launches]
        self.vars = sorted({name for names in free for name in names})
        self.var_vals_replace = {j: [(i, self.vars.index(name)) for name, i in names.items()] for j, names in enumerate(free) if names}
        self.symbolic_dims, self.launch_dims_replace, self.launch_dims_base = [], {}, {}

    @staticmethod
    def memory_of(inputs: tuple[UOp, ...]) -> list[Any]:
        """tinygrad's opaque memory of each input."""
        return [buffer_of(u)._buf for u in inputs]

    def run_alone(self, inputs: tuple[UOp, ...], values: dict[str, int], timer: KernelTimer) -> None:
        """Launch the kernels of a GPU one by one, each after the last has ended, with the GPU's own times of each."""
        moved = self.memory_of(inputs) if any(self.uop_replace) else []
        for launch, kernel, replace in zip(self.launches, self.kernels, self.uop_replace or repeat([]), strict=False):
            memory = list(kernel.memory)
            for position, i in replace:
                memory[position] = moved[i]
            grid, block = kernel.info.launch_dims(values)
            numbers = tuple(values[variable.expr] for variable in kernel.info.vars)
            start = time.perf_counter()
            seconds = kernel.runtime(*(memory[i] for i in kernel.info.globals), global_size=grid, local_size=block, vals=numbers, wait=True)
            timer.times.append(launch.timed(start, float(seconds)))

    @classmethod
    def supports_uop(cls, batch_devs: list[Any], new_call: UOp) -> bool:  # type: ignore[override]
        """Whether tinygrad may put a call into this graph: a kernel of one device whose views start within `max_view_offset`."""
        limit = cls.max_view_offset
        if limit is not None and any(u.op is Ops.BUFFER_VIEW and u.arg[1] * u.dtype.itemsize > limit for u in new_call.src[1:]):
            return False
        return GraphRunner.supports_uop(batch_devs, new_call)


class JobGraph(StepGraph):
    """A step that the host's own threads compute, so that a thread can run several of them, repeatedly, as one job."""

    def bind(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int]) -> None:
        """Set the inputs and the variables of the next run."""
        raise NotImplementedError

    @staticmethod
    def run(graphs: Sequence[Any], times: int) -> None:
        """Run the graphs one after the other, all of them `times` times."""
        raise NotImplementedError
