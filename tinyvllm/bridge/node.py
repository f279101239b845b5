"""Hand-written kernels as nodes of tinygrad's lazy graph, and outside of any graph."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import CompileError
from tinygrad.renderer import Estimates
from tinygrad.runtime.support.elf import jit_loader
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from tinyvllm.backends.cpu.compile import object_code
from tinyvllm.backends.cpu.threads import TEAM, thread_pool
from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal.icb import MOST_BUFFERS
from tinyvllm.backends.source import kernel_text
from tinyvllm.errors import KernelError

_solo_words: list[np.ndarray] = []  # kept: the tensor does not own them


def launch(kernel: Kernel, outs: list[Tensor] | tuple[Tensor, ...], ins: list[Tensor]) -> list[Tensor]:
    """The hand-written kernel as a node of the lazy graph: `outs` after it has written them, in their order.

    Tensors are passed as they lie in memory, so all must be contiguous; `outs` must be buffers (Tensor.empty, or what is to be changed in
    place). Whatever reads a returned tensor runs after the kernel, also in a captured step.
    """
    if (len(outs), len(ins)) != (kernel.outs, kernel.ins):
        raise ValueError(f"launch: {kernel.stem} writes {kernel.outs} and reads {kernel.ins} tensors, got {len(outs)} and {len(ins)}")
    if kernel.backend == "metal" and (len(outs) + len(ins) > MOST_BUFFERS or kernel.shared):
        given = f"{len(outs) + len(ins)} tensors and {kernel.shared} bytes of threadgroup memory"
        raise ValueError(f"launch: {kernel.stem} is given {given}; Metal takes {MOST_BUFFERS} tensors and none")
    on_cpu, device = kernel.backend == "cpu", str(outs[0].device)
    arguments = [*outs, *ins, solo_team()] if on_cpu else [*outs, *ins]

    def program(*placeholders: UOp) -> UOp:
        work = Estimates(ops=kernel.flops, lds=kernel.bytes, mem=kernel.bytes)
        sink = UOp.sink(*placeholders, arg=KernelInfo(name=kernel.name, estimates=work))
        every, written = tuple(range(len(arguments))), tuple(range(kernel.outs))
        # outs and ins must be given: derived from the sink they are empty, and then a graph knows no order
        info = ProgramInfo(kernel.name, (1, 1, 1), None, (), every, written, every)
        if not on_cpu:  # by its name the function is found in the binary; aux is what a CUDA program takes beside it
            threads, shared = (kernel.block, 1, 1), (kernel.shared,) if kernel.backend == "cuda" else ()
            info = dataclasses.replace(info, name=kernel.stem, global_size=kernel.grid, local_size=threads, aux=shared)
        binary = UOp(Ops.BINARY, arg=machine_code(kernel, device))
        source, where = UOp(Ops.SOURCE, arg=kernel.name), UOp(Ops.DEVICE, arg=device)
        return UOp(Ops.PROGRAM, src=(sink, where, UOp(Ops.LINEAR, src=tuple(sink.toposort())), source, binary), arg=info)

    return arguments[0].custom_kernel(*arguments[1:], fxn=program)[: kernel.outs]


@functools.cache
def machine_code(kernel: Kernel, device: str = "CPU") -> bytes:
    """The kernel compiled, as tinygrad's runtime of the device takes it."""
    if kernel.backend == "cuda":
        return nvrtc.cubin(kernel, Device[device].arch)
    if kernel.backend == "metal":
        return _metal_library(kernel, device)
    return jit_loader(object_code(kernel))


def _metal_library(kernel: Kernel, device: str) -> bytes:
    """What tinygrad's compiler makes of the kernel; it keeps it on disk. KernelError with the compiler's words."""
    text = kernel_text(kernel)
    if not text.isascii():  # tinygrad counts letters where the compiler's service counts bytes
        raise KernelError(f"kernels: {kernel.stem}.metal or a header of it is not plain ASCII")
    try:
        return Device[device].compiler.compile_cached(text)
    except CompileError as error:
        said = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
        raise KernelError(f"kernels: {kernel.name} does not compile for {device}: {'; '.join(said[:3])}") from error


@functools.cache
def solo_team() -> Tensor:
    """A team of one lane with its own shared words: the last argument of a CPU kernel that runs outside a captured step."""
    words = np.zeros(512, np.uint8)
    start = -words.ctypes.data % 64
    team = words[start : start + 64]
    team[:8].view(np.int32)[:] = 0, 1
    team[8:16].view(np.uint64)[0] = team.ctypes.data + 64
    tensor = Tensor.from_blob(team.ctypes.data, (64,), device="CPU", dtype=dtypes.uint8)
    _solo_words.append(words)
    return tensor


def run_now(kernel: Kernel, *arrays: np.ndarray) -> None:
    """Run a CPU kernel on host memory, outside any graph: the crew has done it on return. For loading, tests and benchmarks."""
    if len(arrays) != kernel.outs + kernel.ins or not all(a.flags.c_contiguous for a in arrays):
        raise ValueError(f"run_now: {kernel.stem} takes {kernel.outs + kernel.ins} contiguous arrays")
    words = [_address(kernel)[0], TEAM, len(arrays), 0, 1, *(a.ctypes.data for a in arrays)]
    thread_pool().run(np.array(words, np.int64), 1)


@functools.cache
def _address(kernel: Kernel) -> tuple[int, Any]:
    """Where a kernel's code lies in this process, and what keeps it there."""
    program = Device["CPU"].runtime(kernel.name, machine_code(kernel))
    return code_address(program), program


def code_address(program: Any) -> int:
    """Where the code of a loaded CPU program lies."""
    address = ctypes.cast(program.fxn, ctypes.c_void_p).value
    assert address is not None
    return address
