"""A Metal device's one queue: the work in flight, and copies that are queued after it and wait for nothing else.

Memory is shared, so the host can copy by itself while the device is idle. Otherwise a write goes through a staging block and a blit that is
queued after the work in flight, and so does a read: the host can be one step late. Metal itself orders command buffers, by the buffers that
they name (hazard tracking). What the GPU writes may be read once its command buffer has completed; nothing is guaranteed before (Metal
Programming Guide, "Resource storage modes").
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import time
from typing import Any

import numpy as np

from tinyvllm.backends.metal.scratch import CountingScratch
from tinyvllm.bridge import ImportedPages, architecture, from_objc_string, metal_buffer_over, opened_device, profiling, to_objc_string
from tinyvllm.errors import KernelError

_MIN_BLOCK, _MAX_BLOCK = 4096, 1 << 20  # bytes of a staging block; larger copies wait for the device instead
_MAX_BLOCKS = 16  # of one size, for uploads in flight
_DONE = 4  # MTLCommandBufferStatusCompleted; 5 is Error
MAX_OFFSET = 0xFFFFFFFF  # a replay truncates an offset into a buffer to 32 bits
_POLL_SECONDS = 2e-5  # between two queries of a command buffer


class Block:
    """Staging memory that host and device share, and the command buffer of its last copy."""

    def __init__(self, buffer: Any, size: int):
        self.buffer, self.size, self.address, self.work = buffer, size, buffer.contents(), None


class Queue:
    """Copies to and from one Metal device, and its work in flight. Any thread may call."""

    max_read = 0  # downloads wait for the device: its memory is the host's

    def __init__(self, device: Any):
        self._device, self._lock = device, threading.RLock()
        self._uploads: dict[int, list[Block]] = {}  # by size, least recently used first
        self._blocks: list[Block] = []  # all: one that only a Delivery held would be released with it in a cycle of garbage
        self._free: dict[int, list[Block]] = {}  # by size: free blocks for reading
        self.scratch = CountingScratch()
        self.failures = 0  # of work in flight

    def command_buffer(self, label: str) -> Any:
        """A new one, to be encoded and passed to `commit`."""
        work = self._device.mtl_queue.commandBuffer().retained()
        work.setLabel(to_objc_string(label))
        return work

    def commit(self, work: Any) -> None:
        """Queue a command buffer after everything in flight."""
        with self._lock:
            work.commit()
            self._device.mtl_buffers_in_flight.append(work)
            self._prune()

    def _prune(self) -> None:
        """Release completed command buffers: tinygrad does so only when it waits for all. Its profiler needs them."""
        if profiling():
            return
        with self._lock:
            flying = self._device.mtl_buffers_in_flight
            while flying and flying[0].status() >= _DONE:
                self._check(flying.pop(0))

    def done(self, work: Any) -> bool:
        """Whether a command buffer has completed. KernelError if it or an earlier one has failed."""
        if work.status() < _DONE:
            return False
        self.wait(work)
        return True

    def wait(self, work: Any) -> None:
        """Wait until this command buffer has completed. KernelError if it or an earlier one has failed: Metal continues after failures."""
        work.waitUntilCompleted()
        self._prune()
        self._check(work)

    def _check(self, work: Any) -> None:
        """KernelError if a command buffer, which has completed, has failed, or a kernel has reported a fault."""
        error = work.error()  # the command buffer owns it: it must not be released here
        if error.value is not None:
            hint = "if a kernel is the cause, TINYVLLM_KERNELS=all=ref avoids it"
            message = f"METAL: the work in flight failed: {from_objc_string(error.localizedDescription())}; {hint}"
        elif (stem := self.scratch.faulty_stem()) is not None:
            hint = f"TINYVLLM_KERNELS={stem}=apple7_merge does not wait"
            message = f"METAL: {stem} gave up waiting for results of other threadgroups, which this GPU does not deliver; {hint}"
        else:
            return
        self._restart()
        raise KernelError(message)

    def _restart(self) -> None:
        """After a failure: wait for the rest of the work, whose results count no more, and set the counting scratch to zero."""
        with self._lock:
            self.failures += 1
            self.settle()
            self._device.mtl_buffers_in_flight.clear()
            self.scratch.clear()

    def idle(self) -> bool:
        """Whether nothing is in flight."""
        self._prune()
        return all(work.status() >= _DONE for work in self._device.mtl_buffers_in_flight)

    def wait_for_all(self) -> None:
        """Wait until nothing is in flight. KernelError if something has failed."""
        for work in list(self._device.mtl_buffers_in_flight):
            self.wait(work)
        self._device.synchronize()

    def settle(self) -> None:
        """Wait until nothing is in flight, without checking for failures: for finalizers."""
        for work in list(self._device.mtl_buffers_in_flight):
            work.waitUntilCompleted()

    def mark(self) -> Landing:
        """The end of everything in flight."""
        flying = self._device.mtl_buffers_in_flight
        return Landing(self, flying[-1] if flying else None)

    def upload(self, memory: Any, start: int, array: np.ndarray) -> None:
        """Copy a contiguous array to `memory` (tinygrad's MetalBuffer) from byte `start` on. On return `array` may change.

        Later launches see the new contents, earlier ones do not. Waits for the device only if the array is larger than 1 MiB or not a
        multiple of 4 bytes, which a blit requires.
        """
        start += memory.offset
        with self._lock:
            if self.idle() or not _blits(start, array.nbytes):
                self.wait_for_all()
                ctypes.memmove(memory.buf.contents() + start, array.ctypes.data, array.nbytes)
                return
            block = self._block_for_upload(_block_size(array.nbytes))
            ctypes.memmove(block.address, array.ctypes.data, array.nbytes)
            self._blit(block, (block.buffer, 0), (memory.buf, start), array.nbytes)

    def _block_for_upload(self, size: int) -> Block:
        blocks = self._uploads.setdefault(size, [])
        if not blocks or (len(blocks) < _MAX_BLOCKS and not self.done(blocks[0].work)):
            block = self._new_block(size)
        else:
            block = blocks.pop(0)
            self.wait(block.work)
        blocks.append(block)
        return block

    def read(self, memory: Any, size: int) -> Delivery:
        """Start copying the first `size` bytes of `memory` (a MetalBuffer), as they are once all earlier launches have run.

        They are there on return if nothing is in flight; also, after a wait, if they are more than 1 MiB or not a multiple of 4.
        """
        with self._lock:
            if self.idle() or not _blits(memory.offset, size):
                self.wait_for_all()
                return Delivery(self, None, size, ctypes.string_at(memory.buf.contents() + memory.offset, size))
            free = self._free.setdefault(_block_size(size), [])
            block = free.pop() if free else self._new_block(_block_size(size))
            self._blit(block, (memory.buf, memory.offset), (block.buffer, 0), size)
        return Delivery(self, block, size)

    def release(self, block: Block) -> None:
        """A block is free. A copy into it may still be in flight; the next one is queued after it."""
        self._free[block.size].append(block)  # without the lock: Python may collect a Delivery while this thread holds it

    def _blit(self, block: Block, source: tuple[Any, int], to: tuple[Any, int], size: int) -> None:
        work = self.command_buffer("copy")
        encoder = work.blitCommandEncoder().retained()
        encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(*source, *to, size)
        encoder.endEncoding()
        self.commit(work)
        block.work = work

    def _new_block(self, size: int) -> Block:
        buffer = self._device.sysdevice.newBufferWithLength_options(size, 0)
        if buffer.value is None:
            raise KernelError(f"METAL: no {size} bytes free for a copy; reduce the KV cache with --kv-memory")
        block = Block(buffer, size)
        self._blocks.append(block)
        return block


def _block_size(size: int) -> int:
    return 1 << max(size - 1, _MIN_BLOCK - 1).bit_length()


def _blits(start: int, size: int) -> bool:
    return start % 4 == 0 and size % 4 == 0 and size <= _MAX_BLOCK


class Delivery:
    """Bytes on their way from the device to the host, or already there."""

    def __init__(self, queue: Queue, block: Block | None, size: int, data: bytes | None = None):
        self._queue, self._block, self._size = queue, block, size
        self._data = None if data is None else np.frombuffer(bytearray(data), np.uint8)
        self._failures = queue.failures

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._block is None or self._queue.done(self._block.work)

    def get(self) -> np.ndarray:
        """The bytes, uint8 [size]; waits for them. KernelError if work in flight has failed since the call of `read`."""
        if self._block is not None:
            self._queue.wait(self._block.work)
            if self._queue.failures != self._failures:
                raise KernelError("METAL: a copy was in flight when earlier work failed, and may hold what that has left")
            self._data = np.frombuffer(bytearray(ctypes.string_at(self._block.address, self._size)), np.uint8)
            self._release_block()
        assert self._data is not None
        return self._data

    def _release_block(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            self._queue.release(block)

    def __del__(self) -> None:
        self._release_block()


class Landing:
    """The end of what was in flight at some time."""

    def __init__(self, queue: Queue, work: Any):
        self._queue, self._work = queue, work

    def result(self, timeout: float) -> None:
        """Wait until that has completed; TimeoutError if it takes more than `timeout` seconds."""
        end = time.perf_counter() + timeout
        while self._work is not None and not self._queue.done(self._work):
            if time.perf_counter() > end:
                raise TimeoutError
            time.sleep(_POLL_SECONDS)


@functools.cache
def queue_of(device: str) -> Queue:
    """The queue of a Metal device."""
    return Queue(opened_device(device))


def metal_free_memory(device: str) -> int:
    """Bytes that a Metal device can use before it slows down, according to the system."""
    opened = opened_device(device)
    return max(0, int(opened.sysdevice.recommendedMaxWorkingSetSize()) - int(opened.sysdevice.currentAllocatedSize()))


def gpu_name(device: str) -> str:
    """A Metal device's GPU by the name of its chip: "Apple M2 Max"."""
    return from_objc_string(opened_device(device).sysdevice.name())


def gpu_family(device: str) -> str:
    """The family of a Metal device's GPU: "Apple7" for M1, "Apple8" for M2, "Apple9" for M3 and M4, ..."""
    return architecture(device)


def max_import(device: str) -> int:
    """Bytes of host pages that one buffer may cover: what a buffer may be, whole pages, with offsets of 32 bits."""
    limit = min(MAX_OFFSET + 1, int(opened_device(device).sysdevice.maxBufferLength()))
    return limit // mmap.PAGESIZE * mmap.PAGESIZE


def import_pages(device: str, address: int, nbytes: int) -> ImportedPages | None:
    """Whole host pages as a Metal buffer, without a copy; None if it is longer than a buffer may be."""
    memory = metal_buffer_over(device, address, nbytes)
    return None if memory is None else ImportedPages(memory, memory.buf.value, queue_of(device).settle)
