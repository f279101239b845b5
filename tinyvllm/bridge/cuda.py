"""tinygrad's CUDA device: its driver bindings, and what this project replaces in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Context, Device, helpers

from tinyvllm.bridge.hooks import DeviceCopies


def cuda_driver() -> Any:
    """The CUDA driver's functions under their own names, as ctypes takes them."""
    from tinygrad.runtime.autogen import cuda

    return cuda


def cuda_runtime() -> Any:
    """tinygrad's helpers on top of the driver: `check`, `encode_args`, `cu_time_execution`."""
    from tinygrad.runtime import ops_cuda

    return ops_cuda


def compile_to_cubins(device: str) -> None:
    """Compile tinygrad's own kernels to machine code, too: a driver older than NVRTC, which is often in a wheel, refuses its PTX."""
    from tinygrad.runtime.support import compiler_cuda

    opened: Any = Device[device]
    if isinstance(opened.renderer.compiler, compiler_cuda.NVRTCCompiler):
        opened.renderer.compiler = compiler_cuda.NVRTCCompiler(opened.arch, ptx=False, cache_key="cuda_cubin")
    opened.runtime = _without_listing(opened.runtime)


def _without_listing(runtime: Callable[..., Any]) -> Callable[..., Any]:
    """`runtime` without its listing: from DEBUG=5 on it prints the program as text, and machine code is not text."""

    def load(*arguments: Any, **named: Any) -> Any:
        with Context(DEBUG=min(helpers.DEBUG.value, 4)):  # type: ignore[no-untyped-call]
            return runtime(*arguments, **named)

    return load


def replace_copy_in(device: str, copies: DeviceCopies) -> None:
    """Upload through `copies`: tinygrad's own copy keeps as much pinned memory as it has ever copied between two synchronisations."""

    def copy_in(memory: Any, source: memoryview) -> None:
        copies.upload(memory, 0, np.frombuffer(source, np.uint8))

    opened: Any = Device[device]
    opened.allocator._copyin = copy_in
