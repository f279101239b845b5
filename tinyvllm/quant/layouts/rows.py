"""Weight matrices [O, I] in rows, as files store them, and the ways from one format's rows to another's."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.codecs import NUMPY_DTYPES, bf16_to_f32, f32_to_bf16, pack, unpack
from tinyvllm.quant.formats import FLOATS, FORMATS, QUANTIZATIONS
from tinyvllm.quant.layouts.fields import spans, unit_bytes, weights

PANEL = 16  # rows of a panel and of a tile
BLOCK = 32  # columns that kernels read at a time


def row_bytes(format: str, I: int) -> int:
    """Bytes of one row of I weights, in a file and in every layout. ModelError where I is not a whole number of blocks."""
    known = FORMATS[format]
    if I % known.elements:
        raise ModelError(f"weight: a row of {I} columns cannot be {format}: expected a multiple of {known.elements} columns")
    return I // known.elements * known.nbytes


def unpack_rows(format: str, rows: np.ndarray) -> np.ndarray:
    """Rows of any readable format, uint8 [O, row_bytes] -> float32 [O, I], the exact values."""
    return unpack(format, rows.reshape(-1, FORMATS[format].nbytes)).reshape(len(rows), -1)


def convert_rows(source: str, format: str, rows: np.ndarray) -> np.ndarray:
    """Rows from one of the three float formats to another: uint8 [O, bytes] -> uint8 [O, bytes], to nearest, ties to even.

    float32 and bfloat16 numbers beyond float16's range become infinite.
    """
    if source not in FLOATS or format not in FLOATS:
        raise ModelError(f"weight: rows are converted between {', '.join(FLOATS)}, not from {source} to {format}")
    if source == format:
        return rows
    stored = np.ascontiguousarray(rows).view(NUMPY_DTYPES[source])
    values = bf16_to_f32(stored) if source == "BF16" else stored.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return (f32_to_bf16(values) if format == "BF16" else values.astype(NUMPY_DTYPES[format])).view(np.uint8)


def quantize_rows(format: str, rows: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [O, I] -> rows of a format that `--quantization` offers, uint8 [O, row_bytes], rounded as llama.cpp's quantizer does.

    `importance`, float32 [I], weighs the columns' errors.
    """
    from tinyvllm.quant.quantizers import row_importance  # which few starts need

    known = FORMATS[format]
    if not known.quantization:
        raise ModelError(f"weight: rows are quantized to {' or '.join(QUANTIZATIONS)}, not to {format}")
    out = np.empty((len(rows), row_bytes(format, rows.shape[1])), np.uint8)
    step = max(1, (1 << 16) // rows.shape[1])  # the quantizer's temporaries stay in the second-level cache
    for start in range(0, len(rows), step):
        piece = np.ascontiguousarray(rows[start : start + step], np.float32)
        weighted = None if importance is None else row_importance(piece, importance, known.elements)
        out[start : start + step] = pack(format, piece.reshape(-1, known.elements), weighted).reshape(len(piece), -1)
    return out


@dataclass(frozen=True, eq=False)
class RowWeight:
    """A matrix [O, I] in rows as a file stores them. `tensor` is realized, uint8 [O * row_bytes]."""

    tensor: Tensor
    format: str
    O: int
    I: int

    def dense(self) -> Tensor:
        """float32 [O, I], lazy."""
        units = self.tensor.reshape(self.O, -1, unit_bytes(self.format))
        return weights(self.format, [flipped(units[:, :, a:b], field.flip).reshape(self.O, -1) for field, a, b in spans(self.format)])

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` (int [T], below O), float32 [T, I]. The index is folded into the loads: only these rows are unpacked."""
        return self.dense()[ids]


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """Matrices [O_i, I] in rows as files store them, their outputs concatenated; kernels read each from its own place.

    Their formats may differ, as converters mix them.
    """

    parts: tuple[RowWeight, ...]

    @property
    def format(self) -> str:
        """Of all parts; all formats in the order of the parts, with + between them, where they differ."""
        names = [part.format for part in self.parts]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    def leading(self, limit: int) -> tuple[StoredWeight, tuple[StoredWeight, ...]]:
        """The first parts, as many as have one format and `limit` at most, together; the others, each by itself."""
        count = next((i for i, part in enumerate(self.parts) if i == limit or part.format != self.parts[0].format), len(self.parts))
        return StoredWeight(self.parts[:count]), tuple(StoredWeight((part,)) for part in self.parts[count:])

    @property
    def O(self) -> int:  # noqa: E743  the dimension's letter
        return sum(part.O for part in self.parts)

    @property
    def I(self) -> int:  # noqa: E743
        return self.parts[0].I

    def dense(self) -> Tensor:
        """float32 [O, I], lazy."""
        parts = [part.dense() for part in self.parts]
        return parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:])


def flipped(data: Tensor, flip: int) -> Tensor:
    return data ^ flip if flip else data
