"""Weight matrices [O, I] as GPU kernels read them: tiles of 16 rows that are the operands of matrix instructions.

A tile is what the 32 lanes of a warp hold of it, lane by lane, so one load of 16 bytes a lane, all of them side by side in memory, is an
operand. With g = lane // 4 and t = lane % 4 (the A operand of PTX's mma.m16n8k16 and mma.m16n8k32), O padded with rows of zeros:

    BF16, F16  [O/16][I/16][32 lanes] of the numbers (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1), and the same four 8 columns further
    Q8_0       [O/16][I/32][32 lanes] of int8 (g, 4t..4t+3), (g+8, 4t..4t+3), and the same eight 16 columns further
    Q4_0       [O/16][I/32][32 lanes] of bytes 4t..4t+3 of the file's block of row g, then of row g+8

Behind all quants of Q8_0 and Q4_0 stand the scales: [O/16][I/32][8] of half (g), half (g+8). Sizes are those of panels (weight.py). The
numpy functions are the definition, `TileWeight` the reference of every kernel that reads tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor

from tinyvllm.quant.formats import FORMATS, unpack
from tinyvllm.quant.layouts import BLOCK, PANEL, PackedWeight

TILED = ("F16", "BF16", "Q8_0", "Q4_0")
WORD = 4  # bytes of a row that stand together in a tile


def pack_tiles(format: str, rows: np.ndarray) -> np.ndarray:
    """Rows as in a file, uint8 [O, row_bytes] -> tiles, uint8 [panel_bytes of the same matrix]."""
    padded = np.zeros((-(-len(rows) // PANEL) * PANEL, rows.shape[1]), np.uint8)
    padded[: len(rows)] = rows
    if format in ("F16", "BF16"):
        return _words_to_lanes(padded, 2).reshape(-1)
    blocks = padded.reshape(len(padded), -1, FORMATS[format].nbytes)
    quants = _words_to_lanes(np.ascontiguousarray(blocks[:, :, 2:]).reshape(len(padded), -1), 2 if format == "Q8_0" else 1)
    scales = blocks[:, :, :2].reshape(-1, 2, 8, blocks.shape[1], 2).transpose(0, 3, 2, 1, 4)  # [O/16, I/32, g, row half, 2 bytes]
    return np.concatenate([quants.reshape(-1), scales.reshape(-1)])


def put_tiles(format: str, I: int, tiles: np.ndarray, rows: np.ndarray, first: int, sixteens: int) -> None:
    """Write `rows` into the tiles of a matrix of so many `sixteens` of rows, from number `first` on."""
    packed, per_row = pack_tiles(format, rows), FORMATS[format].nbytes - (2 if format in ("Q8_0", "Q4_0") else 0)
    count, quants = -(-len(rows) // PANEL), PANEL * I // FORMATS[format].elements * per_row  # of sixteen rows
    scales = PANEL * I // BLOCK * 2
    tiles[first * quants : (first + count) * quants] = packed[: count * quants]
    end = sixteens * quants
    tiles[end + first * scales : end + (first + count) * scales] = packed[count * quants :]


def unpack_tiles(format: str, tiles: np.ndarray, O: int, I: int) -> np.ndarray:
    """Tiles, uint8 -> float32 [O, I], the weights' exact values."""
    n = -(-O // PANEL)
    if format in ("F16", "BF16"):
        rows = _lanes_to_words(tiles, n, 2)
    else:
        end = n * PANEL * I // BLOCK * (FORMATS[format].nbytes - 2)
        quants = _lanes_to_words(tiles[:end], n, 2 if format == "Q8_0" else 1).reshape(n * PANEL, I // BLOCK, -1)
        scales = tiles[end:].reshape(n, I // BLOCK, 8, 2, 2).transpose(0, 3, 2, 1, 4).reshape(n * PANEL, I // BLOCK, 2)
        rows = np.concatenate([scales, quants], axis=2).reshape(n * PANEL, -1)
    return unpack(format, rows.reshape(-1, FORMATS[format].nbytes)).reshape(n * PANEL, I)[:O]


def _words_to_lanes(rows: np.ndarray, halves: int) -> np.ndarray:
    """uint8 [O, bytes] -> [O/16, tiles, g, t, column halves, row halves, 4 bytes]"""
    return rows.reshape(len(rows) // PANEL, 2, 8, -1, halves, 4, WORD).transpose(0, 3, 2, 5, 4, 1, 6)


def _lanes_to_words(tiles: np.ndarray, n: int, halves: int) -> np.ndarray:
    """The inverse: uint8 -> [O, bytes of a row]"""
    return tiles.reshape(n, -1, 8, 4, halves, 2, WORD).transpose(0, 5, 2, 1, 4, 3, 6).reshape(n * PANEL, -1)


@dataclass(frozen=True, eq=False)
class TileWeight(PackedWeight):
    """A matrix [O, I] in tiles. `tensor` is realized, uint8, as many bytes as panels have, 128-byte aligned."""

    def _row_parts(self) -> tuple[Tensor, ...]:
        n, blocks = -(-self.O // PANEL), self.I // BLOCK
        if self.format in ("F16", "BF16"):
            return (self._rows(self.tensor, n, 2),)
        end = n * PANEL * blocks * (FORMATS[self.format].nbytes - 2)
        quants = self._rows(self.tensor[:end], n, 2 if self.format == "Q8_0" else 1)
        scales = self.tensor[end:].reshape(n, blocks, 8, 2, 2).permute(0, 3, 2, 1, 4).reshape(n * PANEL, -1)
        return scales, quants ^ 128 if self.format == "Q8_0" else quants

    @staticmethod
    def _rows(tiles: Tensor, n: int, halves: int) -> Tensor:
        return tiles.reshape(n, -1, 8, 4, halves, 2, WORD).permute(0, 5, 2, 1, 4, 3, 6).reshape(n * PANEL, -1)
