"""Weight matrices [O, I] as the kernels read them: panels of 16 rows with the rows' 32-bit words side by side.

One load of 64 bytes then holds the next word of 16 outputs, and a product walks through memory from the first byte to the last. O is
padded with rows of zeros to whole panels; what they give is not written. The same matrix as rows, as a file has them, is enough for an
embedding, which only gathers. Formats are named as in quant/formats.py; of one panel they are

    F32   [I][16] float                 BF16  [I/2][16][2] bfloat16             F16  [I][16] half
    Q8_0  [I/32] blocks of half scale[16], uint8 q[8][16][4]      element k of row r is scale[r] * (q[k/4][r][k%4] - 128)
    Q4_0  [I/32] blocks of half scale[16], uint8 q[4][16][4]      byte q[j][r][i] holds elements 4j+i (low half) and 16+4j+i, each + 8

The numpy functions here are the definition. `kernels/cpu/pack.c` writes the same bytes at the speed of memory, and the two records give
the reference of every kernel that reads them: plain tinygrad, on any device.

The idea of panels is that of packed matrix products (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.errors import ModelError
from tinyvllm.quant.formats import FORMATS, bf16_to_f32, f32_to_bf16, unpack

PANEL = 16  # rows of a panel
BLOCK = 32  # numbers that the kernels take at a time; Q8_0 and Q4_0 have one scale for as many
FLOATS = ("F32", "F16", "BF16")
PACKED = (*FLOATS, "Q8_0", "Q4_0")
STORED = ("Q8_0", "Q4_0", "Q4_K")  # packed formats that are also computed on in the rows of a file


# --- sizes


def packable(format: str, I: int) -> str | None:
    """Why a matrix of this format with I columns cannot be panels, or None if it can."""
    if format not in PACKED:
        return f"there are no panels of {format}, only of {', '.join(PACKED)}"
    if I < BLOCK or I % BLOCK:
        return f"the kernels read {BLOCK} columns at a time, and {I} is not a multiple of that"
    return None


def row_bytes(format: str, I: int) -> int:
    """Bytes of one row of I numbers, in a file and in a panel alike. ModelError where `packable` has a reason."""
    if reason := packable(format, I):
        raise ModelError(f"weight: a {format} matrix of {I} columns cannot be packed: {reason}")
    return I // FORMATS[format].elements * FORMATS[format].nbytes


def panel_bytes(format: str, O: int, I: int) -> int:
    """Bytes of the panels of a matrix [O, I], the padding of the last one included. ModelError as `row_bytes`."""
    return _panels(O) * PANEL * row_bytes(format, I)


def _panels(O: int) -> int:
    return -(-O // PANEL)


# --- rows to panels and back, in numpy


def pack_panels(format: str, rows: np.ndarray) -> np.ndarray:
    """Rows as in a file, uint8 [O, row_bytes] -> panels, uint8 [panel_bytes]."""
    padded = np.zeros((_panels(len(rows)) * PANEL, rows.shape[1]), np.uint8)
    padded[: len(rows)] = rows
    if format in FLOATS:
        return _words_beside(padded, _word(format)).reshape(-1)
    blocks = padded.reshape(len(padded), -1, FORMATS[format].nbytes)
    quants = blocks[:, :, 2:] ^ np.uint8(128 if format == "Q8_0" else 0)  # + 128, int8 to uint8
    n, count = len(padded) // PANEL, blocks.shape[1]
    scales = _words_beside(blocks[:, :, :2].reshape(len(padded), -1), 2).reshape(n, count, -1)
    words = _words_beside(quants.reshape(len(padded), -1), 4).reshape(n, count, -1)
    return np.concatenate([scales, words], axis=2).reshape(-1)


def unpack_panels(format: str, panels: np.ndarray, O: int, I: int) -> np.ndarray:
    """Panels, uint8 [panel_bytes] -> float32 [O, I], the weights' exact values."""
    known, padded = FORMATS[format], _panels(O) * PANEL
    if format in FLOATS:
        blocks = _words_apart(panels, padded, _word(format)).reshape(-1, known.nbytes)
    else:
        parts = panels.reshape(_panels(O), I // BLOCK, -1)
        scales = _words_apart(parts[:, :, : 2 * PANEL], padded, 2).reshape(-1, 2)
        quants = _words_apart(parts[:, :, 2 * PANEL :], padded, 4).reshape(len(scales), -1)
        blocks = np.concatenate([scales, quants ^ np.uint8(128 if format == "Q8_0" else 0)], axis=1)
    return unpack(format, blocks).reshape(padded, I)[:O]


def _word(format: str) -> int:
    """Bytes of a row that stand together in a panel of floats. BF16 goes by pairs, which the processor multiplies at once."""
    return 2 if format == "F16" else 4


def _words_beside(rows: np.ndarray, word: int) -> np.ndarray:
    """uint8 [O, bytes] -> [panels, bytes / word, 16, word]"""
    return rows.reshape(-1, PANEL, rows.shape[1] // word, word).swapaxes(1, 2)


def _words_apart(beside: np.ndarray, O: int, word: int) -> np.ndarray:
    """The inverse, from any shape that begins with the panels: uint8 -> [O, bytes]"""
    return beside.reshape(O // PANEL, -1, PANEL, word).swapaxes(1, 2).reshape(O, -1)


# --- rows to rows


def convert_rows(source: str, format: str, rows: np.ndarray) -> np.ndarray:
    """Rows from one of the three float formats to another: uint8 [O, bytes] -> uint8 [O, bytes], to nearest, ties to even.

    float32 and bfloat16 numbers beyond float16's range become infinite.
    """
    if source not in FLOATS or format not in FLOATS:
        raise ModelError(f"weight: rows are converted between {', '.join(FLOATS)}, not from {source} to {format}")
    if source == format:
        return rows
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    stored = np.ascontiguousarray(rows).view(kinds[source])
    values = bf16_to_f32(stored) if source == "BF16" else stored.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return (f32_to_bf16(values) if format == "BF16" else values.astype(kinds[format])).view(np.uint8)


def quantize_rows(format: str, rows: np.ndarray) -> np.ndarray:
    """float32 [O, I] -> rows in Q8_0 or Q4_0, uint8 [O, row_bytes], as llama.cpp's reference quantizer makes them."""
    pack = FORMATS[format].pack
    if format not in ("Q8_0", "Q4_0") or pack is None:
        raise ModelError(f"weight: rows are quantized to Q8_0 or Q4_0, not to {format}")
    out = np.empty((len(rows), row_bytes(format, rows.shape[1])), np.uint8)
    step = max(1, (1 << 16) // rows.shape[1])  # the quantizer's temporaries stay in the second-level cache
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        out[start : start + step] = pack(np.ascontiguousarray(piece, np.float32).reshape(-1, BLOCK)).reshape(len(piece), -1)
    return out


# --- what a model holds


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [O, I] in panels. `tensor` is realized, uint8 [panel_bytes], on a cache line's border."""

    tensor: Tensor
    format: str
    O: int
    I: int

    def dense(self) -> Tensor:
        """float32 [O, I], lazy, made by moves, bitcasts and arithmetic alone."""
        return _values(self.format, *self._row_parts())[: self.O]

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` (whole numbers [T], below O), float32 [T, I]. The index is folded into the loads: only they are unpacked."""
        return self.dense()[ids]

    def _row_parts(self) -> tuple[Tensor, ...]:
        n = _panels(self.O)
        if self.format in FLOATS:
            return (_apart(self.tensor.reshape(n, -1, PANEL, _word(self.format))),)
        blocks = self.tensor.reshape(n, self.I // BLOCK, -1)
        scales, quants = blocks[:, :, : 2 * PANEL], blocks[:, :, 2 * PANEL :]
        return _apart(scales.reshape(n, -1, PANEL, 2)), _apart(quants.reshape(n, -1, PANEL, 4))


@dataclass(frozen=True, eq=False)
class RowWeight:
    """A matrix [O, I] in rows as a file has them, for what only gathers. `tensor` is realized, uint8 [O * row_bytes]."""

    tensor: Tensor
    format: str
    O: int
    I: int

    def dense(self) -> Tensor:
        """float32 [O, I], lazy, made by moves, bitcasts and arithmetic alone."""
        if self.format == "Q4_K":
            return _q4_k_values(self.tensor.reshape(-1, FORMATS["Q4_K"].nbytes)).reshape(self.O, self.I)
        return _values(self.format, *self._row_parts())

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` (whole numbers [T], below O), float32 [T, I]. The index is folded into the loads: only they are unpacked."""
        return self.dense()[ids]

    def _row_parts(self) -> tuple[Tensor, ...]:
        if self.format in FLOATS:
            return (self.tensor.reshape(self.O, -1),)
        blocks = self.tensor.reshape(self.O, self.I // BLOCK, -1)
        scales, quants = blocks[:, :, :2], blocks[:, :, 2:]
        return scales.reshape(self.O, -1), (quants ^ 128 if self.format == "Q8_0" else quants).reshape(self.O, -1)


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """Matrices [O_i, I] of one format, in rows as files have them, whose outputs stand side by side; kernels take each by itself."""

    parts: tuple[RowWeight, ...]

    @property
    def format(self) -> str:
        return self.parts[0].format

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


def _apart(beside: Tensor) -> Tensor:
    """uint8 [panels, words, 16, bytes of a word] -> uint8 [O with its padding, bytes of a row]"""
    return beside.permute(0, 2, 1, 3).reshape(int(beside.shape[0]) * PANEL, -1)


def _values(format: str, numbers: Tensor, quants: Tensor | None = None) -> Tensor:
    """The bytes of N rows -> float32 [N, I]: those of floats, or those of the scales and then the quants' as panels have them."""
    if format == "F32":
        return _little_endian(numbers, 4).bitcast(dtypes.float32)
    if format == "BF16":
        return (_little_endian(numbers, 2) << 16).bitcast(dtypes.float32)  # no bfloat16: not every device has it
    half = _half(_little_endian(numbers, 2))
    if quants is None:
        return half
    if format == "Q8_0":
        whole = quants.reshape(*half.shape, BLOCK).cast(dtypes.int32) - 128
    else:
        pairs = quants.reshape(*half.shape, BLOCK // 2)
        whole = Tensor.cat(pairs & 15, pairs // 16, dim=2).cast(dtypes.int32) - 8
    return (half.unsqueeze(2) * whole.cast(dtypes.float32)).reshape(int(half.shape[0]), -1)


def _q4_k_values(blocks: Tensor) -> Tensor:
    """uint8 [N, 144] -> float32 [N, 256]: eight parts of 32 numbers, each scale * q - minimum (quant/formats.py)."""
    d, least = (_half(_little_endian(blocks[:, at : at + 2], 2)) for at in (0, 2))  # [N, 1]
    six, quants = blocks[:, 4:16].cast(dtypes.int32), blocks[:, 16:].reshape(-1, 4, 32).cast(dtypes.int32)
    low, high = six[:, :8], six[:, 8:]
    scales = (low[:, :4] & 63).cat((high & 15) | ((low[:, :4] // 64) * 16), dim=1)
    minimums = (low[:, 4:] & 63).cat((high // 16) | ((low[:, 4:] // 64) * 16), dim=1)
    q = Tensor.stack(quants & 15, quants // 16, dim=2).reshape(-1, 8, 32)
    scaled = (d * scales.cast(dtypes.float32)).unsqueeze(2) * q.cast(dtypes.float32)
    return (scaled - (least * minimums.cast(dtypes.float32)).unsqueeze(2)).reshape(-1, 256)


def _half(bits: Tensor) -> Tensor:
    return bits.cast(dtypes.uint16).bitcast(dtypes.float16).cast(dtypes.float32)


def _little_endian(data: Tensor, size: int) -> Tensor:
    """uint8 [N, numbers * size] -> uint32 [N, numbers]"""
    each = data.reshape(int(data.shape[0]), -1, size).cast(dtypes.uint32)
    out = each[:, :, 0]
    for place in range(1, size):
        out = out | (each[:, :, place] << (8 * place))
    return out
