"""Tensors over existing memory, past the graph."""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from collections.abc import Callable, Iterator
from math import prod

import numpy as np
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType, _from_np_dtype
from tinygrad.tensor import all_tensors
from tinygrad.uop.ops import buffers

from tinyvllm.bridge.constant_shapes import keep_constant_shapes
from tinyvllm.bridge.hooks import hooks_of
from tinyvllm.bridge.memory import buffer_of
from tinyvllm.bridge.names import define_process_tensor, name_process_tensor
from tinyvllm.bridge.patterns import interpret_first
from tinyvllm.integers import round_up

keep_constant_shapes()
interpret_first()


def empty(shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
    """Tensor.empty without the name of the caller, for which tinygrad looks through the frames."""
    return Tensor(UOp.empty(shape, dtype, device))


def alias(tensor: Tensor, start: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
    """A second tensor over the memory of a realized one, which tinygrad takes for an independent one; of another shape from element `start`
    on, if that is given.
    """
    return _share(tensor, start, tuple(int(d) for d in tensor.shape) if shape is None else shape)


def spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """Tensors over parts (start, size) of a realized one's elements: the same memory, which tinygrad takes for independent tensors."""
    return [_share(tensor, start, (size,)) for start, size in places]


def byte_spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """uint8 tensors over bytes (start, size) of a realized tensor's memory: to move contents of any type."""
    buffer = buffer_of(tensor.uop)
    return [over(buffer, start, (size,), dtypes.uint8) for start, size in places]


def device_buffer(device: str, count: int, dtype: DType) -> Buffer:
    """An allocated buffer of `count` elements, past any tensor."""
    return Buffer(device, count, dtype, preallocate=True)


def _share(tensor: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    buffer = buffer_of(tensor.uop)
    return over(buffer, start * buffer.dtype.itemsize, shape, tensor.dtype)


def over(buffer: Buffer, start: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """A tensor over a buffer's memory from byte `start` on, which tinygrad takes for an independent one."""
    part = empty(shape, dtype, buffer.device)
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
    return name_process_tensor(tensor, "zeros", device, count)


define_process_tensor("zeros", shared_zeros)
_zeros: dict[str, weakref.WeakSet[Buffer]] = {}  # of `shared_zeros`, by device


def restore_zeros(device: str) -> None:
    """Make what `shared_zeros` returned zeros again: a kernel that ended half-way has left its counts, and later ones would add to them.

    Takes its place in the device's queue. Raises what the device raises if it is broken for good.
    """
    for buffer in _zeros.get(device, ()):
        _fill_with_zeros(buffer)


def forget_zeros(device: str) -> None:
    """Drop what `shared_zeros` returned for the devices of this name, which no longer exist: later callers get new zeros."""
    shared_zeros.cache_clear()
    for name in [name for name in _zeros if name.startswith(device)]:
        del _zeros[name]


def _fill_with_zeros(buffer: Buffer) -> None:
    buffer.copyin(memoryview(bytearray(buffer.nbytes)))


def copied(array: np.ndarray, device: str, dtype: DType | None = None) -> Tensor:
    """A realized tensor with the contents of `array`, without a kernel: tinygrad compiles one for each size of what it fills or computes.

    `dtype`, of the same size, names a type that numpy lacks.
    """
    tensor = empty(tuple(array.shape), dtype or _from_np_dtype(array.dtype), device)
    buffer_of(tensor.uop).copyin(np.ascontiguousarray(array).data.cast("B"))
    return tensor


def mapped(array: np.ndarray, device: str, dtype: DType | None = None, alignment: int = 16) -> Tensor:
    """A realized tensor of `array`'s shape on `device` with its contents, which must not change any more.

    If the backend imports host pages (Metal), the tensor is the array's own memory and keeps its mapping alive, provided the array is
    contiguous, views mapped pages (of a file or anonymous) and starts at a multiple of `alignment` bytes, which vector loads need.
    Otherwise it is a copy. `dtype`, of the same size, names a type that numpy lacks.
    """
    dtype = dtype or _from_np_dtype(array.dtype)
    if dtype.itemsize != array.itemsize:
        raise ValueError(f"mapped: {dtype} is of another size than {array.dtype}")
    found = _imported(array, device) if array.nbytes > 0 and array.ctypes.data % alignment == 0 else None
    if found is not None:
        pages, start = found
        return over(pages, start, array.shape, dtype)
    return copied(array, device, dtype)


def over_host(address: int, device: str, array: np.ndarray, release: Callable[[], None]) -> Tensor:
    """uint8 [N] over the bytes of `array`, memory of the host that the device has at `address`; `release` is called once tinygrad has let
    go of it, and before the array is.
    """
    return over_address(address, array.nbytes, device, functools.partial(_release, release, array))


def over_address(address: int, nbytes: int, device: str, release: Callable[[], None]) -> Tensor:
    """uint8 [nbytes] over memory that the device has at `address`; `release` is called once tinygrad has let go of it."""
    buffer = Buffer(device, nbytes, dtypes.uint8, options=BufferSpec(external_ptr=address)).allocate(external_ptr=address)
    weakref.finalize(buffer, release).atexit = False
    return over(buffer, 0, (nbytes,), dtypes.uint8)


# Imported pieces of mappings, by device and address: one buffer serves all arrays of a piece, as a launch names each buffer that it uses.
_pieces: weakref.WeakValueDictionary[tuple[str, int], Buffer] = weakref.WeakValueDictionary()


def _imported(array: np.ndarray, device: str) -> tuple[Buffer, int] | None:
    """A device buffer over mapped pages, and where the array starts in it; None if it is not mapped, or the device cannot import it.

    A mapping, which is a file, is imported in pieces of `max_import` bytes from its start on. An array that crosses the border of two
    pieces gets a buffer over its own pages.
    """
    name = Device.canonicalize(device)
    base = _mapping_of(array)
    if hooks_of(name).import_pages is None or base is None or not array.flags.c_contiguous:
        return None
    address, end = array.ctypes.data, array.ctypes.data + array.nbytes
    whole, limit = np.frombuffer(base, np.uint8), hooks_of(name).max_import
    if limit > 0 and whole.ctypes.data % mmap.PAGESIZE == 0:
        start = whole.ctypes.data + (address - whole.ctypes.data) // limit * limit
        if end <= start + limit:
            piece = _import(name, start, min(limit, whole.ctypes.data + whole.nbytes - start), base)
            if piece is not None:
                return piece, address - start
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    own = _import(name, start, end - start, base)
    return None if own is None else (own, address - start)


def _import(name: str, start: int, nbytes: int, base: object) -> Buffer | None:
    """The whole pages from `start` on, at least `nbytes`, of the mapping `base`, which they keep mapped."""
    size, known = round_up(nbytes, mmap.PAGESIZE), _pieces.get((name, start))
    if known is not None and known.nbytes >= size:
        return known
    import_pages = hooks_of(name).import_pages
    imported = None if import_pages is None else import_pages(start, size)
    if imported is None:
        return None
    # external_ptr: tinygrad neither counts this memory nor reuses it
    pages = Buffer(name, size, dtypes.uint8, imported.memory, BufferSpec(external_ptr=imported.pointer))
    weakref.finalize(pages, _release, imported.settle, base).atexit = False
    _pieces[name, start] = pages
    return pages


def _mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapping that an array is a view of."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None


def _release(settle: Callable[[], None], base: object) -> None:
    """Wait for kernels that may still read the mapping, whose last reference may be this argument."""
    settle()
