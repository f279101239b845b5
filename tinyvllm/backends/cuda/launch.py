"""Launches of CUDA kernels as nodes of the lazy graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tinygrad import Tensor

from tinyvllm.backends.ahead import CompileAhead
from tinyvllm.backends.collecting import collects
from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.cuda.compilers import CompilerProcess
from tinyvllm.backends.cuda.driver import driver_version
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import Program, architecture, compile_clock, launch_program, load_program, run_program
from tinyvllm.placement import Placement


def launch(kernel: Kernel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """The kernel as a node of the lazy graph: `outs` after it has written them (backends/launch.py)."""
    kernel.check_counts(len(outs), len(ins))
    if collects(kernel):
        return list(outs)
    return launch_program(_program(kernel, Placement.of(outs[0].device).device), [*outs, *ins])


def launch_now(kernel: Kernel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
    """Launch the kernel past the lazy graph, after everything launched before: `outs` are empty or realized tensors that it writes."""
    kernel.check_counts(len(outs), len(ins))
    device = Placement.of(outs[0].device).device
    if not collects(kernel):
        run_program(loaded(kernel, device), _program(kernel, device), [*outs, *ins])


def _program(kernel: Kernel, device: str) -> Program:
    return Program(
        kernel.name, kernel.stem, _code(kernel, device), kernel.outs, kernel.ins, kernel.flops, kernel.bytes,
        kernel.grid, (kernel.block, 1, 1), (kernel.shared, *kernel.integers),
    )  # fmt: skip


@functools.cache
def loaded(kernel: Kernel, device: str) -> Any:
    """The kernel as the device's runtime loads it, for launches past the graph."""
    return load_program(device, kernel.stem, _code(kernel, device), kernel.shared, *kernel.integers)


def _code(kernel: Kernel, device: str) -> bytes:
    return machine_code(kernel.compiled, architecture(device))


@functools.cache
def machine_code(kernel: Kernel, arch: str) -> bytes:
    """A kernel's compiled part for a GPU of an architecture."""
    ahead = _ahead.result((kernel, arch))
    return nvrtc.cubin(kernel, arch, nvrtc.compile_here, compile_clock.compiling) if ahead is None else ahead


def versions() -> str:
    """The versions of the driver and of the compiler."""
    return f"driver {driver_version()}, {nvrtc.version()}"


def compile_ahead(kernels: Iterable[Kernel], device: str) -> None:
    """Compile in the background, in one process a core; `machine_code` waits for what it needs. A failure is raised there."""
    arch = architecture(device)
    _ahead.start((kernel.compiled, arch) for kernel in kernels)


@contextlib.contextmanager
def _compiler() -> Iterator[Callable[[tuple[Kernel, str]], bytes]]:
    """What one thread compiles with: a process of its own, which starts with the first kernel that is not on disk."""
    with CompilerProcess() as process:
        yield lambda key: nvrtc.cubin(*key, process.compile, compile_clock.compiling)


_ahead: CompileAhead[tuple[Kernel, str]] = CompileAhead(_compiler)
