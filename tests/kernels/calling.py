"""Calls a CPU kernel directly from its shared object, on any number of threads, without tinygrad and the engine."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

from tinyvllm.backends.cpu.toolchain import provide_compiler, target_flags
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text

FOLDER = Path(tempfile.gettempdir()) / f"tinyvllm-test-kernels-{os.getuid()}"
TILES = Path(__file__).with_name("emulated_tiles.h")  # before the unchanged text of a kernel of the variant amx


@functools.cache
def load(kernel: Kernel, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    text = (TILES.read_text() if kernel.target == "amx" else "") + kernel_text(kernel)
    flags = ("-x", "c", "-O2", "-Wno-deprecated-non-prototype", "-shared", "-fPIC", *target_flags(kernel.target), *extra)
    command = [provide_compiler(FOLDER), *flags]
    path = FOLDER / f"{kernel.name}-{hashlib.sha256((text + repr(command)).encode()).hexdigest()[:24]}.so"
    if not path.is_file():
        FOLDER.mkdir(exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.so")
        subprocess.run([*command, "-", "-o", str(fresh)], input=text.encode(), check=True)
        fresh.replace(path)
    return ctypes.CDLL(str(path))


def aligned(shape: tuple[int, ...], dtype: object, fill: object = None) -> np.ndarray:
    """An array on a cache line's boundary, filled with `fill` or, without one, with bytes that are NaN in every float format."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(size + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(dtype).reshape(shape)
    if fill is not None:
        array[...] = fill
    return array


class Team(ctypes.Structure):
    """struct thread_team of kernels/cpu/include/thread_team.h."""

    _fields_ = [("thread", ctypes.c_int), ("threads", ctypes.c_int), ("pool", ctypes.c_void_p)]


def call(kernel: Kernel, *arrays: np.ndarray, threads: int = 2, extra: tuple[str, ...] = ()) -> None:
    """Run the kernel on `threads` threads. Arrays are in the order of its arguments; those that it writes are written in place."""
    assert len(arrays) == kernel.outs + kernel.ins, f"{kernel.stem} takes {kernel.outs + kernel.ins} arguments, got {len(arrays)}"
    assert all(a.flags.c_contiguous for a in arrays)
    entry = load(kernel, extra).entry
    entry.restype = None
    pool = aligned((256,), np.uint8, 0)

    def run(thread: int) -> None:
        team = Team(thread, threads, pool.ctypes.data)
        entry(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.byref(team))

    workers = [threading.Thread(target=run, args=(thread,)) for thread in range(1, threads)]
    for worker in workers:
        worker.start()
    run(0)
    for worker in workers:
        worker.join()
