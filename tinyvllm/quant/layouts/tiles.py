"""Weight matrices [O, I] in tiles, as GPU kernels read them: 16 rows as the operands of matrix instructions.

A tile is what the 32 lanes of a warp hold of the quants (or numbers) of 16 rows, lane by lane, so one load of 16 bytes per lane, contiguous
over the warp, is an operand. With g = lane // 4 and t = lane % 4 (the A operand of PTX's mma.m16n8k16 and mma.m16n8k32), O padded with
rows of zeros, the quants of a block of row g are cut into slices of 16 bytes, and a lane holds of each slice the bytes 4t..4t+3 of row g,
then of row g+8. Two slices are a chunk, 16 bytes a lane; a block of one slice is a chunk of 8 bytes a lane:

    BF16, F16  [O/16][I/16][32 lanes] of the numbers (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1), and the same four 8 columns further
    Q8_0       [O/16][I/32][32 lanes] of int8 (g, 4t..4t+3), (g+8, 4t..4t+3), and the same eight 16 columns further
    Q4_0       [O/16][I/32][32 lanes] of bytes 4t..4t+3 of the file's block of row g, then of row g+8
    Q5_K       [O/16][I/256][5 chunks][32 lanes]: the 32 bytes of fifth bits, then the 128 bytes of nibbles

After the quants of the whole matrix follow the records, what else the blocks have: [O/16][blocks] of the other fields in the file's order.
A field of 4-byte words is [words][row g, row g+8][8 g]; one of fewer bytes is [8 g][row g, row g+8]: the scales of Q8_0 and Q4_0. Fields of
quants that four lanes cannot share, as the fifth bits of Q5_0 and the planes of two bits of INT2_G32, are part of the record. A matrix has
as many bytes as in panels.

The numpy functions are the definition, `TileWeight` the reference of every kernel that reads tiles, and `pack_tiles` that of the one that
writes them.
"""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS, Field
from tinyvllm.quant.layouts.fields import spans
from tinyvllm.quant.layouts.panels import PackedWeight, padded
from tinyvllm.quant.layouts.rows import PANEL, flipped, row_bytes

_WORD = 4  # bytes of a row that a lane holds together
_SLICE = 16  # bytes of a row's quants that four lanes hold
_TILE_ROW = 32  # bytes of a row in a tile of floats, its unit
_QUANTS = ("numbers", "quants", "high")


@dataclass(frozen=True)
class _Region:
    """One field of a unit, a block or a tile's bytes of floats: its first byte in a row and its bytes. `slices`: 0 in a record."""

    field: Field
    start: int
    nbytes: int

    @property
    def slices(self) -> int:
        shared = self.nbytes % _SLICE == 0 and (self.field.run == 1 or self.field.run % _SLICE == 0)
        return self.nbytes // _SLICE if shared and self.field.name in _QUANTS else 0

    @property
    def split(self) -> tuple[int, ...]:
        """Dimensions of the region's bytes in the layout, of one unit of sixteen rows."""
        if self.slices:
            chunk = min(2, self.slices)
            return self.slices // chunk, 8, 4, chunk, 2, _WORD  # chunks, g, t, slices, row half, bytes
        words, word = self.nbytes // self.field.word, self.field.word
        return (words, 2, 8, word) if word == _WORD else (words, 8, 2, word)

    @property
    def order(self) -> tuple[int, ...]:
        """Which of those dimensions, in the order row half, g, then the row's bytes."""
        if self.slices:
            return 4, 1, 0, 3, 2, 5
        return (1, 2, 0, 3) if self.field.word == _WORD else (2, 1, 0, 3)


def _regions(format: str) -> tuple[list[_Region], list[_Region]]:
    """The regions of the tiles and those of the records, each in the file's order."""
    if FORMATS[format].is_float:
        return [_Region(FORMATS[format].fields[0], 0, _TILE_ROW)], []
    regions = [_Region(field, start, end - start) for field, start, end in spans(format)]
    return [region for region in regions if region.slices], [region for region in regions if not region.slices]


def _unit_bytes(format: str) -> int:
    return sum(region.nbytes for regions in _regions(format) for region in regions)


def pack_tiles(format: str, rows: np.ndarray) -> np.ndarray:
    """Rows as in a file, uint8 [O, row_bytes] -> tiles, uint8 [panel_bytes of the same matrix]."""
    return np.concatenate(pack_tile_regions(format, rows))


def pack_tile_regions(format: str, rows: np.ndarray) -> list[np.ndarray]:
    """The regions of the tiles, each uint8: one of the numbers of all rows, one of their scales if the format has them apart."""
    unit = _unit_bytes(format)
    units = padded(rows).reshape(-1, 2, 8, rows.shape[1] // unit, unit).transpose(0, 3, 1, 2, 4)  # [O/16, units, row half, g, bytes]
    return [_packed(units, regions) for regions in _regions(format)]


def _packed(units: np.ndarray, regions: list[_Region]) -> np.ndarray:
    parts = [np.empty((*units.shape[:2], 0), np.uint8)]
    for region in regions:
        data = units[..., region.start : region.start + region.nbytes].reshape(*units.shape[:2], *(region.split[at] for at in region.order))
        parts.append(data.transpose(0, 1, *(2 + np.argsort(region.order))).reshape(*units.shape[:2], -1))
    return np.concatenate(parts, axis=2).reshape(-1)


@dataclass(frozen=True)
class TileUnit:
    """What a packer moves of each row at a time: a block of a packed format, or a tile's bytes of floats.

    nbytes   of a row in a unit
    quants   first byte and bytes of each field that is in the tiles, in their order
    record   first byte, bytes, and bytes of a word of each field of the record, in their order
    """

    nbytes: int
    quants: tuple[tuple[int, int], ...]
    record: tuple[tuple[int, int, int], ...]


def tile_unit(format: str) -> TileUnit:
    """The unit of a format that has tiles."""
    tiles, records = _regions(format)
    quants, record = [(r.start, r.nbytes) for r in tiles], [(r.start, r.nbytes, r.field.word) for r in records]
    return TileUnit(_unit_bytes(format), tuple(quants), tuple(record))


def source_unit(source: str, format: str) -> int:
    """Bytes of a row in `source` that become a unit of `format`: the same, or another float format's."""
    unit = tile_unit(format).nbytes
    return unit if source == format else unit * FORMATS[source].nbytes // FORMATS[format].nbytes


def unpack_tiles(format: str, tiles: np.ndarray, O: int, I: int) -> np.ndarray:
    """Tiles, uint8 -> float32 [O, I], the exact values."""
    n, unit = -(-O // PANEL), _unit_bytes(format)
    rows = np.empty((n, 2, 8, row_bytes(format, I) // unit, unit), np.uint8)
    for region, start, pitch, at in _places(format, O, I):
        data = tiles[start : start + n * rows.shape[3] * pitch].reshape(n, -1, pitch)[:, :, at : at + PANEL * region.nbytes]
        dims = data.reshape(*data.shape[:2], *region.split).transpose(0, *_row_order(region))
        rows[..., region.start : region.start + region.nbytes] = dims.reshape(*rows.shape[:4], -1)
    return unpack(format, rows.reshape(-1, FORMATS[format].nbytes)).reshape(n * PANEL, I)[:O]


def _places(format: str, O: int, I: int) -> list[tuple[_Region, int, int, int]]:
    """Each region with the byte at which the units of its kind begin, bytes from unit to unit, and its first byte in a unit."""
    units, start, places = -(-O // PANEL) * (row_bytes(format, I) // _unit_bytes(format)), 0, []
    for regions in _regions(format):
        pitch, at = PANEL * sum(region.nbytes for region in regions), 0
        for region in regions:
            places.append((region, start, pitch, at))
            at += PANEL * region.nbytes
        start += units * pitch
    return places


def _row_order(region: _Region) -> list[int]:
    """[O/16, units, *split] -> [O/16, row half, g, units, bytes of the row...], without the first dimension."""
    half, g, *others = (2 + at for at in region.order)
    return [half, g, 1, *others]


@dataclass(frozen=True, eq=False)
class TileWeight(PackedWeight):
    """A matrix [O, I] in tiles. `tensor` is realized, uint8 [panel_bytes], 128-byte aligned."""

    def _fields(self) -> list[Tensor]:
        n, units = -(-self.O // PANEL), row_bytes(self.format, self.I) // _unit_bytes(self.format)
        fields: dict[str, Tensor] = {}
        for region, start, pitch, at in _places(self.format, self.O, self.I):
            data = self.tensor[start : start + n * units * pitch].reshape(n, units, pitch)[:, :, at : at + PANEL * region.nbytes]
            rows = data.reshape(n, units, *region.split).permute(0, *_row_order(region)).reshape(n * PANEL, -1)
            fields[region.field.name] = flipped(rows, region.field.flip)
        return [fields[field.name] for field in FORMATS[self.format].fields]
