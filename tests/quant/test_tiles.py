"""Tiles: the operands of matrix instructions lane by lane, packed and unpacked by numpy, read by plain tinygrad."""

import numpy as np
import pytest

from tests.ops.inputs import device_bytes, file_rows, int32
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS, Layout, formats_in
from tinyvllm.quant.layouts import TileWeight, pack_tiles, panel_bytes, unpack_tiles
from tinyvllm.quant.random_rows import packable_width

TILED = formats_in(Layout.TILES)
O, I = 37, 96  # the last tile has rows of zeros


def values(format, I):
    return unpack(format, file_rows(format, O, I).reshape(-1, FORMATS[format].nbytes)).reshape(O, I)


@pytest.mark.parametrize("format", TILED)
def test_packing_and_unpacking_are_inverse(format):
    I = packable_width(format, 96)
    tiles = pack_tiles(format, file_rows(format, O, I))
    assert tiles.nbytes == panel_bytes(format, O, I)
    np.testing.assert_array_equal(unpack_tiles(format, tiles, O, I), values(format, I))


@pytest.mark.parametrize("format", TILED)
def test_the_reference_reads_tiles(format):
    I = packable_width(format, 96)
    weight = TileWeight(device_bytes(pack_tiles(format, file_rows(format, O, I))), format, O, I)
    np.testing.assert_array_equal(weight.dense().numpy(), values(format, I))
    np.testing.assert_array_equal(weight.rows(int32(3, 36, 20)).numpy(), values(format, I)[[3, 36, 20]])


@pytest.mark.parametrize("lane", [0, 13, 31])
def test_a_lane_holds_its_part_of_the_operand(lane):
    """mma.m16n8k16's A and mma.m16n8k32's, of the second tile of rows and the third of columns."""
    g, t = lane // 4, lane % 4
    rows = file_rows("BF16", O, I).view(np.uint16)[16:32, 32:48]
    held = pack_tiles("BF16", file_rows("BF16", O, I)).view(np.uint16).reshape(3, 6, 32, 8)[1, 2, lane]
    assert held.tolist() == [rows[r, c + i] for c in (2 * t, 2 * t + 8) for r in (g, g + 8) for i in (0, 1)]
    blocks = file_rows("Q8_0", O, I).reshape(O, 3, 34)[16:32, 2]
    tiles = pack_tiles("Q8_0", file_rows("Q8_0", O, I))
    held, scales = tiles[: 48 * I].reshape(3, 3, 32, 16)[1, 2, lane], tiles[48 * I :].reshape(3, 3, 8, 2, 2)[1, 2, g]
    assert held.tolist() == [blocks[r, 2 + c + i] for c in (4 * t, 4 * t + 16) for r in (g, g + 8) for i in range(4)]
    np.testing.assert_array_equal(scales, blocks[[g, g + 8], :2])
    blocks = file_rows("Q4_0", O, I).reshape(O, 3, 18)[16:32, 2]
    held = pack_tiles("Q4_0", file_rows("Q4_0", O, I))[: 24 * I].reshape(3, 3, 32, 8)[1, 2, lane]
    assert held.tolist() == [blocks[r, 2 + 4 * t + i] for r in (g, g + 8) for i in range(4)]


@pytest.mark.parametrize("lane", [0, 13, 31])
def test_chunks_and_records_of_blocks_of_256(lane):
    """The second tile of rows and the second block: two slices of 16 bytes a chunk, and the record's words by field."""
    g, t = lane // 4, lane % 4
    blocks = file_rows("Q5_K", O, 512).reshape(O, 2, 176)[16:32, 1]  # half d, dmin; scales[12], high[32], q[128]
    tiles = pack_tiles("Q5_K", file_rows("Q5_K", O, 512))
    chunks, records = tiles[: 48 * 2 * 160].reshape(3, 2, 5, 32, 16)[1, 1], tiles[48 * 2 * 160 :].reshape(3, 2, 256)[1, 1]
    for chunk, first in enumerate((16, 48, 80, 112, 144)):
        want = [blocks[r, first + at + 4 * t + i] for at in (0, 16) for r in (g, g + 8) for i in range(4)]
        assert chunks[chunk, lane].tolist() == want
    words = records.reshape(8, 8, 4)[:, g]
    assert words[0].tolist() == [*blocks[g, :2], *blocks[g + 8, :2]] and words[1].tolist() == [*blocks[g, 2:4], *blocks[g + 8, 2:4]]
    for word in range(3):
        assert [words[2 + 2 * word + half].tolist() for half in (0, 1)] == [blocks[r, 4 + 4 * word :][:4].tolist() for r in (g, g + 8)]
