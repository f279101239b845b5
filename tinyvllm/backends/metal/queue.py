"""A Metal device's one queue: what of it is in flight, and copies that keep their place behind it and wait for nothing else.

Memory is shared, so a copy could be the host's own as soon as the device is idle. While it is not, whatever is to be written goes through a
block of memory and a blit that stands behind the work in flight, and what is to be read likewise: the host can be a step behind. Order
between command buffers is Metal's own, from the buffers that they name (hazard tracking). What the GPU has written may be read once its
command buffer is done; nothing is promised before (Metal Programming Guide, "Resource storage modes").
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from typing import Any

import numpy as np
from tinygrad import Device, helpers

from tinyvllm.errors import KernelError

_SMALLEST, _LARGEST = 4096, 1 << 20  # bytes of a block that copies go through; what is larger waits for the device instead
_MOST_BLOCKS = 16  # of one size, for uploads on their way
_DONE = 4  # MTLCommandBufferStatusCompleted; 5 is Error
_PAUSE = 2e-5  # seconds between two looks at a command buffer


class Block:
    """Memory that host and device see, of a size, and the command buffer of its last copy."""

    def __init__(self, buffer: Any, size: int):
        self.buffer, self.size, self.address, self.work = buffer, size, buffer.contents(), None


class Queue:
    """Copies to and from one Metal device, and what is in flight there. Any thread may call."""

    def __init__(self, device: Any):
        self._device, self._lock = device, threading.RLock()
        self._uploads: dict[int, list[Block]] = {}  # by size, the one that was used longest ago first
        self._free: dict[int, list[Block]] = {}  # by size: blocks for reading that nobody holds

    def command_buffer(self, label: str) -> Any:
        """A fresh one, to be encoded and given to `commit`."""
        from tinygrad.runtime.ops_metal import to_ns_str

        made = self._device.mtl_queue.commandBuffer().retained()
        made.setLabel(to_ns_str(label))
        return made

    def commit(self, work: Any) -> None:
        """Put a command buffer behind everything in flight."""
        with self._lock:
            work.commit()
            self._device.mtl_buffers_in_flight.append(work)
            self._prune()

    def _prune(self) -> None:
        """Let go of command buffers that are done: tinygrad does so only where it waits for all. Where it profiles it wants to see them."""
        if helpers.PROFILE:
            return
        with self._lock:
            flying = self._device.mtl_buffers_in_flight
            while flying and flying[0].status() >= _DONE:
                self._check(flying.pop(0))

    def done(self, work: Any) -> bool:
        """Whether a command buffer has run. KernelError where it has failed, or one before it has."""
        if work.status() < _DONE:
            return False
        self.wait(work)
        return True

    def wait(self, work: Any) -> None:
        """Wait until this one command buffer has run. KernelError where it has failed, or one before it has: Metal goes on all the same."""
        work.waitUntilCompleted()
        self._prune()
        self._check(work)

    @staticmethod
    def _check(work: Any) -> None:
        from tinygrad.runtime.ops_metal import from_ns_str

        error = work.error()  # not ours to release: whoever asks twice must not be its end
        if error.value is not None:
            hint = "if a kernel is the cause, TINYVLLM_KERNELS=all=ref avoids it"
            raise KernelError(f"METAL: the work in flight failed: {from_ns_str(error.localizedDescription())}; {hint}")

    def idle(self) -> bool:
        """Whether nothing is in flight."""
        self._prune()
        return all(work.status() >= _DONE for work in self._device.mtl_buffers_in_flight)

    def wait_for_all(self) -> None:
        """Wait until nothing is in flight. KernelError where something has failed."""
        for work in list(self._device.mtl_buffers_in_flight):
            self.wait(work)
        self._device.synchronize()

    def settle(self) -> None:
        """Wait until nothing is in flight, whatever becomes of it: for finalizers."""
        for work in list(self._device.mtl_buffers_in_flight):
            work.waitUntilCompleted()

    def mark(self) -> Landing:
        """A mark behind everything in flight."""
        flying = self._device.mtl_buffers_in_flight
        return Landing(self, flying[-1] if flying else None)

    def upload(self, to: Any, start: int, array: np.ndarray) -> None:
        """Copy a contiguous array to `to` (tinygrad's MetalBuffer) from byte `start` on. On return `array` may change.

        What is launched later finds it there, what was launched before does not. Waits for the device only where the array is larger than
        1 MiB or no multiple of 4 bytes, which a blit wants.
        """
        start += to.offset
        with self._lock:
            if self.idle() or not _blits(start, array.nbytes):
                self.wait_for_all()
                ctypes.memmove(to.buf.contents() + start, array.ctypes.data, array.nbytes)
                return
            block = self._block_for_upload(_room(array.nbytes))
            ctypes.memmove(block.address, array.ctypes.data, array.nbytes)
            self._blit(block, (block.buffer, 0), (to.buf, start), array.nbytes)

    def _block_for_upload(self, size: int) -> Block:
        blocks = self._uploads.setdefault(size, [])
        if not blocks or (len(blocks) < _MOST_BLOCKS and not self.done(blocks[0].work)):
            block = self._new_block(size)
        else:
            block = blocks.pop(0)
            self.wait(block.work)
        blocks.append(block)
        return block

    def read(self, source: Any, size: int) -> Delivery:
        """Start copying the first `size` bytes of `source` (a MetalBuffer), as they are when all that was launched before has run.

        Where nothing is in flight they are there on return; so, too, if they are more than 1 MiB or no multiple of 4, after a wait.
        """
        with self._lock:
            if self.idle() or not _blits(source.offset, size):
                self.wait_for_all()
                return Delivery(self, None, size, ctypes.string_at(source.buf.contents() + source.offset, size))
            free = self._free.setdefault(_room(size), [])
            block = free.pop() if free else self._new_block(_room(size))
            self._blit(block, (source.buf, source.offset), (block.buffer, 0), size)
        return Delivery(self, block, size)

    def give_back(self, block: Block) -> None:
        """A block is free. A copy may still be on its way into it: the next one stands behind that."""
        self._free[block.size].append(block)  # without the lock: Python may collect a Delivery while this very thread holds it

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
            raise KernelError(f"METAL: no {size} bytes left for a copy; give the KV cache less with --kv-memory")
        return Block(buffer, size)


def _room(size: int) -> int:
    return 1 << max(size - 1, _SMALLEST - 1).bit_length()


def _blits(start: int, size: int) -> bool:
    return start % 4 == 0 and size % 4 == 0 and size <= _LARGEST


class Delivery:
    """Bytes on their way from the device, or there already."""

    def __init__(self, queue: Queue, block: Block | None, size: int, data: bytes | None = None):
        self._queue, self._block, self._size = queue, block, size
        self._data = None if data is None else np.frombuffer(bytearray(data), np.uint8)

    def ready(self) -> bool:
        """Whether `get` would not have to wait."""
        return self._block is None or self._queue.done(self._block.work)

    def get(self) -> np.ndarray:
        """The bytes, uint8 [size], once they are there."""
        if self._block is not None:
            self._queue.wait(self._block.work)
            self._data = np.frombuffer(bytearray(ctypes.string_at(self._block.address, self._size)), np.uint8)
            self._let_go()
        assert self._data is not None
        return self._data

    def _let_go(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            self._queue.give_back(block)

    def __del__(self) -> None:
        self._let_go()


class Landing:
    """The end of what was in flight at some time."""

    def __init__(self, queue: Queue, work: Any):
        self._queue, self._work = queue, work

    def result(self, timeout: float) -> None:
        """Wait until that has run; TimeoutError where it takes more than `timeout` seconds."""
        end = time.perf_counter() + timeout
        while self._work is not None and not self._queue.done(self._work):
            if time.perf_counter() > end:
                raise TimeoutError
            time.sleep(_PAUSE)


@functools.cache
def queue_of(device: str) -> Queue:
    """The one of a Metal device."""
    return Queue(Device[device])


def metal_free_memory(device: str) -> int:
    """Bytes that a Metal device can take before it slows down, by the system's word."""
    opened: Any = Device[device]
    return max(0, opened.sysdevice.recommendedMaxWorkingSetSize() - opened.sysdevice.currentAllocatedSize())


def gpu_name(device: str) -> str:
    """A Metal device's GPU by the name of its chip: "Apple M2 Max"."""
    from tinygrad.runtime.ops_metal import from_ns_str

    opened: Any = Device[device]
    return from_ns_str(opened.sysdevice.name())


def gpu_family(device: str) -> str:
    """What family a Metal device's GPU is of: "Apple7" for M1, "Apple8" for M2, "Apple9" for M3 and M4, ..."""
    return str(Device[device].arch)
