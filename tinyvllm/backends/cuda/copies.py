"""Copies between the host and an NVIDIA GPU that are queued after the work in flight and wait for nothing else.

All copies go through pinned memory: from other memory the driver copies synchronously, after waiting for the device. Imports no tinygrad:
`driver` is an object with the driver's functions under their own names, with pointers as ctypes wants them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from tinyvllm.errors import KernelError
from tinyvllm.integers import round_up

SEGMENTS, SEGMENT_BYTES = 8, 2 << 20  # of the ring for uploads
# Threads that fill segments of a large upload: one carries 5 to 20 GB/s out of the page cache, the bus 25 to 55. Half of the ring, so that
# the other half is on its way meanwhile.
MAX_THREADS = SEGMENTS // 2
_MIN_BLOCK = 4096  # bytes of a pinned block for reading
_PORTABLE_MAPPED, _NO_TIMING, _NOT_READY = 1 | 2, 2, 600  # of cuMemHostAlloc; CU_EVENT_DISABLE_TIMING; CUDA_ERROR_NOT_READY
_POLL_SECONDS = 2e-5  # between two queries of an event
_ALIGNMENT = 64


class Copies:
    """Uploads to and reads from one GPU, in its default stream. Any thread may call."""

    def __init__(self, driver: Any, context: Any, threads: int | None = None):
        """`threads` fill the ring in large uploads; without a number as many as this process has cores, at most MAX_THREADS."""
        self._driver, self._context, self._lock = driver, context, threading.Lock()
        self._threads = min(MAX_THREADS, (os.cpu_count() or 1) if threads is None else threads)
        self._fillers: ThreadPoolExecutor | None = None
        self._ring: list[tuple[int, Any]] = []  # of each segment: its address, and the event after its last copy
        self._segment = self._filled = 0
        self._blocks: dict[int, list[tuple[int, Any]]] = {}  # by size: free pinned blocks for reading, each with its event
        self._marks: list[Any] = []  # free events

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device's memory at `address`. On return `array` may change.

        Later launches see the new contents, earlier ones do not. Waits only if 16 MiB of uploads are in flight. Several threads read what
        is larger than a segment.
        """
        source, size = array.ctypes.data, array.nbytes
        with self._lock:
            self._enter()
            if size > SEGMENT_BYTES and self._threads > 1:
                self._upload_by_threads(address, source, size)
                return
            done = 0
            while done < size:
                place, space = self._space()
                count = min(space, size - done)
                ctypes.memmove(place, source + done, count)
                self._do("an upload", self._driver.cuMemcpyHtoDAsync_v2(address + done, place, count, None))
                self._filled += round_up(count, _ALIGNMENT)
                done += count

    def _upload_by_threads(self, address: int, source: int, size: int) -> None:
        """A segment after the other: threads fill the next ones while this one queues the copy of the first that is full."""
        if self._fillers is None:
            self._fillers = ThreadPoolExecutor(self._threads, thread_name_prefix="tinyvllm-upload")
        self._open_ring()
        filling: deque[tuple[Future[Any], int, int, int]] = (
            deque()
        )  # each with its segment, and where its bytes begin and how many they are
        try:
            if self._filled:
                self._next_segment()
            for start in range(0, size, SEGMENT_BYTES):
                if len(filling) == self._threads:
                    self._send(address, *filling.popleft())
                count = min(SEGMENT_BYTES, size - start)
                fill = self._fillers.submit(ctypes.memmove, self._ring[self._segment][0], source + start, count)
                filling.append((fill, self._segment, start, count))
                self._turn()
            while filling:
                self._send(address, *filling.popleft())
        finally:  # also after an error of the driver: the array may be freed once this returns
            wait([fill for fill, _, _, _ in filling])

    def _send(self, address: int, fill: Future[Any], segment: int, start: int, count: int) -> None:
        """Queue the copy of a segment once it is full, and its event."""
        fill.result()
        place, event = self._ring[segment]
        self._do("an upload", self._driver.cuMemcpyHtoDAsync_v2(address + start, place, count, None))
        self._do("an upload", self._driver.cuEventRecord(event, None))

    def _open_ring(self) -> None:
        if not self._ring:
            memory = self._pinned(SEGMENTS * SEGMENT_BYTES)
            self._ring = [(memory + i * SEGMENT_BYTES, self._event()) for i in range(SEGMENTS)]

    def _next_segment(self) -> None:
        """Leave a segment whose copies are queued."""
        self._do("an upload", self._driver.cuEventRecord(self._ring[self._segment][1], None))
        self._turn()

    def _turn(self) -> None:
        """Go to the next segment, which is free once its last copy has been made."""
        self._segment, self._filled = (self._segment + 1) % SEGMENTS, 0
        self._do("waiting for an upload", self._driver.cuEventSynchronize(self._ring[self._segment][1]))

    def _space(self) -> tuple[int, int]:
        """The address for the next bytes of an upload, and how many fit there."""
        self._open_ring()
        if self._filled >= SEGMENT_BYTES:
            self._next_segment()
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
