"""Compiled programs as nodes of tinygrad's lazy graph, and loaded outside of any graph."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from tinygrad import Device, Tensor, UOp
from tinygrad.renderer import Estimates
from tinygrad.runtime.support.elf import jit_loader
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from tinyvllm.bridge.memory import opaque_memory
from tinyvllm.bridge.recording import current_recording
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Program:
    """A compiled kernel with what a launch of it needs.

    name    what profiles and DEBUG=2 show
    entry   the function in `binary`, as the device's runtime looks it up
    binary  machine code as the device's runtime takes it
    outs    how many arguments, the first ones, it writes; each may be read, too
    ins     how many arguments follow that it only reads
    flops   floating-point operations of one launch
    nbytes  bytes of memory that one launch must move at least
    grid    blocks of threads, in three directions
    block   threads of a block, in three directions; None on the CPU
    aux     further launch parameters of the device: on CUDA bytes of dynamic shared memory, then integers that follow the tensors
    """

    name: str
    entry: str
    binary: bytes
    outs: int
    ins: int
    flops: int = 0
    nbytes: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] | None = None
    aux: tuple[int, ...] = ()


def launch_program(program: Program, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The program as a node of the lazy graph: its outs after it has written them, in their order.

    Tensors are passed as they are in memory, so all must be contiguous; outs must be buffers (Tensor.empty, or what is changed in place).
    What reads a returned tensor runs after the program. In a capture programs are launched in the order of these calls, and what tinygrad
    computes reads a buffer as it is when the result is first used: not what it held when the expression was written.
    """
    device = str(arguments[0].device)

    node = _node(program, len(arguments), device)
    if (recording := current_recording()) is not None:
        return recording.add_launch(node, list(arguments))[: program.outs]
    return arguments[0].custom_kernel(*arguments[1:], fxn=lambda *placeholders: node)[: program.outs]


@functools.cache
def _node(program: Program, count: int, device: str) -> UOp:
    """The program with `count` arguments as tinygrad has it once compiled: without a syntax tree."""
    work = Estimates(ops=program.flops, lds=program.nbytes, mem=program.nbytes)
    every, written = tuple(range(count)), tuple(range(program.outs))
    # outs and ins must be explicit: derived from the sink they are empty, and a graph would not know the order of launches
    info = ProgramInfo(program.entry, program.grid, program.block, (), every, written, every, aux=program.aux)
    source, binary = UOp(Ops.SOURCE, arg=program.name), UOp(Ops.BINARY, arg=program.binary)
    sink = UOp.sink(arg=KernelInfo(name=program.name, estimates=work))
    return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.DEVICE, arg=device), UOp(Ops.LINEAR), source, binary), arg=info)


def load_program(device: str, entry: str, binary: bytes, *aux: int) -> Any:
    """The program as the device's runtime loads it, to be launched past any graph. It must live as long as its code is used.

    `aux` is that of `Program`.
    """
    return Device[device].runtime(entry, binary, *aux)


def run_program(runtime: Any, program: Program, arguments: Sequence[Tensor]) -> None:
    """Launch a loaded program once, past any graph and after everything launched before, on the memory of realized or empty tensors."""
    memory = [opaque_memory(argument) for argument in arguments]
    runtime(*memory, global_size=program.grid, local_size=program.block)


def load_object(code: bytes) -> bytes:
    """The machine code of an ELF object file, relocated; its first function is at offset 0."""
    return jit_loader(code)


def code_address(runtime: Any) -> int:
    """Where the code of a loaded CPU program is."""
    address = ctypes.cast(runtime.fxn, ctypes.c_void_p).value
    assert address is not None
    return address
