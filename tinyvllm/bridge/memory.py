"""Host access to the memory of realized tensors, without a graph: writing, reading, and reading while kernels run."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp
from tinygrad.device import Buffer
from tinygrad.dtype import _to_np_dtype

from tinyvllm.bridge.hooks import Transfer, hooks_of
from tinyvllm.bridge.waiting import synchronize
from tinyvllm.placement import Placement


def buffer_of(u: UOp) -> Buffer:
    """The allocated buffer of a tensor's `uop`, which must be on one device."""
    buffer = u.buffer
    assert isinstance(buffer, Buffer), f"launch: one device's buffer expected, got {buffer}"
    return buffer.ensure_allocated()


def opaque_memory(tensor: Tensor) -> Any:
    """tinygrad's own object for the memory of a realized tensor, of the device's kind."""
    return buffer_of(tensor.uop)._buf


def host_address(tensor: Tensor) -> int:
    """Where a realized tensor of the CPU device is in this process's memory."""
    return int(buffer_of(tensor.uop)._buf.va_addr)


def upload(tensor: Tensor, array: np.ndarray, start: int = 0) -> None:
    """Overwrite elements start.. of a realized, contiguous tensor with `array` (same item size), keeping its buffer.

    A captured step replays on buffers, so its inputs are changed in place. On a device with host-visible memory this waits for the
    work in flight (about 2 us when idle) and then is a memcpy. With a backend's copies (CUDA, Metal) the copy is queued after all earlier
    launches, and nothing waits.
    """
    buffer = buffer_of(tensor.uop)
    array = np.ascontiguousarray(array)
    if (start + array.size) > buffer.size or array.itemsize != buffer.dtype.itemsize:
        raise ValueError(f"upload: {array.size} items of {array.itemsize} bytes at {start} do not fit {buffer}")
    if (memory := _host_memory(buffer)) is not None:
        memory[start * array.itemsize : (start + array.size) * array.itemsize] = array.data.cast("B")
        return
    if (copies := hooks_of(buffer.device).copies) is not None:
        copies.upload(buffer._buf, start * array.itemsize, array)
        return
    if start == 0 and array.size == buffer.size:
        buffer.copyin(array.data.cast("B"))
        return
    view = buffer.view(array.size, buffer.dtype, start * buffer.dtype.itemsize).ensure_allocated()
    view.copyin(array.data.cast("B"))


def upload_parts(tensor: Tensor, mirror: np.ndarray, parts: list[tuple[int, int]]) -> None:
    """`upload` of elements start..stop of `mirror` to the same places, for each (start, stop) of `parts`.

    `mirror` [n] has the tensor's size and layout. A device with memory of its own gets all from the first to the last part in one copy:
    the elements in between must be as they are on the device.
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
    copies = hooks_of(buffer.device).copies
    if copies is not None and buffer.nbytes <= copies.max_read:
        return read_async(tensor).get()
    array = np.empty(shape, dtype)
    buffer.copyout(array.data.cast("B"))
    return array


def _host_memory(buffer: Buffer) -> memoryview | None:
    """The bytes of a CPU buffer once the device is idle, None on other devices. tinygrad's own copies cost ten times as much."""
    if not Placement(buffer.device).is_cpu or buffer.options is not None:
        return None
    synchronize(buffer.device)
    return memoryview((ctypes.c_uint8 * buffer.nbytes).from_address(buffer._buf.va_addr)).cast("B")


def resident(tensor: Tensor) -> np.ndarray | None:
    """The memory itself of a realized tensor that only captured steps read and write; None on other devices than the CPU.

    There a captured step has run when its call returns, so nothing waits: `upload` and `download` take 10 to 20 us between two steps.
    """
    buffer = buffer_of(tensor.uop)
    if not Placement(buffer.device).is_cpu:
        return None
    dtype = _to_np_dtype(tensor.dtype)
    assert dtype is not None
    memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer._buf.va_addr)
    return np.frombuffer(memory, dtype).reshape(tuple(int(d) for d in tensor.shape))


class Reading:
    """The contents of a tensor, on their way to the host or already there."""

    def __init__(self, transfer: Transfer | None, array: np.ndarray):
        self._transfer, self._array = transfer, array

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._transfer is None or self._transfer.ready()

    def get(self) -> np.ndarray:
        """The contents; waits for them."""
        return self._array if self._transfer is None else self._transfer.get().view(self._array.dtype).reshape(self._array.shape)


def read_async(tensor: Tensor) -> Reading:
    """Start reading a small tensor that a captured step writes, as it is once everything launched until now has run.

    With a backend's copies (CUDA, Metal) this only queues a copy; later launches and uploads do not change the result. On other devices
    this call waits.
    """
    buffer = buffer_of(tensor.uop)
    copies = hooks_of(buffer.device).copies
    if copies is None:
        return Reading(None, peek(tensor))
    like = np.broadcast_to(np.empty((), _to_np_dtype(tensor.dtype)), tuple(int(d) for d in tensor.shape))
    return Reading(copies.read(buffer._buf, buffer.nbytes), like)


def peek(tensor: Tensor) -> np.ndarray:
    """The contents of a realized tensor at this moment; on the CPU without waiting for the work in flight.

    Metal is waited for: it shares the host's memory, but guarantees nothing about its writes before a command buffer has completed.
    """
    memory = resident(tensor)
    return download(tensor) if memory is None else memory.copy()  # else it is queued after the work in flight: there is one stream
