"""Tensors that are put over memory, past the graph."""

from __future__ import annotations

import functools
from math import prod

from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.uop.ops import buffers

from tinyvllm.ops.launch.memory import buffer_of


def alias(tensor: Tensor) -> Tensor:
    """A second tensor over the memory of a realized one, which tinygrad takes for another."""
    return _share(tensor, 0, tuple(int(d) for d in tensor.shape))


def spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """Tensors over parts (start, size) of a realized one's elements: the same memory, which tinygrad takes for others."""
    return [_share(tensor, start, (size,)) for start, size in places]


def _share(tensor: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    buffer, part = buffer_of(tensor.uop), Tensor.empty(*shape, dtype=tensor.dtype, device=tensor.device)
    buffers[part.uop.base] = buffer.view(prod(shape), buffer.dtype, start * buffer.dtype.itemsize).ensure_allocated()
    return part


@functools.cache
def standing_zeros(device: str, count: int) -> Tensor:
    """int32 [count] of zeros, one for all who ask for as many: for kernels that count in it and leave it as they found it.

    Made past the graph: what is first computed in a captured step would be computed in each of them.
    """
    tensor = Tensor.empty(count, dtype=dtypes.int32, device=device)
    buffer = Buffer(device, count, dtypes.int32).allocate()
    buffer.copyin(memoryview(bytearray(4 * count)))
    buffers[tensor.uop.base] = buffer
    return tensor
