"""Rows of a matrix where they are: in the bytes of mapped files, in any order, cut into pieces that a device's staging buffer holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.layouts.rows import PANEL

ZEROS = -1  # place of a row of zeros, which completes the last sixteen


@dataclass(frozen=True, eq=False)
class RowPiece:
    """Some sixteens of a matrix, and the bytes that hold their rows.

    first   the first sixteen
    parts   uint8 [N_i], one after the other in the staging buffer
    places  int32 [16 * count], the byte of the parts at which each row begins, or ZEROS
    """

    first: int
    parts: tuple[np.ndarray, ...]
    places: np.ndarray

    @property
    def count(self) -> int:
        return len(self.places) // PANEL

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, eq=False)
class RowSource:
    """The rows of a matrix, [O, row_bytes] in `format`, not yet read.

    blocks  uint8 [N_i], views of mapped files or arrays in memory
    places  int64 [O], the byte at which each row begins, counted through the blocks one after the other; no row is in two blocks
    """

    format: str
    row_bytes: int
    blocks: tuple[np.ndarray, ...]
    places: np.ndarray

    @classmethod
    def of(cls, format: str, rows: np.ndarray) -> RowSource:
        """Rows that are an array, uint8 [O, row_bytes], C-contiguous."""
        O, row_bytes = rows.shape
        return cls(format, row_bytes, (rows.reshape(-1),), np.arange(O, dtype=np.int64) * row_bytes)

    @property
    def O(self) -> int:  # noqa: E743  the dimension's letter
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(len(block) for block in self.blocks)

    def gathered(self) -> np.ndarray:
        """The rows as one array, uint8 [O, row_bytes]: a view where they follow each other in one block, else a copy."""
        return self._gathered(self.places)

    def _gathered(self, places: np.ndarray) -> np.ndarray:
        first = int(places[0])
        block, start = self._block_at(first)
        end = first - start + len(places) * self.row_bytes
        if end <= len(block) and (places == first + np.arange(len(places)) * self.row_bytes).all():
            return block[first - start : end].reshape(-1, self.row_bytes)
        out, start = np.empty((len(places), self.row_bytes), np.uint8), 0
        for block in self.blocks:
            here = (places >= start) & (places < start + len(block))
            if here.any():
                out[here] = np.lib.stride_tricks.sliding_window_view(block, self.row_bytes)[places[here] - start]
            start += len(block)
        return out

    def _block_at(self, place: int) -> tuple[np.ndarray, int]:
        """The block with this byte, and the byte at which it begins."""
        start = 0
        for block in self.blocks:
            if place < start + len(block):
                return block, start
            start += len(block)
        raise ValueError(f"rows: byte {place} is after the {start} bytes of all blocks")

    def taken(self, order: np.ndarray) -> RowSource:
        """The rows `order`, int [O], of these, without the bytes before the first and after the last of them."""
        places = self.places[order]
        low, high = int(places.min()), int(places.max()) + self.row_bytes
        return RowSource(self.format, self.row_bytes, tuple(self._between(low, high)), places - low)

    def cut(self, columns: slice) -> RowSource:
        """These bytes of each row."""
        return RowSource(self.format, columns.stop - columns.start, self.blocks, self.places + columns.start)

    def pieces(self, limit: int) -> Iterator[RowPiece]:
        """The matrix in pieces whose parts are at most `limit` bytes each; `limit` holds sixteen rows at least.

        A piece takes what is between its first and its last byte in the file, whatever the order of its rows. Sixteen rows that are further
        apart than `limit` are gathered on the host.
        """
        if limit < PANEL * self.row_bytes:
            raise ValueError(f"rows: pieces of {limit} bytes cannot hold {PANEL} rows of {self.row_bytes}")
        sixteens = -(-self.O // PANEL)
        places = np.pad(self.places, (0, sixteens * PANEL - self.O), mode="edge").reshape(sixteens, PANEL)
        lows, highs = places.min(1).tolist(), (places.max(1) + self.row_bytes).tolist()
        first = 0
        while first < sixteens:
            low, high, end = lows[first], highs[first], first + 1
            while end < sixteens and max(high, highs[end]) - min(low, lows[end]) <= limit:
                low, high, end = min(low, lows[end]), max(high, highs[end]), end + 1
            yield self._piece(first, end, low, high, limit)
            first = end

    def _piece(self, first: int, end: int, low: int, high: int, limit: int) -> RowPiece:
        places = np.full((end - first) * PANEL, ZEROS, np.int32)
        rows = self.places[first * PANEL : end * PANEL]
        if high - low > limit:
            places[: len(rows)] = np.arange(len(rows)) * self.row_bytes
            return RowPiece(first, (self._gathered(rows).reshape(-1),), places)
        places[: len(rows)] = rows - low
        return RowPiece(first, tuple(self._between(low, high)), places)

    def _between(self, low: int, high: int) -> Iterator[np.ndarray]:
        start = 0
        for block in self.blocks:
            part = block[max(low - start, 0) : max(high - start, 0)]
            if len(part):
                yield part
            start += len(block)


def joined(sources: Sequence[RowSource]) -> RowSource:
    """The rows of all sources, one after the other; they have one format and width."""
    starts = np.cumsum([0, *(source.nbytes for source in sources)])
    places = [source.places + start for source, start in zip(sources, starts, strict=False)]
    blocks = tuple(block for source in sources for block in source.blocks)
    return RowSource(sources[0].format, sources[0].row_bytes, blocks, np.concatenate(places))
