"""Launches of CPU kernels: as nodes of the lazy graph, or at once on host memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.backends.ahead import CompileAhead
from tinyvllm.backends.collecting import collects
from tinyvllm.backends.cpu.compile import kernel_code
from tinyvllm.backends.cpu.threads import TEAM, TEAM_BYTES, thread_pool
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import (
    Program,
    code_address,
    define_process_tensor,
    launch_program,
    load_program,
    name_process_tensor,
)

_ahead: CompileAhead[Kernel] = CompileAhead(lambda: contextlib.nullcontext(kernel_code))
_kept: list[np.ndarray] = []  # alive as long as the process: the tensors over them do not own them


def launch(kernel: Kernel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """The kernel as a node of the lazy graph: `outs` after it has written them (backends/launch.py)."""
    kernel.check_counts(len(outs), len(ins))
    if collects(kernel):
        return list(outs)
    program = Program(kernel.name, kernel.name, machine_code(kernel.compiled), kernel.outs, kernel.ins + 1, kernel.flops, kernel.bytes)
    return launch_program(program, [*outs, *ins, solo_team()])


@functools.cache
def machine_code(kernel: Kernel) -> bytes:
    """A kernel's compiled part, as tinygrad's runtime of the CPU takes it."""
    ahead = _ahead.result(kernel)
    return kernel_code(kernel) if ahead is None else ahead


def compile_ahead(kernels: Iterable[Kernel]) -> None:
    """Compile in the background, one compiler a core; `machine_code` waits for what it needs. A failure is raised there."""
    _ahead.start(kernel.compiled for kernel in kernels)  # two records of one code would have one compiler wait for the other


@functools.cache
def row_numbers(count: int) -> Tensor:
    """0, 1, ... count - 1, int32, in memory of the process: a tensor that is computed during a capture would be part of the step."""
    numbers = np.arange(count, dtype=np.int32)
    _kept.append(numbers)
    tensor = Tensor.from_blob(numbers.ctypes.data, (count,), device="CPU", dtype=dtypes.int32)
    return name_process_tensor(tensor, "cpu row numbers", count)


@functools.cache
def solo_team() -> Tensor:
    """A team of one thread with its own shared words: the last argument of a CPU kernel that runs outside a captured step."""
    tensor = Tensor.from_blob(_team_of_one(), (64,), device="CPU", dtype=dtypes.uint8)
    return name_process_tensor(tensor, "cpu solo team")


def _team_of_one() -> int:
    """The address of a team that no other has, alive as long as the process."""
    words = np.zeros(TEAM_BYTES + 128, np.uint8)
    start = -words.ctypes.data % 64
    team = words[start : start + 64]
    team[:8].view(np.int32)[:] = 0, 1
    team[8:16].view(np.uint64)[0] = team.ctypes.data + 64
    _kept.append(words)
    return int(team.ctypes.data)


define_process_tensor("cpu row numbers", row_numbers)
define_process_tensor("cpu solo team", solo_team)


def run_now(kernel: Kernel, *arrays: np.ndarray) -> None:
    """Run a CPU kernel on host memory, outside any graph; it has run on return. For loading, tests and benchmarks."""
    _check_arrays(kernel, arrays)
    words = [_loaded(kernel)[0], TEAM, len(arrays), 0, 1, *(a.ctypes.data for a in arrays)]
    thread_pool().run(np.array(words, np.int64), 1)


def run_alone(kernel: Kernel, *arrays: np.ndarray) -> None:
    """As `run_now`, by this thread: for little work, which is done before the others would be awake."""
    _check_arrays(kernel, arrays)
    entry = ctypes.CFUNCTYPE(None, *[ctypes.c_long] * (len(arrays) + 1))(_loaded(kernel)[0])
    with _alone:
        entry(*(a.ctypes.data for a in arrays), _own_team())


_alone, _own_team = threading.Lock(), functools.cache(_team_of_one)


def _check_arrays(kernel: Kernel, arrays: Sequence[np.ndarray]) -> None:
    if len(arrays) != kernel.outs + kernel.ins or not all(a.flags.c_contiguous for a in arrays):
        raise ValueError(f"run_now: {kernel.stem} takes {kernel.outs + kernel.ins} contiguous arrays")


@functools.cache
def _loaded(kernel: Kernel) -> tuple[int, Any]:
    """Where a kernel's code is in this process, and what keeps it there."""
    program = load_program("CPU", kernel.name, machine_code(kernel.compiled))
    return code_address(program), program
