"""Tensors over existing memory, past the graph."""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from collections.abc import Callable, Iterator
from math import prod

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType, _from_np_dtype
from tinygrad.tensor import all_tensors
from tinygrad.uop.ops import buffers

from tinyvllm.bridge.hooks import hooks_of
from tinyvllm.bridge.memory import buffer_of
from tinyvllm.integers import round_up


def alias(tensor: Tensor) -> Tensor:
    """A second tensor over the memory of a realized one, which tinygrad takes for an independent one."""
    return _share(tensor, 0, tuple(int(d) for d in tensor.shape))


def spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """Tensors over parts (start, size) of a realized one's elements: the same memory, which tinygrad takes for independent tensors."""
    return [_share(tensor, start, (size,)) for start, size in places]


def byte_spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """uint8 tensors over bytes (start, size) of a realized tensor's memory: to move contents of any type."""
    buffer = buffer_of(tensor.uop)
    return [_over(buffer, start, (size,), dtypes.uint8) for start, size in places]


def device_buffer(device: str, count: int, dtype: DType) -> Buffer:
    """An allocated buffer of `count` elements, past any tensor."""
    return Buffer(device, count, dtype, preallocate=True)


def _share(tensor: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    buffer = buffer_of(tensor.uop)
    return _over(buffer, start * buffer.dtype.itemsize, shape, tensor.dtype)


def _over(buffer: Buffer, start: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """A tensor over a buffer's memory from byte `start` on."""
    part = Tensor.empty(*shape, dtype=dtype, device=buffer.device)
    buffers[part.uop.base] = buffer.view(prod(shape), dtype, start).ensure_allocated()
    return part


@contextlib.contextmanager
def undoing_assignments() -> Iterator[None]:
    """If the block raises, tensors that had a buffer before have it again.

    `Tensor.assign` puts the assignment in the place of the tensor's buffer until it is scheduled. One that never ran would become a part
    of whatever reads the tensor next: a copy of blocks that failed, in every later replay of the forward pass.
    """
    before = {ref: tensor.uop for ref in list(all_tensors) if (tensor := ref()) is not None and tensor.uop.has_buffer_identity()}
    try:
        yield
    except BaseException:
        for ref, uop in before.items():
            if (tensor := ref()) is not None and tensor.uop is not uop:
                tensor.uop = uop
        raise


@functools.cache
def shared_zeros(device: str, count: int) -> Tensor:
    """int32 [count] of zeros, shared by all kernels that ask for this size: they count in it and leave zeros.

    Allocated past the graph: what is first computed in a captured step would be computed in every captured step.
    """
    tensor = Tensor.empty(count, dtype=dtypes.int32, device=device)
    buffer = Buffer(device, count, dtypes.int32).allocate()
    _fill_with_zeros(buffer)
    buffers[tensor.uop.base] = buffer
    _zeros.setdefault(device, weakref.WeakSet()).add(buffer)
    return tensor


_zeros: dict[str, weakref.WeakSet[Buffer]] = {}  # of `shared_zeros`, by device


def restore_zeros(device: str) -> None:
    """Make what `shared_zeros` returned zeros again: a kernel that ended half-way has left its counts, and later ones would add to them.

    Takes its place in the device's queue. Raises what the device raises if it is broken for good.
    """
    for buffer in _zeros.get(device, ()):
        _fill_with_zeros(buffer)


def _fill_with_zeros(buffer: Buffer) -> None:
    buffer.copyin(memoryview(bytearray(buffer.nbytes)))


def mapped(array: np.ndarray, device: str, dtype: DType | None = None, alignment: int = 16) -> Tensor:
    """A realized tensor of `array`'s shape on `device` with its contents, which must not change any more.

    If the backend imports host pages (Metal), the tensor is the array's own memory and keeps the array alive, provided the array is
    contiguous, views mapped pages (of a file or anonymous) and starts at a multiple of `alignment` bytes, which vector loads need.
    Otherwise it is a copy. `dtype`, of the same size, names a type that numpy lacks.
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
    """The whole pages under an array as a device buffer; None if they are not mapped, or the device cannot import them."""
    name = Device.canonicalize(device)
    import_pages = hooks_of(name).import_pages
    fits = array.flags.c_contiguous and array.nbytes > 0 and array.ctypes.data % alignment == 0
    if import_pages is None or not fits or not _is_mapped(array):
        return None
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = round_up(array.ctypes.data + array.nbytes - start, mmap.PAGESIZE)
    imported = import_pages(start, size)
    if imported is None:
        return None
    # external_ptr: tinygrad neither counts this memory nor reuses it
    pages = Buffer(name, size, dtypes.uint8, imported.memory, BufferSpec(external_ptr=imported.pointer))
    weakref.finalize(pages, _release, imported.settle, array).atexit = False
    return pages


def _is_mapped(array: np.ndarray) -> bool:
    """Whether an array is a view of mapped pages."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def _release(settle: Callable[[], None], array: np.ndarray) -> None:
    """Wait for kernels that may still read the array, whose last reference is this argument."""
    settle()
