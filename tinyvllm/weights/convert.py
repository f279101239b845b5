"""Between stored numbers and the three float formats that a model's tensors have in memory: piece by piece, at the speed of memory.

Pieces fit the processor's cache, and the pages of a mapped file are dropped on the way.
"""

from __future__ import annotations

from math import prod

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from tinyvllm.errors import ModelError
from tinyvllm.quant.codecs import NUMPY_DTYPES, bf16_to_f32, f32_to_bf16, unpack
from tinyvllm.quant.formats import FLOATS, FORMATS, BlockFormat
from tinyvllm.weights.mapping import BuiltRecord, Record, allocate, drop_pages

DTYPE_FORMATS: dict[DType, str] = {getattr(dtypes, FORMATS[name].dtype or ""): name for name in FLOATS}
_PIECE = 1 << 18  # elements converted at a time: 1 MiB of float32 stays in the second-level cache with its temporaries
_DROP_EVERY = 16  # pieces: faulting pages in again around each single drop costs more than the conversion


def format_of_dtype(dtype: DType) -> BlockFormat:
    if dtype not in DTYPE_FORMATS:
        raise ModelError(f"weights: the dtype of a model must be float32, float16 or bfloat16, got {dtype}")
    return FORMATS[DTYPE_FORMATS[dtype]]


def unpacked(record: Record, wanted: BlockFormat) -> np.ndarray:
    """The record in the wanted float format, in memory of its own. FloatingPointError as `from_f32`."""
    stored = FORMATS[record.format]
    if isinstance(record, BuiltRecord):
        return _built(record, stored, wanted)
    blocks = record.data.reshape(-1, stored.nbytes)
    out = allocate(len(blocks) * stored.elements * wanted.nbytes).view(NUMPY_DTYPES[wanted.name])
    step = max(1, _PIECE // stored.elements)
    for start in range(0, len(blocks), step):
        values = unpack(stored.name, blocks[start : start + step]).reshape(-1)
        out[start * stored.elements : start * stored.elements + len(values)] = from_f32(values, wanted)
        if start % (step * _DROP_EVERY) == 0:
            drop_pages(blocks[max(0, start - step * _DROP_EVERY) : start])
    return out.reshape(record.shape)


def _built(record: BuiltRecord, stored: BlockFormat, wanted: BlockFormat) -> np.ndarray:
    out = allocate(prod(record.shape) * wanted.nbytes).view(NUMPY_DTYPES[wanted.name]).reshape(record.shape)
    done = 0
    for rows in record.pieces():
        values = unpack(stored.name, rows.reshape(-1, stored.nbytes)).reshape(len(rows), -1)
        columns = slice(None) if record.order is None else record.order
        out[done : done + len(rows), columns] = from_f32(values, wanted)
        done += len(rows)
    return out


def converted(array: np.ndarray, wanted: BlockFormat) -> np.ndarray:
    """A contiguous copy of `array` (float32, float16 or bfloat16 bits, in any memory order) in the wanted format."""
    out = allocate(array.size * wanted.nbytes).view(NUMPY_DTYPES[wanted.name])
    in_order = array.flags.c_contiguous  # the rows of a transposed array are spread over it: its pages must stay until the end
    source, target = (array.reshape(-1), out) if in_order else (array, out.reshape(array.shape))
    step = max(1, _PIECE // max(1, prod(source.shape[1:])))
    for start in range(0, len(source), step):
        piece = source[start : start + step]
        same = piece.dtype == target.dtype
        target[start : start + step] = piece if same else from_f32(_to_f32(piece), wanted)
        if in_order and start % (step * _DROP_EVERY) == 0:
            drop_pages(source[max(0, start - step * _DROP_EVERY) : start])
    return out.reshape(array.shape)


def from_f32(values: np.ndarray, wanted: BlockFormat) -> np.ndarray:
    """float32 -> the wanted float format as numpy carries it. FloatingPointError for a finite number that float16 cannot hold."""
    if wanted.name == "F32":
        return values
    if wanted.name == "BF16":
        return f32_to_bf16(values)
    with np.errstate(over="raise"):
        return values.astype(np.float16)


def check_fits_float16(array: np.ndarray) -> None:
    """FloatingPointError if a finite number of `array` (float32 or bfloat16 bits) rounds to an infinite float16."""
    narrow = array.dtype == NUMPY_DTYPES["BF16"]
    bits = array.reshape(-1).view(np.uint16 if narrow else np.uint32)
    # The first number that rounds up to 65536 is 65520; from `infinite` on are the infinities and NaNs that are stored as such.
    first, infinite = (0x4780, 0x7F80) if narrow else (0x477FF000, 0x7F800000)
    for start in range(0, len(bits), _PIECE):
        magnitude = np.bitwise_and(bits[start : start + _PIECE], 0x7FFF if narrow else 0x7FFFFFFF)
        if ((magnitude >= first) & (magnitude < infinite)).any():
            raise FloatingPointError("overflow")


def _to_f32(array: np.ndarray) -> np.ndarray:
    return bf16_to_f32(array) if array.dtype == NUMPY_DTYPES["BF16"] else array.astype(np.float32)
