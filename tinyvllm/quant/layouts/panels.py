"""Weight matrices [O, I] in panels, as CPU kernels read them: 16 rows whose words are interleaved.

One load of 64 bytes then holds the next word of 16 outputs, and a product walks through memory from the first byte to the last. O is
padded with rows of zeros to whole panels; kernels do not write the outputs of the padding. A panel is a sequence of blocks, and of each
block the fields follow one another in the file's order, each as [words][16 rows][bytes of a word]. Spelled out for some formats:

    F32   [I][16] float                     BF16  [I/2][16][2] bfloat16             F16  [I][16] half
    Q8_0  [I/32] blocks of half scale[16], uint8 q[8][16][4]      element k of row r is scale[r] * (q[k/4][r][k%4] - 128)
    Q4_0  [I/32] blocks of half scale[16], uint8 q[4][16][4]      byte q[j][r][i] holds elements 4j+i (low half) and 16+4j+i, each + 8

The numpy functions are the definition. `kernels/cpu/pack.c` writes the same bytes at the speed of memory.

The idea of panels is that of packed matrix products (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication").
"""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS, Layout, formats_in
from tinyvllm.quant.layouts.fields import spans, unit_bytes, weights
from tinyvllm.quant.layouts.rows import BLOCK, PANEL, row_bytes
from tinyvllm.quant.slices import ColumnShare, HeadShare, RowShare


def packable(format: str, I: int) -> str | None:
    """Why a matrix of this format with I columns cannot be in panels, or None if it can."""
    if Layout.PANELS not in FORMATS[format].layouts:
        return f"there are no panels of {format}, only of {', '.join(formats_in(Layout.PANELS))}"
    step = max(BLOCK, FORMATS[format].elements)
    if step > I or I % step:
        return f"the kernels read {step} columns at a time, and {I} is not a multiple of that"
    return None


def panel_bytes(format: str, O: int, I: int) -> int:
    """Bytes of the panels of a matrix [O, I], including the padding of the last one. ModelError where `packable` has a reason."""
    if reason := packable(format, I):
        raise ModelError(f"weight: a {format} matrix of {I} columns cannot be packed: {reason}")
    return _panels(O) * PANEL * row_bytes(format, I)


def _panels(O: int) -> int:
    return -(-O // PANEL)


def padded(rows: np.ndarray) -> np.ndarray:
    """uint8 [O, bytes] with rows of zeros up to a multiple of 16 rows."""
    out = np.zeros((_panels(len(rows)) * PANEL, rows.shape[1]), np.uint8)
    out[: len(rows)] = rows
    return out


def pack_panels(format: str, rows: np.ndarray) -> np.ndarray:
    """Rows as in a file, uint8 [O, row_bytes] -> panels, uint8 [panel_bytes]."""
    units = padded(rows).reshape(_panels(len(rows)), PANEL, -1, unit_bytes(format))
    parts = []
    for field, start, end in spans(format):
        words = (units[..., start:end] ^ np.uint8(field.flip)).reshape(*units.shape[:3], -1, field.word)
        parts.append(words.transpose(0, 2, 3, 1, 4).reshape(len(units), units.shape[2], -1))  # [panels, units, words, rows, word]
    return np.concatenate(parts, axis=2).reshape(-1)


def unpack_panels(format: str, panels: np.ndarray, O: int, I: int) -> np.ndarray:
    """Panels, uint8 [panel_bytes] -> float32 [O, I], the exact values."""
    n = _panels(O)
    units = panels.reshape(n, -1, unit_bytes(format) * PANEL)
    parts = []
    for field, start, end in spans(format):
        words = units[:, :, start * PANEL : end * PANEL].reshape(n, units.shape[1], -1, PANEL, field.word)
        parts.append(words.transpose(0, 3, 1, 2, 4).reshape(n, PANEL, units.shape[1], -1) ^ np.uint8(field.flip))
    blocks = np.concatenate(parts, axis=3).reshape(-1, FORMATS[format].nbytes)
    return unpack(format, blocks).reshape(n * PANEL, I)[:O]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [O, I] in panels. `tensor` is realized, uint8 [panel_bytes], 64-byte aligned."""

    tensor: Tensor
    format: str
    O: int
    I: int
    share: ColumnShare | HeadShare | RowShare | None = None  # of ranks of tensor parallelism: what part of a matrix this is

    def dense(self) -> Tensor:
        """float32 [O, I], lazy."""
        return weights(self.format, self._fields())[: self.O]

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` (int [T], below O), float32 [T, I]. The index is folded into the loads: only these rows are unpacked."""
        return self.dense()[ids]

    def _fields(self) -> list[Tensor]:
        """Of each field the bytes of every row, the padding included, uint8 [panels * 16, bytes], flipped where the field says so."""
        n = _panels(self.O)
        units = self.tensor.reshape(n, -1, unit_bytes(self.format) * PANEL)
        fields = []
        for field, start, end in spans(self.format):
            words = units[:, :, start * PANEL : end * PANEL].reshape(n, -1, PANEL, field.word)
            fields.append(words.permute(0, 2, 1, 3).reshape(n * PANEL, -1))
        return fields


@dataclass(frozen=True, eq=False)
class MixedWeight:
    """Matrices [O_i, I] in panels, their outputs concatenated: of one product, but in several formats, as converters mix them."""

    parts: tuple[PackedWeight, ...]

    @property
    def format(self) -> str:
        """All formats by name, in the order of the parts."""
        return "+".join(part.format for part in self.parts)

    @property
    def O(self) -> int:  # noqa: E743  the dimension's letter
        return sum(part.O for part in self.parts)

    @property
    def I(self) -> int:  # noqa: E743
        return self.parts[0].I

    def dense(self) -> Tensor:
        """float32 [O, I], lazy."""
        first, *rest = (part.dense() for part in self.parts)
        return first.cat(*rest)
