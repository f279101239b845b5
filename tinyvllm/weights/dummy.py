"""Random weights of a model's shapes, to measure without a checkpoint: cut from one pool of about a million numbers, at memory speed.

A tensor depends on the seed and its own name alone.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor

from tinyvllm.quant.codecs import NUMPY_DTYPES, pack
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.layouts import RowSource, row_bytes
from tinyvllm.quant.random_rows import random_rows
from tinyvllm.weights.convert import format_of_dtype, from_f32
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import to_device
from tinyvllm.weights.recipe import Recipe

if TYPE_CHECKING:
    from tinygrad.dtype import DType

_POOL = 1_048_573  # prime, so that no two rows of a tensor begin at the same place
_ROWS_POOL = (1 << 20) - 256  # an odd number of blocks of 256, for the same reason


def dummy_tensors(recipes: Iterable[Recipe], device: str, dtype: DType, seed: int = 0) -> dict[str, Tensor]:
    """Normal numbers with deviation 0.02, and 1 for vectors called weight, which are norms."""
    wanted = format_of_dtype(dtype)
    pool = from_f32(np.random.default_rng(seed).standard_normal(_POOL, np.float32) * np.float32(0.02), wanted)
    one = from_f32(np.ones(1, np.float32), wanted)
    out = {}
    for recipe in recipes:
        flat = allocate(prod(recipe.shape) * wanted.nbytes).view(NUMPY_DTYPES[wanted.name])
        if len(recipe.shape) == 1 and recipe.name.endswith("weight"):
            flat[:] = one
        else:
            _fill(flat, pool, zlib.crc32(recipe.name.encode()) % _POOL)
        out[recipe.name] = to_device(flat.reshape(recipe.shape), device, dtype)
    return out


def dummy_rows(recipe: Recipe, format: str) -> np.ndarray:
    """Rows of a matrix in any readable format, uint8 [O, bytes of a row]: normal with deviation 0.02."""
    return random_matrix(recipe.name, format, *recipe.shape)


def random_matrix(name: str, format: str, O: int, I: int) -> np.ndarray:
    """The same for a name and a shape."""
    pool, per_block = _rows_pool(format), FORMATS[format].nbytes
    out = allocate(O * row_bytes(format, I))
    _fill(out, pool, zlib.crc32(name.encode()) % (len(pool) // per_block) * per_block)
    return out.reshape(O, -1)


def dummy_source(recipe: Recipe, format: str) -> RowSource:
    """The rows of `dummy_rows` as places in the pool, which is all that has to be read."""
    O, I = recipe.shape
    pool, size = _rows_pool(format), row_bytes(format, I)
    first = zlib.crc32(recipe.name.encode()) % (len(pool) // FORMATS[format].nbytes) * FORMATS[format].nbytes
    again = np.resize(pool, size)  # of the rows that begin near the pool's end
    return RowSource(format, size, (np.concatenate([pool, again]),), (first + np.arange(O, dtype=np.int64) * size) % len(pool))


@functools.cache
def _rows_pool(format: str) -> np.ndarray:
    known = FORMATS[format]
    if not (known.quantization or known.is_float):
        return random_rows(format, 1, _ROWS_POOL, 0.02).reshape(-1)
    numbers = np.random.default_rng(1).standard_normal((_ROWS_POOL // known.elements, known.elements), np.float32)
    return pack(format, numbers * np.float32(0.02)).reshape(-1)


def _fill(flat: np.ndarray, pool: np.ndarray, start: int) -> None:
    """`flat` filled with the pool from `start` on, then over and over from its beginning."""
    position = 0
    while position < len(flat):
        piece = pool[start : start + len(flat) - position]
        flat[position : position + len(piece)] = piece
        position, start = position + len(piece), 0
