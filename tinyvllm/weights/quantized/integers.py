"""Matrices of unsigned integers in groups of columns, weight = scale * quant + offset: from a checkpoint's tensors to rows of our formats.

A kind of checkpoint says how its integers, scales and offsets are read for some rows; this file chooses the format that holds them
without a change, and builds its rows. Offsets of integer zero points, -scale * zero, are exact in float32 for scales of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinyvllm.foreign import quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.codecs import NUMPY_DTYPES, unpack
from tinyvllm.quant.formats import FORMATS, grouped_format
from tinyvllm.quant.grouped import pack_groups
from tinyvllm.weights.mapping import BuiltRecord, TensorRecord
from tinyvllm.weights.quantized.checks import refuse

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # quants uint8 [R, I], scales and offsets float32 [R, groups]


@dataclass(frozen=True, eq=False)
class Integers:
    """A matrix [O, I] of integers of `bits` bits.

    groups   int [I], the group of each column
    read     (first, end) -> quants, scales and offsets of these rows; first and end as in BuiltRecord
    """

    name: str
    shape: tuple[int, int]
    bits: int
    groups: np.ndarray
    sources: tuple[TensorRecord, ...]
    read: Callable[[int, int], Rows]

    def record(self) -> BuiltRecord:
        """The matrix in a grouped format if one holds it, with its columns sorted by groups if that takes it; else in F32."""
        order, groups = None, self.groups
        format = grouped_format(self.bits, _run(groups), len(groups))
        if format is None:
            order = np.argsort(self.groups, kind="stable")
            groups = self.groups[order]
            format = grouped_format(self.bits, _run(groups), len(groups))
        if format is None:
            reason = f"groups of {_run(groups)} columns of {len(groups)}"
            return BuiltRecord(self.name, "F32", self.shape, self.sources, self._floats, reason)
        blocks = groups[:: FORMATS[format].elements]

        def build(first: int, end: int) -> np.ndarray:
            quants, scales, offsets = self.read(first, end)
            return pack_groups(format, quants if order is None else quants[:, order], scales[:, blocks], offsets[:, blocks])

        return BuiltRecord(self.name, format, self.shape, self.sources, build, order=order)

    def _floats(self, first: int, end: int) -> np.ndarray:
        quants, scales, offsets = self.read(first, end)
        values = scales[:, self.groups] * quants.astype(np.float32)
        values += offsets[:, self.groups]
        return values.view(np.uint8)


def _run(groups: np.ndarray) -> int:
    """The most columns, a power of two up to 128, such that every run of that number, from the first on, has one group."""
    size = 128
    while size > 1 and (len(groups) % size or (groups.reshape(-1, size) != groups[::size, None]).any()):
        size //= 2
    return size


def equal_groups(columns: int, size: int) -> np.ndarray:
    """The group of each column: `size` columns each, all of them where it is -1."""
    return np.arange(columns) // (columns if size == -1 else size)


def integers_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` integers of each row, uint8 [R, count]: `words` uint32 [R, W], the lowest bits first, across the ends of words."""
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)[:, :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (words.view(np.uint8)[:, :, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(words), -1)[:, :count]
    runs = -(-words.shape[1] // bits)  # of 32 integers
    padded = np.zeros((len(words), runs * bits + 1), np.uint32)
    padded[:, : words.shape[1]] = words
    out = np.empty((len(words), runs, 32), np.uint8)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        value = padded[:, word : runs * bits + word : bits] >> np.uint32(shift)
        if shift + bits > 32:
            value |= padded[:, word + 1 :: bits][:, :runs] << np.uint32(32 - shift)
        out[:, :, i] = value & np.uint32((1 << bits) - 1)
    return out.reshape(len(words), -1)[:, :count]


def words_of(record: TensorRecord) -> np.ndarray:
    """The tensor of 32-bit integers as uint32, a view of the file."""
    if record.format not in ("I32", "U32"):
        refuse(f"tensor {quoted(record.name)} must hold 32-bit integers, got {record.format}")
    return record.data.view(np.uint32).reshape(record.shape)


def floats_of(record: TensorRecord) -> np.ndarray:
    """The tensor of floats as the file has it, to be cut before `float32_of`."""
    if record.format not in NUMPY_DTYPES:
        refuse(f"tensor {quoted(record.name)} must hold float32, float16 or bfloat16, got {record.format}")
    return record.data.view(NUMPY_DTYPES[record.format]).reshape(record.shape)


def float32_of(record: TensorRecord, part: np.ndarray) -> np.ndarray:
    """A part of `floats_of` as float32 of the same shape."""
    known = FORMATS[record.format]
    data = np.ascontiguousarray(part).reshape(-1, 1).view(np.uint8)
    return unpack(known.name, data).reshape(part.shape)
