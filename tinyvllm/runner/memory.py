"""How much memory is free for the KV cache, and how fast memory can be read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.launch import run_now
from tinyvllm.backends.registry import backend_for, usable_variants
from tinyvllm.errors import ArgumentError, OutOfMemoryError
from tinyvllm.host_memory import headroom, megabytes
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import Placement
from tinyvllm.weights.mapping import allocate

READ_BYTES = 256 << 20  # more than every cache, including those that a virtual machine does not report
KV_SHARE = 0.5  # of what is free once the weights are resident, unless the user sets the size


def free_memory(device: str) -> int:
    """Bytes that may be allocated on `device` ("CPU", "CUDA", "METAL", ..., with or without an index).

    CUDA's driver and Linux report what is free, Metal what a process should use at most. Host memory is limited further by control groups
    and ulimit -v (host_memory.py). For devices of other kinds it is the host's, because there is no better figure: give --kv-memory or
    --num-blocks there.
    """
    free = _device_free(device)
    return headroom().bytes if free is None else free


def _device_free(device: str) -> int | None:
    placement = Placement(device)
    backend = backend_for(placement)
    return None if backend is None else backend.free_memory(placement)


def memory_limit(device: str) -> str:
    """What limits `free_memory`, in words."""
    return f"free memory of {device}" if _device_free(device) is not None else headroom().limit


def free_together(devices: Sequence[str]) -> tuple[int, str]:
    """Bytes that may be allocated on one or several devices, and what limits them, in words. Metal's memory is the CPU's. A device that is
    there several times is as many like it.
    """
    counted = [device for device in devices if len(devices) == 1 or not Placement(device).is_metal]
    limits = [f"{memory_limit(device)}{f', {count} times' * (count > 1)}" for device, count in Counter(devices).items()]
    return sum(map(free_memory, counted)), " and ".join(limits)


def run_bytes(device: str) -> int:
    """What running a model takes of the free memory, next to weights, KV cache and the results of steps."""
    return headroom().run_bytes if _device_free(device) is None else 0


def _there_is(device: str, free: int) -> str:
    """How much there is, for messages: with what limits it."""
    return f"{megabytes(free)} can be allocated ({memory_limit(device)})"


@dataclass(frozen=True)
class DrafterMemory:
    """Bytes that drafts take next to the model: weights, a cache block for each of the model's, and `own` blocks of guesses."""

    weights: int = 0
    block: int = 0
    own: int = 0

    def total(self, num_blocks: int) -> int:
        """Bytes next to a cache of `num_blocks` blocks."""
        return self.weights + self.cache(num_blocks)

    def cache(self, num_blocks: int) -> int:
        """Bytes of the drafter's own cache next to one of `num_blocks` blocks."""
        return self.own + num_blocks * self.block


NO_DRAFTER = DrafterMemory()


def pool_blocks(
    device: str,
    block_bytes: int,
    block_size: int,
    wanted_tokens: int,
    kv_memory: int | None,
    drafter: DrafterMemory = NO_DRAFTER,
    free: int | None = None,
    sharers: int = 1,
) -> int:
    """Blocks for the pool: as many as fit `kv_memory`, or else those that `wanted_tokens` need, within a share of the free memory.

    `wanted_tokens` is the total of all sequences at their maximum length; more could never be used. The drafter's cache counts, too.
    What a share of the free memory holds is rounded down, by less than a sixteenth: steps kept on disk are for one number of blocks, and
    free memory differs a little from start to start. `free` is the free memory of a plan; None asks the device. `sharers` engines with the
    same weights divide the share.
    """
    both = block_bytes + drafter.block
    sharers = sharers if _device_free(device) is None else 1
    if kv_memory is not None:
        blocks = (kv_memory - drafter.own) // both
        if blocks < 1:
            raise ArgumentError(_too_little(kv_memory, block_bytes, drafter))
        return blocks
    wanted = ceil_div(wanted_tokens, block_size)
    free = free_memory(device) if free is None else free
    affordable = (int((free - drafter.weights) * KV_SHARE / sharers) - drafter.own) // both
    if affordable < 1:
        more = ""
        if drafter.total(1):
            more = f" (the drafter {megabytes(drafter.total(1))} of it, of which weights {megabytes(drafter.weights)})"
        raise OutOfMemoryError(
            f"memory: one KV block needs {megabytes(both + drafter.own + drafter.weights)}{more} and may take half of what is free, "
            f"{_there_is(device, free)}; lower --block-size, or use a smaller model"
        )
    return wanted if wanted <= affordable else _rounded_down(affordable)


def _rounded_down(count: int) -> int:
    """With its five highest bits."""
    shift = max(0, count.bit_length() - 5)
    return count >> shift << shift


def _too_little(kv_memory: int, block_bytes: int, drafter: DrafterMemory) -> str:
    if not drafter.cache(1):
        return f"--kv-memory {kv_memory} holds no block of {block_bytes} bytes; give at least that, or use --num-blocks"
    return (
        f"--kv-memory {kv_memory} holds no block of the model and its drafter together: {block_bytes} bytes of the model, "
        f"{drafter.block} of the drafter and {drafter.own} for its guesses; give at least {block_bytes + drafter.cache(1)}, or run "
        "without --speculative-config"
    )


def check_room(device: str, pool_bytes: int, drafter_bytes: int = 0, free: int | None = None) -> None:
    """OutOfMemoryError for a KV cache that the device cannot hold. The host allocates pages lazily and would kill the process later."""
    free = free_memory(device) if free is None else free
    if pool_bytes + drafter_bytes > free:
        more = f" and the drafter {megabytes(drafter_bytes)}" if drafter_bytes else ""
        raise OutOfMemoryError(
            f"memory: the KV cache needs {megabytes(pool_bytes)}{more}, {_there_is(device, free)}; lower --num-blocks or --kv-memory"
        )


def check_weights(device: str, nbytes: int, free: int | None = None) -> None:
    """OutOfMemoryError for weights that the device cannot hold, or that leave no room to run on the host. Before they are loaded."""
    free, run = free_memory(device) if free is None else free, run_bytes(device)
    if nbytes + run > free:
        more = f" and running the model {megabytes(run)}" if run else ""
        raise OutOfMemoryError(
            f"memory: the weights need {megabytes(nbytes)}{more}, {_there_is(device, free)}; use a smaller model, "
            "--quantization q8_0 or q4_k_m, or raise the limit"
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
