"""Weight matrices [O, I] in tiles, as GPU kernels read them: 16 rows as the operands of matrix instructions.

A tile is what the 32 lanes of a warp hold of the quants (or numbers) of 16 rows, lane by lane, so one load of 16 bytes per lane, contiguous
over the warp, is an operand. With g = lane // 4 and t = lane % 4 (the A operand of PTX's mma.m16n8k16 and mma.m16n8k32), O padded with
rows of zeros, the quants of a block of row g are cut into slices of 16 bytes, and a lane holds of each slice the bytes 4t..4t+3 of row g,
then of row g+8:

    BF16, F16  [O/16][I/16][32 lanes] of the numbers (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1), and the same four 8 columns further
    Q8_0       [O/16][I/32][32 lanes] of int8 (g, 4t..4t+3), (g+8, 4t..4t+3), and the same eight 16 columns further
    Q4_0       [O/16][I/32][32 lanes] of bytes 4t..4t+3 of the file's block of row g, then of row g+8

After the quants of the whole matrix follow the other fields, one after the other in the file's order, each [O/16][blocks][8] of its bytes
in row g, then in row g+8: the scales of Q8_0 and Q4_0. A matrix has as many bytes as in panels. The numpy functions are the
definition, `TileWeight` the reference of every kernel that reads tiles, and `pack_tiles` that of the one that writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor

from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS, Field
from tinyvllm.quant.layouts.fields import spans, unit_bytes
from tinyvllm.quant.layouts.panels import PackedWeight, padded
from tinyvllm.quant.layouts.rows import PANEL, flipped, row_bytes

_WORD = 4  # bytes of a row that a lane holds together
_SLICE = 16  # bytes of a row's quants that four lanes hold
_TILE_ROW = 32  # bytes of a row in a tile of floats


@dataclass(frozen=True)
class _Region:
    """One field of a matrix in tiles: `start` and `end` of its bytes in a run of fields, `nbytes` of it in 16 rows."""

    field: Field
    start: int
    end: int
    nbytes: int

    @property
    def slices(self) -> int:
        """Slices of a tile, or 0 for a field that follows the tiles."""
        sizes = {"numbers": _TILE_ROW, "quants": self.field.nbytes}
        return sizes.get(self.field.name, 0) // _SLICE


def _regions(format: str, I: int) -> list[_Region]:
    """The fields in the order of the layout: what the tiles hold, then the rest."""
    units = row_bytes(format, I) // unit_bytes(format)
    regions = [_Region(field, start, end, PANEL * units * field.nbytes) for field, start, end in spans(format)]
    return sorted(regions, key=lambda region: region.slices == 0)


def pack_tiles(format: str, rows: np.ndarray) -> np.ndarray:
    """Rows as in a file, uint8 [O, row_bytes] -> tiles, uint8 [panel_bytes of the same matrix]."""
    I = rows.shape[1] // FORMATS[format].nbytes * FORMATS[format].elements
    units = padded(rows).reshape(-1, rows.shape[1] // unit_bytes(format), unit_bytes(format))
    parts = []
    for region in _regions(format, I):
        data = units[:, :, region.start : region.end]
        if region.slices:
            words = data.reshape(len(units) // PANEL, 2, 8, -1, region.slices, 4, _WORD)  # [O/16, row half, g, tiles, slice, t, word]
            parts.append(words.transpose(0, 3, 2, 5, 4, 1, 6).reshape(-1))
        else:
            parts.append(data.reshape(-1, 2, 8, *data.shape[1:]).transpose(0, 3, 2, 1, 4).reshape(-1))
    return np.concatenate(parts)


@dataclass(frozen=True)
class TileUnit:
    """What a packer moves of each row at a time: a block of a packed format, or a tile's bytes of floats.

    nbytes       of a row in a unit
    quants       first byte of what the tile holds
    quant_bytes  bytes of that
    others       first byte and bytes of each field that follows the tiles, in their order
    """

    nbytes: int
    quants: int
    quant_bytes: int
    others: tuple[tuple[int, int], ...]


def tile_unit(format: str) -> TileUnit:
    """The unit of a format that has tiles."""
    tile, *others = _regions(format, FORMATS[format].elements)
    quant_bytes = tile.slices * _SLICE
    nbytes = unit_bytes(format) if others else quant_bytes  # numbers are all that a row has: a unit is as wide as the tile
    return TileUnit(nbytes, tile.start, quant_bytes, tuple((region.start, region.end - region.start) for region in others))


def source_unit(source: str, format: str) -> int:
    """Bytes of a row in `source` that become a unit of `format`: the same, or another float format's."""
    unit = tile_unit(format).nbytes
    return unit if source == format else unit * FORMATS[source].nbytes // FORMATS[format].nbytes


def unpack_tiles(format: str, tiles: np.ndarray, O: int, I: int) -> np.ndarray:
    """Tiles, uint8 -> float32 [O, I], the exact values."""
    n, units = -(-O // PANEL), row_bytes(format, I) // unit_bytes(format)
    rows = np.empty((n * PANEL, units, unit_bytes(format)), np.uint8)
    at = 0
    for region in _regions(format, I):
        data = tiles[at : at + n * region.nbytes]
        at += n * region.nbytes
        if region.slices:
            words = data.reshape(n, -1, 8, 4, region.slices, 2, _WORD).transpose(0, 5, 2, 1, 4, 3, 6)
        else:
            words = data.reshape(n, units, 8, 2, -1).transpose(0, 3, 2, 1, 4)
        rows[:, :, region.start : region.end] = words.reshape(n * PANEL, units, -1)
    return unpack(format, rows.reshape(-1, FORMATS[format].nbytes)).reshape(n * PANEL, I)[:O]


@dataclass(frozen=True, eq=False)
class TileWeight(PackedWeight):
    """A matrix [O, I] in tiles. `tensor` is realized, uint8 [panel_bytes], 128-byte aligned."""

    def _fields(self) -> list[Tensor]:
        n, at = -(-self.O // PANEL), 0
        fields: dict[str, Tensor] = {}
        for region in _regions(self.format, self.I):
            data = self.tensor[at : at + n * region.nbytes]
            at += n * region.nbytes
            if region.slices:
                rows = data.reshape(n, -1, 8, 4, region.slices, 2, _WORD).permute(0, 5, 2, 1, 4, 3, 6)
            else:
                rows = data.reshape(n, -1, 8, 2, region.field.nbytes).permute(0, 3, 2, 1, 4)
            fields[region.field.name] = flipped(rows.reshape(n * PANEL, -1), region.field.flip)
        return [fields[field.name] for field in FORMATS[self.format].fields]
