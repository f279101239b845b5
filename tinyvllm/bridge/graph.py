"""Base classes of a backend's graph: a captured step, replayed as one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import UOp
from tinygrad.engine.jit import GraphRunner
from tinygrad.uop.ops import Ops

from tinyvllm.bridge.memory import buffer_of


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
    def integers(self) -> list[int]:
        """The integers that follow: one for each variable, to be set at each replay, then those that the program always takes."""
        return [0] * len(self.info.vars) + list(getattr(self.runtime, "integers", ()))

    def argument_at(self, position: int) -> int:
        """Which argument the buffer at `position` of the call is; -1 if it is none."""
        return self.info.globals.index(position) if position in self.info.globals else -1


class StepGraph(GraphRunner):
    """A captured step of one device. tinygrad constructs it and calls it for each replay.

    A subclass encodes `self.kernels` and implements `__call__`. Of tinygrad's GraphRunner it uses:

    vars                         names of the step's variables
    uop_replace[j]               (position, i): input i replaces the buffer at this position of kernel j
    updated_vars(values)         (j, i, value) of every variable argument
    updated_launch_dims(values)  (j, grid, block) of every kernel whose size depends on a variable
    """

    max_view_offset: int | None = None  # bytes from a buffer's start to a view of it, if the device limits them

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        self.device_name: str = self.calls[0][2][0].device
        self.kernels = [
            GraphKernel(program.arg, runtime, [buffer._buf for buffer in buffers])
            for (_, program, buffers, _), runtime in zip(self.calls, self.runtimes, strict=True)
        ]

    @staticmethod
    def memory_of(inputs: tuple[UOp, ...]) -> list[Any]:
        """tinygrad's opaque memory of each input."""
        return [buffer_of(u)._buf for u in inputs]

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
