"""Copies between the host and an NVIDIA GPU that are queued after the work in flight and wait for nothing else.

All copies go through pinned memory: from other memory the driver copies synchronously, after waiting for the device. Imports no tinygrad:
`driver` is an object with the driver's functions under their own names, with pointers as ctypes wants them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np

from tinyvllm.errors import KernelError
from tinyvllm.integers import round_up

SEGMENTS, SEGMENT_BYTES = 4, 4 << 20  # of the ring for uploads
_MIN_BLOCK = 4096  # bytes of a pinned block for reading
_PORTABLE_MAPPED, _NO_TIMING, _NOT_READY = 1 | 2, 2, 600  # of cuMemHostAlloc; CU_EVENT_DISABLE_TIMING; CUDA_ERROR_NOT_READY
_POLL_SECONDS = 2e-5  # between two queries of an event
_ALIGNMENT = 64


class Copies:
    """Uploads to and reads from one GPU, in its default stream. Any thread may call."""

    def __init__(self, driver: Any, context: Any):
        self._driver, self._context, self._lock = driver, context, threading.Lock()
        self._ring: list[tuple[int, Any]] = []  # of each segment: its address, and the event after its last copy
        self._segment = self._filled = 0
        self._blocks: dict[int, list[tuple[int, Any]]] = {}  # by size: free pinned blocks for reading, each with its event
        self._marks: list[Any] = []  # free events

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device's memory at `address`. On return `array` may change.

        Later launches see the new contents, earlier ones do not. Waits only if 16 MiB of uploads are in flight.
        """
        source, size = array.ctypes.data, array.nbytes
        with self._lock:
            self._enter()
            done = 0
            while done < size:
                place, space = self._space()
                count = min(space, size - done)
                ctypes.memmove(place, source + done, count)
                self._do("an upload", self._driver.cuMemcpyHtoDAsync_v2(address + done, place, count, None))
                self._filled += round_up(count, _ALIGNMENT)
                done += count

    def _space(self) -> tuple[int, int]:
        """The address for the next bytes of an upload, and how many fit there."""
        if not self._ring:
            memory = self._pinned(SEGMENTS * SEGMENT_BYTES)
            self._ring = [(memory + i * SEGMENT_BYTES, self._event()) for i in range(SEGMENTS)]
        if self._filled >= SEGMENT_BYTES:
            self._do("an upload", self._driver.cuEventRecord(self._ring[self._segment][1], None))
            self._segment, self._filled = (self._segment + 1) % SEGMENTS, 0
            self._do("waiting for an upload", self._driver.cuEventSynchronize(self._ring[self._segment][1]))
        return self._ring[self._segment][0] + self._filled, SEGMENT_BYTES - self._filled

    def read(self, address: int, size: int) -> Arrival:
        """Start copying `size` bytes at `address` on the device, as they are once all earlier launches have run."""
        capacity = 1 << max(size - 1, _MIN_BLOCK - 1).bit_length()
        with self._lock:
            self._enter()
            free = self._blocks.setdefault(capacity, [])
            place, event = free.pop() if free else (self._pinned(capacity), self._event())
            self._do("reading", self._driver.cuMemcpyDtoHAsync_v2(place, address, size, None))
            self._do("reading", self._driver.cuEventRecord(event, None))
        return Arrival(self, place, event, size, capacity)

    def mark(self) -> Mark:
        """The end of everything that has been launched."""
        with self._lock:
            self._enter()
            event = self._marks.pop() if self._marks else self._event()
            self._do("a mark", self._driver.cuEventRecord(event, None))
        return Mark(self, event)

    def has_passed(self, event: Any) -> bool:
        """Whether the device has passed an event."""
        self._enter()
        status = self._driver.cuEventQuery(event)
        if status != _NOT_READY:
            self._do("the work in flight", status)
        return bool(status != _NOT_READY)

    def await_event(self, event: Any) -> None:
        """Wait until the device has passed an event."""
        self._enter()
        self._do("the work in flight", self._driver.cuEventSynchronize(event))

    def release(self, place: int, event: Any, capacity: int) -> None:
        """A block is free. A copy into it may still be in flight; the next one follows it in the stream."""
        self._blocks[capacity].append((place, event))  # without the lock: Python may collect an Arrival while this thread holds it

    def drop_mark(self, event: Any) -> None:
        """An event may be recorded again."""
        self._marks.append(event)

    def _enter(self) -> None:
        self._do("the device", self._driver.cuCtxSetCurrent(self._context))

    def _pinned(self, size: int) -> int:
        memory = ctypes.c_void_p()
        self._do(f"pinning {size} bytes of host memory", self._driver.cuMemHostAlloc(ctypes.byref(memory), size, _PORTABLE_MAPPED))
        assert memory.value is not None
        return memory.value

    def _event(self) -> Any:
        event = self._driver.CUevent()
        self._do("an event", self._driver.cuEventCreate(ctypes.byref(event), _NO_TIMING))
        return event

    def _do(self, what: str, status: int) -> None:
        if status:
            text = ctypes.POINTER(ctypes.c_char)()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            reason = ctypes.string_at(text).decode() if text else "no reason given"
            hint = "if a kernel is the cause, TINYVLLM_KERNELS=all=ref avoids it"
            raise KernelError(f"CUDA: {what} failed with error {status}: {reason}; {hint}")


class Arrival:
    """Bytes on their way from the device to the host."""

    def __init__(self, copies: Copies, place: int, event: Any, size: int, capacity: int):
        self._copies, self._place, self._event, self._size, self._capacity = copies, place, event, size, capacity
        self._data: np.ndarray | None = None

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._data is not None or self._copies.has_passed(self._event)

    def get(self) -> np.ndarray:
        """The bytes, uint8 [size]; waits for them."""
        if self._data is None:
            self._copies.await_event(self._event)
            self._data = np.frombuffer(bytearray(ctypes.string_at(self._place, self._size)), np.uint8)
            self._copies.release(self._place, self._event, self._capacity)
        return self._data

    def __del__(self) -> None:
        if self._data is None:
            self._copies.release(self._place, self._event, self._capacity)


class Mark:
    """A point in the stream."""

    def __init__(self, copies: Copies, event: Any):
        self._copies, self._event = copies, event

    def result(self, timeout: float) -> None:
        """Wait until the device has passed it; TimeoutError if that takes more than `timeout` seconds."""
        end = time.perf_counter() + timeout
        while not self._copies.has_passed(self._event):
            if time.perf_counter() > end:
                raise TimeoutError
            time.sleep(_POLL_SECONDS)

    def __del__(self) -> None:
        self._copies.drop_mark(self._event)
