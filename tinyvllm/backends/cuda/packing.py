"""Weights of files to tiles in a GPU's memory: rows are uploaded as they are and packed there."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.backends.cuda.launch import launch_now
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import download, mapped, upload
from tinyvllm.integers import ceil_div
from tinyvllm.quant.layouts import PANEL, RowPiece, RowSource, panel_bytes, source_unit

STAGING_BYTES = 64 << 20  # of rows on the device at a time, next to the tiles: 2.6 ms of a bus of 25 GB/s, and a launch takes 10 us
_HEAD = 4  # numbers of the kernel's table before the places


def pack_rows(kernel: Kernel, device: str, rows: RowSource, format: str, I: int) -> Tensor:
    """The matrix [O, I] in tiles of `format`, realized, uint8 [panel_bytes]; FloatingPointError if a finite number is beyond `format`.

    One piece of rows after the other goes through one staging buffer. The stream orders copies and launches, so nothing waits: the host
    is ahead by as much as `Copies` has pinned. tinygrad gives the buffer to the next matrix, whose copies follow in the same stream.
    Only a matrix that is converted is waited for.
    """
    limit, sixteens = max(STAGING_BYTES, PANEL * rows.row_bytes), ceil_div(rows.O, PANEL)
    units = rows.row_bytes // source_unit(rows.format, format)
    tiles = Tensor.empty(panel_bytes(format, rows.O, I), dtype=dtypes.uint8, device=device)
    staging = Tensor.empty(_size_class(min(limit, rows.nbytes)), dtype=dtypes.uint8, device=device)
    table = Tensor.empty(_size_class(_HEAD + PANEL * sixteens), dtype=dtypes.int32, device=device)
    beyond = [] if rows.format == format else [mapped(np.zeros(1, np.int32), device)]
    for piece in rows.pieces(limit):
        _upload(piece, staging)
        upload(table, np.concatenate([np.array([piece.first, piece.count, sixteens, units], np.int32), piece.places]))
        launch_now(kernel, [tiles, *beyond], [staging, table])
    if beyond and download(beyond[0])[0]:
        raise FloatingPointError(f"a number of {rows.format} is beyond {format}")
    return tiles


def _size_class(count: int) -> int:
    """A power of two: tinygrad keeps a freed buffer for requests of the same size."""
    return 1 << (count - 1).bit_length()


def _upload(piece: RowPiece, staging: Tensor) -> None:
    start = 0
    for part in piece.parts:
        upload(staging, part, start)
        start += len(part)
