"""pack_tiles.cu writes the bytes that the numpy packer defines, for every format that has tiles, and touches no others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.formats import sampled_formats
from tests.kernels.calling import aligned
from tests.kernels.cuda.samples import GPUS
from tests.kernels.cuda.tiles import laid
from tinyvllm.backends.cuda import plan
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import RowSource, convert_rows, pack_tiles, panel_bytes, row_bytes, source_unit, tile_unit
from tinyvllm.quant.random_rows import packable_width

TILED = sampled_formats(Layout.TILES)
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
        kernel, table = plan.pack_tiles("sm_80", source.format, source.format, GPU), laid(np.concatenate([head, piece.places]))
        emulate(kernel, tiles, staging, table, seed=seed)
    return tiles


@pytest.mark.parametrize("O, I", [(1, 32), (16, 32), (37, 96), (64, 544), (50, 288)])
@pytest.mark.parametrize("format", TILED)
def test_the_bytes_are_those_of_the_definition(format: str, O: int, I: int) -> None:
    I = packable_width(format, I)
    rows = file_bytes(format, O, I)
    np.testing.assert_array_equal(packed(RowSource.of(format, rows), O, I, rows.size + 16 * rows.shape[1]), pack_tiles(format, rows))


@pytest.mark.parametrize("format", TILED)
def test_in_pieces_of_any_order(format: str) -> None:
    """Three staged pieces of 16 to 32 rows, whose rows are permuted within 32."""
    O, I = 90, packable_width(format, 64)
    rows = file_bytes(format, O, I)
    order = np.concatenate([np.random.default_rng(at).permutation(np.arange(at, min(at + 32, O))) for at in range(0, O, 32)])
    source = RowSource(format, rows.shape[1], (rows.reshape(-1),), order.astype(np.int64) * rows.shape[1])
    assert len(list(source.pieces(40 * rows.shape[1]))) == 3
    np.testing.assert_array_equal(packed(source, O, I, 40 * rows.shape[1], seed=1), pack_tiles(format, rows[order]))


def test_a_piece_writes_its_own_sixteens_only() -> None:
    rows = file_bytes("Q8_0", 48, 64)
    tiles, piece = aligned((panel_bytes("Q8_0", 48, 64),), np.uint8, 0xEE), list(RowSource.of("Q8_0", rows).pieces(16 * rows.shape[1]))[1]
    head = np.array([piece.first, piece.count, 3, 2], np.int32)
    emulate(plan.pack_tiles("sm_80", "Q8_0", "Q8_0", GPU), tiles, laid(piece.parts[0]), laid(np.concatenate([head, piece.places])))
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
    fields = {
        "Q8_0": "FIELD(0, 2, 2)", "BF16": "", "F16": "", "Q4_K": "FIELD(0, 2, 2) FIELD(2, 2, 2) FIELD(4, 12, 4)", "MXFP4": "FIELD(0, 1, 1)",
        "Q5_0": "FIELD(0, 2, 2) FIELD(2, 4, 4)",
    }  # fmt: skip
    for format in fields:
        constants = dict(plan.pack_tiles("sm_80", format, format, GPUS["sm_90"]).defines)
        assert constants["FIELDS"] == fields[format] and not {"I", "O"} & set(constants)


CONVERSIONS = [("F32", "BF16"), ("F32", "F16"), ("F16", "BF16"), ("BF16", "F16")]


def converted(source: str, format: str, rows: np.ndarray, I: int) -> tuple[np.ndarray, int]:
    """The tiles of rows in another float format, and whether a number is beyond it."""
    O = len(rows)
    tiles, beyond = aligned((panel_bytes(format, O, I),), np.uint8, 0xEE), laid(np.zeros(1, np.int32))
    (piece,) = RowSource.of(source, rows).pieces(rows.size + 16 * rows.shape[1])
    head = np.array([0, piece.count, piece.count, rows.shape[1] // source_unit(source, format)], np.int32)
    emulate(plan.pack_tiles("sm_80", source, format, GPU), tiles, beyond, laid(piece.parts[0]), laid(np.concatenate([head, piece.places])))
    return tiles, int(beyond[0])


@pytest.mark.parametrize("source, format", CONVERSIONS)
def test_floats_are_rounded_as_by_the_definition(source: str, format: str) -> None:
    """Any bits but NaN, for float16 within its range: subnormal numbers, ties, infinities."""
    O, I = 37, 96
    bits = np.random.default_rng(7).integers(0, 1 << 32, (O, I), np.uint32)
    bits[:8] &= np.uint32(0xFFFF8000)  # ties of bfloat16
    bits[8:16] &= np.uint32(0xFFFFF000)  # and of float16
    if format == "F16":
        bits = (bits & np.uint32(0x807FFFFF)) | np.random.default_rng(8).integers(96, 142, (O, I), np.uint32) << 23
    values = bits.view(np.float32)
    values[~np.isfinite(values)] = 1.5
    values[3, 5:7] = np.inf, -np.inf
    with np.errstate(over="ignore"):
        rows = convert_rows("F32", source, values.view(np.uint8).reshape(O, -1))
    tiles, beyond = converted(source, format, rows, I)
    np.testing.assert_array_equal(tiles, pack_tiles(format, convert_rows(source, format, rows)))
    assert not beyond


@pytest.mark.parametrize("source, fits, beyond", [("F32", 65519.996, 65520.0), ("BF16", 65280.0, 65536.0)])
@pytest.mark.parametrize("place", [(0, 0), (12, 31), (16, 17)])
def test_a_number_beyond_float16_is_seen(source: str, fits: float, beyond: float, place: tuple[int, int]) -> None:
    for number, seen in ((fits, 0), (-fits, 0), (np.inf, 0), (np.nan, 0), (beyond, 1), (-beyond, 1), (3e38, 1)):
        values = np.zeros((17, 32), np.float32)
        values[place] = number
        assert converted(source, "F16", convert_rows("F32", source, values.view(np.uint8).reshape(17, -1)), 32)[1] == seen, number
