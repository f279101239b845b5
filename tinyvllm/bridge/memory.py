"""Host access to the memory of realized tensors, without a graph: writing, reading, and looking on while kernels run."""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
from tinygrad import Tensor, UOp
from tinygrad.device import Buffer
from tinygrad.dtype import _to_np_dtype

from tinyvllm.backends.cuda.copies import Arrival
from tinyvllm.backends.cuda.driver import copies_of
from tinyvllm.backends.metal.queue import Delivery, queue_of

_MOST_PINNED = 1 << 20  # bytes; larger downloads are no part of serving, and would keep as much host memory from everybody else


def buffer_of(u: UOp) -> Buffer:
    """The allocated buffer of a tensor's `uop`, which must lie on one device."""
    buffer = u.buffer
    assert isinstance(buffer, Buffer), f"launch: one device's buffer expected, got {buffer}"
    return buffer.ensure_allocated()


def upload(tensor: Tensor, array: np.ndarray, start: int = 0) -> None:
    """Overwrite elements start.. of a realized, contiguous tensor with `array` (same item size), keeping its buffer.

    A captured step replays on buffers, so its inputs are changed in place. On a device with host-visible memory this waits for the
    work in flight (about 2 us when idle) and then is a memcpy. On a CUDA or Metal device the copy stands behind what has been launched,
    and nothing waits.
    """
    buffer = buffer_of(tensor.uop)
    array = np.ascontiguousarray(array)
    if (start + array.size) > buffer.size or array.itemsize != buffer.dtype.itemsize:
        raise ValueError(f"upload: {array.size} items of {array.itemsize} bytes at {start} do not fit {buffer}")
    if (memory := _host_memory(buffer)) is not None:
        memory[start * array.itemsize : (start + array.size) * array.itemsize] = array.data.cast("B")
        return
    if buffer.device.split(":")[0] == "CUDA":
        copies_of(buffer.device).upload(buffer._buf.value + start * array.itemsize, array)
        return
    if buffer.device.split(":")[0] == "METAL":
        queue_of(buffer.device).upload(buffer._buf, start * array.itemsize, array)
        return
    if start == 0 and array.size == buffer.size:
        buffer.copyin(array.data.cast("B"))
        return
    view = buffer.view(array.size, buffer.dtype, start * buffer.dtype.itemsize).ensure_allocated()
    view.copyin(array.data.cast("B"))


def upload_parts(tensor: Tensor, mirror: np.ndarray, parts: list[tuple[int, int]]) -> None:
    """`upload` of elements start..stop of `mirror`, an array [n] of the tensor's size and layout, to their places, for each of `parts`.

    A device with memory of its own gets all from the first to the last of them in one copy: what is between must be as it is there.
    """
    buffer, size = buffer_of(tensor.uop), mirror.itemsize
    if (mirror.size, size) != (buffer.size, buffer.dtype.itemsize):
        raise ValueError(f"upload_parts: {mirror.size} items of {size} bytes are no mirror of {buffer}")
    if (memory := _host_memory(buffer)) is None:
        first = min(start for start, _ in parts)
        upload(tensor, mirror[first : max(stop for _, stop in parts)], first)
        return
    data = mirror.data.cast("B")
    for start, stop in parts:
        memory[start * size : stop * size] = data[start * size : stop * size]


def download(tensor: Tensor) -> np.ndarray:
    """The contents of a realized tensor as a new array, after waiting for the work that produces it."""
    shape, dtype, buffer = tuple(int(d) for d in tensor.shape), _to_np_dtype(tensor.dtype), buffer_of(tensor.uop)
    if (memory := _host_memory(buffer)) is not None:
        return np.frombuffer(memory, dtype).reshape(shape).copy()
    if buffer.device.split(":")[0] == "CUDA" and buffer.nbytes <= _MOST_PINNED:
        return read_async(tensor).get()
    array = np.empty(shape, dtype)
    buffer.copyout(array.data.cast("B"))
    return array


def _host_memory(buffer: Buffer) -> memoryview | None:
    """The bytes of a CPU buffer once the device is idle, None on other devices. tinygrad's own copies cost ten times as much."""
    return buffer.as_memoryview(force_zero_copy=True) if buffer.device.split(":")[0] == "CPU" and buffer.options is None else None


class Reading:
    """The contents of a tensor, on their way to the host or there already."""

    def __init__(self, arrival: Arrival | Delivery | None, array: np.ndarray):
        self._arrival, self._array = arrival, array

    def ready(self) -> bool:
        """Whether `get` would not have to wait."""
        return self._arrival is None or self._arrival.ready()

    def get(self) -> np.ndarray:
        """The contents, once they are there."""
        return self._array if self._arrival is None else self._arrival.get().view(self._array.dtype).reshape(self._array.shape)


def read_async(tensor: Tensor) -> Reading:
    """Start reading a realized, small tensor as it is when all that has been launched until now has run.

    On a CUDA or Metal device this only puts a copy behind the work in flight; what is launched or uploaded later does not change what
    comes. Other devices are waited for here.
    """
    buffer = buffer_of(tensor.uop)
    if buffer.device.split(":")[0] not in ("CUDA", "METAL"):
        return Reading(None, download(tensor))
    like = np.broadcast_to(np.empty((), _to_np_dtype(tensor.dtype)), tuple(int(d) for d in tensor.shape))
    if buffer.device.split(":")[0] == "METAL":
        return Reading(queue_of(buffer.device).read(buffer._buf, buffer.nbytes), like)
    return Reading(copies_of(buffer.device).read(buffer._buf.value, buffer.nbytes), like)


def peek(tensor: Tensor) -> np.ndarray:
    """The contents of a realized tensor as they are at this moment; on the CPU without waiting for the work in flight.

    A Metal device is waited for: though it shares the host's memory, it promises nothing of what it writes before a command buffer is done.
    """
    buffer = buffer_of(tensor.uop)
    if buffer.device.split(":")[0] != "CPU":
        return download(tensor)  # behind the work in flight: there is one stream
    shape, dtype = tuple(int(d) for d in tensor.shape), _to_np_dtype(tensor.dtype)
    assert dtype is not None
    memory = (ctypes.c_uint8 * (prod(shape) * tensor.dtype.itemsize)).from_address(buffer._buf.va_addr)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape).copy()
