"""Launches of CUDA kernels as nodes of the lazy graph."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinygrad import Tensor

from tinyvllm.backends.collecting import collects
from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.cuda.driver import driver_version
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import Program, architecture, launch_program, load_program, run_program
from tinyvllm.errors import KernelError
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
        kernel.name, kernel.stem, machine_code(kernel, device), kernel.outs, kernel.ins, kernel.flops, kernel.bytes,
        kernel.grid, (kernel.block, 1, 1), (kernel.shared, *kernel.integers),
    )  # fmt: skip


@functools.cache
def loaded(kernel: Kernel, device: str) -> Any:
    """The kernel as the device's runtime loads it, for launches past the graph."""
    return load_program(device, kernel.stem, machine_code(kernel, device), kernel.shared, *kernel.integers)


@functools.cache
def machine_code(kernel: Kernel, device: str) -> bytes:
    """The kernel compiled for the device's GPU."""
    return nvrtc.cubin(kernel, architecture(device))


def versions() -> str:
    """The versions of the driver and of the compiler."""
    return f"driver {driver_version()}, {nvrtc.version()}"


def compile_ahead(kernels: Iterable[Kernel], device: str) -> None:
    """Compile on all cores, and return when all is on disk; a kernel that does not compile fails where it is launched."""
    arch = architecture(device)

    def compiled(kernel: Kernel) -> None:
        with contextlib.suppress(KernelError):
            nvrtc.cubin(kernel, arch)

    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tinyvllm-nvrtc") as compilers:
        list(compilers.map(compiled, dict.fromkeys(kernels)))
