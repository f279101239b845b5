"""What the machine could do at most: bytes read from memory and multiply-adds a second, by `roof.c` on all cores.

python -m benchmarks.roof
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Spread, table
from tinyvllm.backends.cpu.variants import cpu_variants

_SOURCE = Path(__file__).with_suffix(".c")
_BYTES = 128 << 20  # a thread's share, far beyond the caches
_PASSES = 8  # in a row: a round takes some 50 ms
_ROUNDS = 1_000_000
_KINDS = ("f32_flops", "bf16_flops", "int8_ops")
_BY_TILES = {"bf16_flops": "bf16_tile_flops", "int8_ops": "int8_tile_ops"}


def threads_of_machine() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _library() -> ctypes.CDLL:
    from tinyvllm.backends.cpu.toolchain import provide_compiler

    folder = Path(tempfile.gettempdir()) / f"tinyvllm-benchmarks-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    source = _SOURCE.read_bytes()
    library = folder / f"roof-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not library.is_file():
        flags = ["-O2", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([provide_compiler(folder), *flags, str(_SOURCE), "-o", str(fresh)], check=True)
        fresh.replace(library)
    loaded = ctypes.CDLL(str(library))
    for name in ("read_bytes", *_KINDS, *_BY_TILES.values()):
        getattr(loaded, name).restype = None
    return loaded


class _Span(ctypes.Structure):
    _fields_ = [("start", ctypes.c_double), ("end", ctypes.c_double)]


def _together(threads: int, run: Callable[[int, ctypes.c_int, _Span], None]) -> float:
    """Seconds from the first start to the last end of `threads` threads that run `run(thread, gate, span)` at the same time."""
    _library()  # compiled by one thread, before the others wait for each other
    gate, spans = ctypes.c_int(0), [_Span() for _ in range(threads)]
    workers = [threading.Thread(target=run, args=(thread, gate, spans[thread])) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return float(max(span.end for span in spans) - min(span.start for span in spans))


@functools.cache
def _buffers(threads: int) -> list[np.ndarray]:
    from tinyvllm.weights.mapping import allocate

    buffers = [allocate(_BYTES) for _ in range(threads)]
    for buffer in buffers:
        buffer.fill(1)
    return buffers


def read_once(threads: int | None = None) -> float:
    """Seconds in which `threads` (all cores') together read `read_size` bytes from memory. A contestant like the others in `take_turns`.

    Memory is shared beyond what a system sees of it: on a virtual machine the same loop may read half or twice as much a minute later.
    So the roof of a run is a median of rounds between those of the run, not the best that was ever seen.
    """
    threads = threads or threads_of_machine()
    buffers, sink = _buffers(threads), ctypes.c_uint64()

    def read(thread: int, gate: ctypes.c_int, span: _Span) -> None:
        start, size = ctypes.c_void_p(buffers[thread].ctypes.data), ctypes.c_size_t(_BYTES)
        _library().read_bytes(start, size, _PASSES, ctypes.byref(gate), threads, ctypes.byref(span), ctypes.byref(sink))

    return _together(threads, read)


def read_size(threads: int | None = None) -> int:
    return (threads or threads_of_machine()) * _BYTES * _PASSES


def read_bandwidth(threads: int | None = None) -> float:
    """Bytes a second, the median of seven rounds."""
    return read_size(threads) / median(read_once(threads) for _ in range(7))


def operations(kind: str, threads: int | None = None, passes: int = 24) -> float | None:
    """Multiplications and additions a second of `kind`: "f32_flops", "bf16_flops" or "int8_ops"; None where there is no instruction.

    By tiles where the processor has them and the system grants them. The best of `passes` short ones: no other process shares these
    registers.
    """
    threads = threads or threads_of_machine()
    if kind in _BY_TILES and cpu_variants().get("amx", "another architecture") is None:
        kind = _BY_TILES[kind]
    done, sink = ctypes.c_double(), ctypes.c_float()

    def run(thread: int, gate: ctypes.c_int, span: _Span) -> None:
        loop = getattr(_library(), kind)
        loop(ctypes.c_long(_ROUNDS), ctypes.byref(gate), threads, ctypes.byref(span), ctypes.byref(sink), ctypes.byref(done))

    seconds = [_together(threads, run) for _ in range(passes)]
    return threads * done.value / min(seconds) if done.value else None


def roof_figures(reading: Spread | None = None) -> dict[str, float | None]:
    """GB/s for the record of a run: of the rounds that it took in turn with its own, or measured now."""
    bandwidth = read_bandwidth() if reading is None else reading.rate(read_size())
    return {"read_GBps": round(bandwidth / 1e9, 1)}


def roofs(threads: int | None = None) -> dict[str, float | None]:
    """All of them, in GB/s and in 10^9 operations a second: for the record of a run."""
    giga = {"read_GBps": read_bandwidth(threads)} | {f"{kind[:4].rstrip('_')}_Gops": operations(kind, threads) for kind in _KINDS}
    return {name: None if value is None else round(value / 1e9, 1) for name, value in giga.items()}


if __name__ == "__main__":
    print(table(["roof", "10^9 a second"], [[name, value] for name, value in roofs().items()]))
