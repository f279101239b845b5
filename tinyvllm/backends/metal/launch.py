"""Launches of Metal kernels: as nodes of the lazy graph, or timed past any graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.collecting import collects
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal.queue import queue_of
from tinyvllm.backends.source import kernel_text
from tinyvllm.bridge import Program, TimedProgram, compile_text, launch_program, load_program
from tinyvllm.errors import KernelError
from tinyvllm.placement import Placement

MAX_BUFFERS = 31  # of a kernel


def launch(kernel: Kernel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """The kernel as a node of the lazy graph: `outs` after it has written them (backends/launch.py).

    UnusableKernelError, before anything is launched, if the GPU cannot run it.
    """
    kernel.check_counts(len(outs), len(ins))
    if collects(kernel):
        return list(outs)
    if len(outs) + len(ins) > MAX_BUFFERS or kernel.shared:
        got = f"{len(outs) + len(ins)} tensors and {kernel.shared} bytes of dynamic threadgroup memory"
        raise ValueError(f"launch: {kernel.stem} got {got}; Metal takes up to {MAX_BUFFERS} tensors and 0 bytes")
    device = Placement.of(outs[0].device).device
    require_runnable(kernel, device)
    return launch_program(_program(kernel, device), [*outs, *ins])


class UnusableKernelError(KernelError):
    """This GPU cannot run the kernel as it is launched."""

    def __init__(self, kernel: Kernel, device: str, reason: str):
        super().__init__(f"launch: {reason}")
        self.kernel, self.device, self.reason = kernel, device, reason


@functools.cache
def require_runnable(kernel: Kernel, device: str) -> None:
    """Load the kernel; UnusableKernelError if the GPU cannot, or runs fewer threads of it than a launch has."""
    try:
        limit = load_program(device, kernel.stem, machine_code(kernel, device)).max_total_threads
    except RuntimeError as error:
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnusableKernelError(kernel, device, f"Metal makes no pipeline of {kernel.stem}: {what}") from error
    if kernel.block > limit:
        reason = f"{kernel.stem} has {kernel.block} threads per threadgroup; this GPU runs at most {limit} of it"
        raise UnusableKernelError(kernel, device, reason)


def _program(kernel: Kernel, device: str) -> Program:
    return Program(
        kernel.name, kernel.stem, machine_code(kernel, device), kernel.outs, kernel.ins, kernel.flops, kernel.bytes,
        kernel.grid, (kernel.block, 1, 1),
    )  # fmt: skip


@functools.cache
def machine_code(kernel: Kernel, device: str) -> bytes:
    """The kernel as a Metal library; tinygrad's compiler keeps it on disk."""
    text = kernel_text(kernel)
    if not text.isascii():  # tinygrad counts characters, the compiler service bytes
        raise KernelError(f"kernels: {kernel.stem}.metal or one of its headers is not plain ASCII")
    return compile_text(device, kernel.name, text)


class TimedKernel:
    """A Metal kernel with arguments of its own, to be launched repeatedly.

    `arguments`, outs then ins: a realized tensor in place, an array that is copied, or a number of bytes of scratch, initially zero.
    Compiles on construction; KernelError if the GPU cannot run as many threads of it.
    """

    def __init__(self, kernel: Kernel, device: str, arguments: Sequence[Tensor | np.ndarray | int]):
        if kernel.backend != "metal" or len(arguments) != kernel.outs + kernel.ins:
            expected = f"a Metal kernel with its {kernel.outs + kernel.ins} arguments"
            raise ValueError(f"launch: {kernel.stem} of {kernel.backend} is timed with {len(arguments)} arguments; expected {expected}")
        require_runnable(kernel, device)
        self._timed = TimedProgram(_program(kernel, device), device, arguments, lambda: queue_of(device).wait_for_all())

    def __call__(self) -> float:
        """Launch it, wait for it, and return the seconds that the GPU took."""
        return self._timed()
