"""tinygrad's CUDA device: its driver bindings, and what this project replaces in it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Context, Device, helpers

from tinyvllm.bridge.compiling import timed
from tinyvllm.bridge.hooks import DeviceCopies


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData: at which point of a node its successor may begin."""

    _fields_ = [("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5)]


def cuda_driver() -> Any:
    """The CUDA driver's functions under their own names, as ctypes takes them."""
    from tinygrad.runtime.autogen import cuda

    if not hasattr(cuda, "cuGraphAddDependencies_v2"):  # of CUDA 12.3; tinygrad's bindings are older
        nodes = ctypes.POINTER(cuda.CUgraphNode)

        @cuda.dll.bind(cuda.CUresult, cuda.CUgraph, nodes, nodes, ctypes.POINTER(EdgeData), ctypes.c_size_t)  # type: ignore[untyped-decorator]
        def cuGraphAddDependencies_v2(*arguments: Any) -> Any: ...

        cuda.cuGraphAddDependencies_v2 = cuGraphAddDependencies_v2  # type: ignore[attr-defined]
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
        opened.renderer.compiler.compile = timed(opened.renderer.compiler.compile)
    opened.runtime = _loader(opened)


def _loader(opened: Any) -> Callable[..., Any]:
    """What loads programs onto a device: those of `_program_class`, without tinygrad's listing of them.

    From DEBUG=5 on it prints the program as text, and machine code is not text.
    """
    program_class = _program_class()

    def load(*arguments: Any, **named: Any) -> Any:
        with Context(DEBUG=min(helpers.DEBUG.value, 4)):  # type: ignore[no-untyped-call]
            return program_class(opened, *arguments, **named)

    return load


@functools.cache
def _program_class() -> type[Any]:
    """tinygrad's loaded program, with integers that each launch passes after its arrays and variables."""
    from tinygrad.runtime.ops_cuda import CUDAProgram

    class ProgramWithIntegers(CUDAProgram):
        def __init__(self, device: Any, name: str, binary: bytes, shared: int = 0, *integers: int, **options: Any):
            super().__init__(device, name, binary, shared, **options)
            self.integers = integers

        def __call__(self, *arguments: Any, vals: tuple[int, ...] = (), **options: Any) -> Any:  # type: ignore[override]
            return super().__call__(*arguments, vals=(*vals, *self.integers), **options)

    return ProgramWithIntegers


def replace_copy_in(device: str, copies: DeviceCopies) -> None:
    """Upload through `copies`: tinygrad's own copy keeps as much pinned memory as it has ever copied between two synchronisations."""

    def copy_in(memory: Any, source: memoryview) -> None:
        copies.upload(memory, 0, np.frombuffer(source, np.uint8))

    opened: Any = Device[device]
    opened.allocator._copyin = copy_in
