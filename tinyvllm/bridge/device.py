"""tinygrad's devices: choosing, opening and awaiting one, and what of it is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Context, Device, helpers

from tinyvllm.backends.cpu.graph import CpuGraph
from tinyvllm.backends.cuda.driver import copies_of
from tinyvllm.backends.cuda.graph import CudaGraph
from tinyvllm.backends.metal.icb import MetalGraph
from tinyvllm.bridge.cpu_free import never_waiting_for_itself


def prefer_device(device: str) -> None:
    """Make `device` tinygrad's default, unless somebody chose one: otherwise tinygrad probes every backend for it, at length."""
    if not helpers.DEV.device:
        helpers.DEV.value = device


def open_device(device: str) -> None:
    """Open `device`, which tinygrad otherwise does at its first use; whatever its backend raises where it cannot."""
    opened = Device[device]
    if device.split(":")[0] == "CPU" and opened.graph is not CpuGraph:
        opened.graph = CpuGraph
        opened.allocator._free = never_waiting_for_itself(opened.allocator._free)  # type: ignore[method-assign]
    if device.split(":")[0] == "CUDA" and opened.graph is not CudaGraph:
        opened.graph = CudaGraph
        opened.allocator._copyin = functools.partial(_copy_in, device)  # type: ignore[method-assign]
        opened.runtime = _never_shown(opened.runtime)
        _compile_to_machine_code(opened)
    if device.split(":")[0] == "METAL" and opened.graph is not None:  # None: the GPU of a virtual machine has no indirect command buffers
        opened.graph = MetalGraph


def _compile_to_machine_code(opened: Any) -> None:
    """tinygrad's kernels, too, as machine code: a driver older than NVRTC, which a wheel often is newer than, takes no PTX of it."""
    from tinygrad.runtime.support import compiler_cuda

    if isinstance(opened.renderer.compiler, compiler_cuda.NVRTCCompiler):
        opened.renderer.compiler = compiler_cuda.NVRTCCompiler(opened.arch, ptx=False, cache_key="cuda_cubin")


def _never_shown(runtime: Callable[..., Any]) -> Callable[..., Any]:
    """`runtime`, which from DEBUG=5 on prints the program as the text that it takes it for; machine code is none."""

    def made(*arguments: Any, **named: Any) -> Any:
        with Context(DEBUG=min(helpers.DEBUG.value, 4)):
            return runtime(*arguments, **named)

    return made


def _copy_in(device: str, opaque: Any, source: memoryview) -> None:
    """tinygrad's copy to a CUDA device keeps pinned memory as large as all it has ever copied between two synchronisations, and after."""
    copies_of(device).upload(opaque.value, np.frombuffer(source, np.uint8))


def synchronize(device: str) -> None:
    """Wait until everything launched on `device` has run. `realize()` of tinygrad returns before the CPU device's worker has begun."""
    Device[device].synchronize()
