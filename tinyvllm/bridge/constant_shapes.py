"""Shapes whose sizes are numbers are not simplified: they are as simple as they can be.

tinygrad rewrites the sizes of every reshape, shrink and expand with all rules that it has for numbers, and reshapes and shrinks the buffer
of every empty tensor to the shape that it has: half a millisecond for each tensor that is made, 30 ms of a start.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.device import canonicalize_device
from tinygrad.dtype import to_dtype
from tinygrad.uop.ops import Ops, shape_to_shape_arg

_simplify: Any = UOp.simplify
_empty: Any = UOp.empty


def keep_constant_shapes() -> None:
    """From now on, tinygrad takes sizes that are numbers as they are."""
    kind: Any = UOp
    kind.simplify, kind.empty = _simplified, staticmethod(_empty_of)


def _simplified(self: UOp, *arguments: Any, **named: Any) -> UOp:
    if self.op is Ops.SINK and all(_is_number(size) or (size.op is Ops.STACK and all(map(_is_number, size.src))) for size in self.src):
        return self
    simpler: UOp = _simplify(self, *arguments, **named)
    return simpler


def _is_number(node: UOp) -> bool:
    return node.op is Ops.CONST


def _empty_of(shape: tuple[Any, ...], dtype: Any = None, device: Any = None, axis: int | None = None, num: int | None = None) -> UOp:
    if not shape or isinstance(device, tuple) or not all(type(size) is int for size in shape):
        odd: UOp = _empty(shape, dtype, device, axis, num)
        return odd
    dtype = dtypes.default_float if dtype is None else to_dtype(dtype)
    buffer = UOp.new_buffer(canonicalize_device(device), prod(shape), dtype, num)
    return buffer if len(shape) == 1 else UOp(Ops.RESHAPE, dtype, (buffer, _sizes(shape)))


@functools.cache
def _sizes(shape: tuple[int, ...]) -> UOp:
    sizes: UOp = shape_to_shape_arg(shape)
    return sizes
