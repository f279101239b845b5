"""Calls a CPU kernel directly from its machine code, on any number of threads, without tinygrad's device and the engine."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm.backends.cpu.compile import _FLAGS, _compile
from tinyvllm.backends.cpu.threads import TEAM_BYTES
from tinyvllm.backends.cpu.toolchain import compiler_command, provide_compiler, target_flags
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text

FOLDER = Path(tempfile.gettempdir()) / f"tinyvllm-test-kernels-{os.getuid()}"
TILE_LANES = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "avx512vbmi"}  # of the variant amx
TILES = Path(__file__).with_name("emulated_tiles.h")  # before the unchanged text of a kernel of the variant amx


@functools.cache
def load(kernel: Kernel, extra: tuple[str, ...] = ()) -> Callable[..., None]:
    """The kernel's entry, compiled as the engine does, with `extra` flags; kept in FOLDER, for the other processes of a run too."""
    if kernel.target == "amx" or sys.platform == "darwin":  # macOS executes written memory only with a switch of each thread
        return _load_shared(kernel, extra)
    text, flags = kernel_text(kernel), (*_FLAGS, *target_flags(kernel.target), *extra)
    path = FOLDER / f"{kernel.name}-{_digest(text, *flags)}.code"
    if not path.is_file():
        _write(path, _compile(text, flags, kernel.name))
    code = path.read_bytes()
    memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    _executable.append(memory)
    return _typed(ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory))))


_executable: list[mmap.mmap] = []  # what is called must stay in memory
_emulates_tiles = True


@contextmanager
def real_tiles() -> Iterator[None]:
    """Kernels of the variant amx run the processor's own instructions here."""
    global _emulates_tiles
    load.cache_clear()
    _emulates_tiles = False
    try:
        yield
    finally:
        load.cache_clear()
        _emulates_tiles = True


def _load_shared(kernel: Kernel, extra: tuple[str, ...]) -> Callable[..., None]:
    """From a shared object: the emulated tiles need the C library, and memory of each thread."""
    text = (TILES.read_text() if kernel.target == "amx" and _emulates_tiles else "") + kernel_text(kernel)
    flags = ("-x", "c", "-O2", "-Wno-deprecated-non-prototype", "-shared", "-fPIC", *target_flags(kernel.target), *extra)
    path = FOLDER / f"{kernel.name}-{_digest(text, *flags)}.so"
    if not path.is_file():
        FOLDER.mkdir(exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.so")
        subprocess.run([provide_compiler(FOLDER), *flags, "-", "-o", str(fresh)], input=text.encode(), check=True)
        fresh.replace(path)
    library = ctypes.CDLL(str(path))
    entry = _typed(library.entry)
    if not hasattr(library, "begin_thread"):
        return entry

    def begin(*arguments: object) -> None:
        library.begin_thread()
        entry(*arguments)

    return begin


def _typed(entry: Any) -> Callable[..., None]:
    entry.restype = None
    return entry


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join((*texts, *compiler_command())).encode()).hexdigest()[:24]


def _write(path: Path, content: bytes) -> None:
    FOLDER.mkdir(exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    fresh.write_bytes(content)
    fresh.replace(path)


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
    entry = load(kernel, extra)
    pool = aligned((TEAM_BYTES,), np.uint8, 0)

    def run(thread: int) -> None:
        team = Team(thread, threads, pool.ctypes.data)
        entry(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.byref(team))

    workers = [threading.Thread(target=run, args=(thread,)) for thread in range(1, threads)]
    for worker in workers:
        worker.start()
    run(0)
    for worker in workers:
        worker.join()
