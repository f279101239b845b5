"""pack_tiles.cu writes the bytes that the numpy packer defines, for every format that has tiles, and touches no others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.samples import GPUS
from tests.kernels.cuda.tiles import laid
from tinyvllm.backends.cuda import plan
from tinyvllm.quant.formats import Layout, formats_in
from tinyvllm.quant.layouts import RowSource, pack_tiles, panel_bytes, row_bytes, tile_unit

TILED = formats_in(Layout.TILES)
GPU = plan.GPU(1, 0, 0)


def file_bytes(format: str, O: int, I: int, seed: int = 0) -> np.ndarray:
    """uint8 [O, row_bytes]: any bits, none of them a zero byte, so that padding is told from data."""
    return np.random.default_rng([seed, O, I]).integers(1, 256, (O, row_bytes(format, I)), np.uint8)


def packed(source: RowSource, O: int, I: int, limit: int, seed: int = 0) -> np.ndarray:
    """The tiles as the kernel writes them, piece by piece."""
    tiles = aligned((panel_bytes(source.format, O, I),), np.uint8, 0xEE)
    units = source.row_bytes // tile_unit(source.format).nbytes
    for piece in source.pieces(limit):
        head = np.array([piece.first, piece.count, -(-O // 16), units], np.int32)
        staging = laid(np.concatenate(piece.parts))
        assert len(staging) == piece.nbytes <= limit
        emulate(plan.pack_tiles("sm_80", source.format, GPU), tiles, staging, laid(np.concatenate([head, piece.places])), seed=seed)
    return tiles


@pytest.mark.parametrize("O, I", [(1, 32), (16, 32), (37, 96), (64, 544), (50, 288)])
@pytest.mark.parametrize("format", TILED)
def test_the_bytes_are_those_of_the_definition(format: str, O: int, I: int) -> None:
    rows = file_bytes(format, O, I)
    np.testing.assert_array_equal(packed(RowSource.of(format, rows), O, I, rows.size + 16 * rows.shape[1]), pack_tiles(format, rows))


@pytest.mark.parametrize("format", TILED)
def test_in_pieces_of_any_order(format: str) -> None:
    """Three staged pieces of 16 to 32 rows, whose rows are permuted within 32."""
    O, I = 90, 64
    rows = file_bytes(format, O, I)
    order = np.concatenate([np.random.default_rng(at).permutation(np.arange(at, min(at + 32, O))) for at in range(0, O, 32)])
    source = RowSource(format, rows.shape[1], (rows.reshape(-1),), order.astype(np.int64) * rows.shape[1])
    assert len(list(source.pieces(40 * rows.shape[1]))) == 3
    np.testing.assert_array_equal(packed(source, O, I, 40 * rows.shape[1], seed=1), pack_tiles(format, rows[order]))


def test_a_piece_writes_its_own_sixteens_only() -> None:
    rows = file_bytes("Q8_0", 48, 64)
    tiles, piece = aligned((panel_bytes("Q8_0", 48, 64),), np.uint8, 0xEE), list(RowSource.of("Q8_0", rows).pieces(16 * rows.shape[1]))[1]
    head = np.array([piece.first, piece.count, 3, 2], np.int32)
    emulate(plan.pack_tiles("sm_80", "Q8_0", GPU), tiles, laid(piece.parts[0]), laid(np.concatenate([head, piece.places])))
    expected, whole = np.full_like(tiles, 0xEE), pack_tiles("Q8_0", rows)
    for start, size in ((0, 1024), (3072, 64)):  # of sixteen rows: quants, then scales after the tiles of the matrix
        here = slice(start + size, start + 2 * size)
        expected[here] = whole[here]
    np.testing.assert_array_equal(tiles, expected)


def test_rows_begin_at_any_even_byte() -> None:
    """As those of dummy weights do, which are cut from one pool."""
    pool, O, I = file_bytes("BF16", 1, 640).reshape(-1), 20, 64
    places = np.arange(O, dtype=np.int64) * 38 + 2
    source = RowSource("BF16", 128, (pool,), places)
    expected = pack_tiles("BF16", np.stack([pool[place : place + 128] for place in places]))
    np.testing.assert_array_equal(packed(source, O, I, 4096), expected)


def test_one_kernel_for_all_matrices_of_a_format() -> None:
    assert len({plan.pack_tiles("sm_80", format, GPUS["sm_90"]) for format in TILED}) == len({tile_unit(format) for format in TILED})
