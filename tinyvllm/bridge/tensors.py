"""Tensors that are put over memory, past the graph."""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType, _from_np_dtype
from tinygrad.uop.ops import buffers

from tinyvllm.backends.metal.queue import queue_of
from tinyvllm.bridge.memory import buffer_of


def alias(tensor: Tensor) -> Tensor:
    """A second tensor over the memory of a realized one, which tinygrad takes for another."""
    return _share(tensor, 0, tuple(int(d) for d in tensor.shape))


def spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """Tensors over parts (start, size) of a realized one's elements: the same memory, which tinygrad takes for others."""
    return [_share(tensor, start, (size,)) for start, size in places]


def byte_spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """uint8 tensors over bytes (start, size) of a realized tensor's memory: to move contents whose type does not matter."""
    buffer = buffer_of(tensor.uop)
    return [_over(buffer, start, (size,), dtypes.uint8) for start, size in places]


def _share(tensor: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    buffer = buffer_of(tensor.uop)
    return _over(buffer, start * buffer.dtype.itemsize, shape, tensor.dtype)


def _over(buffer: Buffer, start: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """A tensor over a buffer's memory from byte `start` on."""
    part = Tensor.empty(*shape, dtype=dtype, device=buffer.device)
    buffers[part.uop.base] = buffer.view(prod(shape), dtype, start).ensure_allocated()
    return part


@functools.cache
def shared_zeros(device: str, count: int) -> Tensor:
    """int32 [count] of zeros, one for all who ask for as many: for kernels that count in it and leave it as they found it.

    Made past the graph: what is first computed in a captured step would be computed in each of them.
    """
    tensor = Tensor.empty(count, dtype=dtypes.int32, device=device)
    buffer = Buffer(device, count, dtypes.int32).allocate()
    buffer.copyin(memoryview(bytearray(4 * count)))
    buffers[tensor.uop.base] = buffer
    return tensor


def mapped(array: np.ndarray, device: str, dtype: DType | None = None, alignment: int = 16) -> Tensor:
    """A realized tensor of `array`'s shape on `device` with its contents, which nobody may change any more.

    On a Metal device it is the array's own memory, and the array lives as long: if it is contiguous, looks into mapped pages (a file, or
    memory of its own) and begins at a multiple of `alignment` bytes, which vector loads want. Otherwise, and on other devices, it is a
    copy. `dtype` where numpy has none of the name, of the same size.
    """
    dtype = dtype or _from_np_dtype(array.dtype)
    if dtype.itemsize != array.itemsize:
        raise ValueError(f"mapped: {dtype} is of another size than {array.dtype}")
    pages = _pages_under(array, device, alignment)
    if pages is not None:
        return _over(pages, array.ctypes.data % mmap.PAGESIZE, array.shape, dtype)
    tensor = Tensor.empty(*array.shape, dtype=dtype, device=device)
    buffer_of(tensor.uop).copyin(np.ascontiguousarray(array).data.cast("B"))
    return tensor


def _pages_under(array: np.ndarray, device: str, alignment: int) -> Buffer | None:
    """The whole pages that an array lies in, as a Metal buffer; None where they are not mapped, or Metal refuses."""
    name = Device.canonicalize(device)
    fits = array.flags.c_contiguous and array.nbytes > 0 and array.ctypes.data % alignment == 0
    if name.split(":")[0] != "METAL" or not fits or not _is_mapped(array):
        return None
    from tinygrad.runtime import ops_metal
    from tinygrad.runtime.autogen import metal
    from tinygrad.runtime.support import objc

    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    types = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    make = objc.msg("newBufferWithBytesNoCopy:length:options:deallocator:", metal.MTLBuffer, types, retain=True)
    opened: Any = Device[name]
    made = make(opened.sysdevice, start, size, metal.MTLResourceStorageModeShared, None)
    if made.value is None:  # longer than a buffer may be
        return None
    # external_ptr: tinygrad neither counts this memory nor lends it to others
    pages = Buffer(name, size, dtypes.uint8, ops_metal.MetalBuffer(made, size), BufferSpec(external_ptr=made.value))
    weakref.finalize(pages, _let_go, queue_of(name).settle, array).atexit = False
    return pages


def _is_mapped(array: np.ndarray) -> bool:
    """Whether an array looks into pages that are mapped for it and its neighbours."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def _let_go(settle: Callable[[], None], array: np.ndarray) -> None:
    """Wait for what may still read the array, which goes with the last reference to it: this one."""
    settle()
