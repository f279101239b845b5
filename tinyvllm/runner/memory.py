"""How much memory is free for the KV cache, and how fast memory can be read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.launch import run_now
from tinyvllm.backends.registry import backend_for, usable_variants
from tinyvllm.errors import ArgumentError, OutOfMemoryError
from tinyvllm.integers import ceil_div
from tinyvllm.placement import Placement
from tinyvllm.weights.mapping import allocate

READ_BYTES = 256 << 20  # more than every cache, including those that a virtual machine does not report
KV_SHARE = 0.5  # of what is free once the weights are resident, unless the user sets the size


def free_memory(device: str) -> int:
    """Bytes that may be allocated on `device` ("CPU", "CUDA", "METAL", ..., with or without an index).

    CUDA's driver and Linux report what is free, Metal what a process should use at most. On macOS, whose free memory means little, it is
    three quarters of all memory. For devices of other kinds it is the host's, because there is no better figure: give --kv-memory or
    --num-blocks there.
    """
    placement = Placement(device)
    backend = backend_for(placement)
    free = None if backend is None else backend.free_memory(placement)
    return _host_free() if free is None else free


def _host_free() -> int:
    if sys.platform == "darwin":
        return int(subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True, check=True).stdout) * 3 // 4
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def pool_blocks(device: str, block_bytes: int, block_size: int, wanted_tokens: int, kv_memory: int | None) -> int:
    """Blocks for the pool: as many as fit `kv_memory`, or else those that `wanted_tokens` need, within a share of the free memory.

    `wanted_tokens` is the total of all sequences at their maximum length; more could never be used.
    """
    if kv_memory is not None:
        blocks = kv_memory // block_bytes
        if blocks < 1:
            raise ArgumentError(f"--kv-memory {kv_memory} holds no block of {block_bytes} bytes; give at least that, or use --num-blocks")
        return blocks
    wanted = ceil_div(wanted_tokens, block_size)
    affordable = int(free_memory(device) * KV_SHARE) // block_bytes
    if affordable < 1:
        raise OutOfMemoryError(f"memory: not one KV block of {block_bytes} bytes fits the free memory of {device}; use a smaller model")
    return min(wanted, affordable)


def check_room(device: str, pool_bytes: int) -> None:
    """OutOfMemoryError for a KV cache that the device cannot hold. The host allocates pages lazily and would kill the process later."""
    free = free_memory(device)
    if pool_bytes > free:
        raise OutOfMemoryError(
            f"memory: a KV cache of {pool_bytes / 2**30:.1f} GiB is more than the {free / 2**30:.1f} GiB that {device} has free; "
            "lower --num-blocks or --kv-memory"
        )


def read_bandwidth(device: str = "CPU", seconds: float = 0.15, nbytes: int = READ_BYTES) -> float:
    """Bytes per second that `device` reads from its memory: the roof of decoding. The best pass counts.

    On the CPU all threads of the pool read. It is the host's bandwidth for a device whose backend does not measure its own. `nbytes` is a
    quarter of what a backend reads in a pass; the host reads READ_BYTES.
    """
    placement = Placement(device)
    backend = backend_for(placement)
    measured = None if backend is None else backend.read_bandwidth(placement, seconds, 4 * nbytes)
    return _host_read_bandwidth(seconds) if measured is None else measured


def _host_read_bandwidth(seconds: float) -> float:
    words = allocate(READ_BYTES).view(np.uint64)
    words[:] = 1  # distinct pages: untouched ones are all the same page of zeros
    variant = usable_variants(Placement("CPU"))[0]
    kernel, sink, best = Kernel.cpu("read", variant, 1, 1, N=len(words)), np.zeros(64, np.uint64), 0.0
    run_now(kernel, sink, words)  # compiles
    end = time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        start = time.perf_counter()
        run_now(kernel, sink, words)
        best = max(best, words.nbytes / (time.perf_counter() - start))
    return best
