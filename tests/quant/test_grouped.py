"""The grouped formats: integers with a scale and an offset, against the definition written out for one integer at a time."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS, GROUPED, grouped_format
from tinyvllm.quant.grouped import pack_groups


def bits_and_group(format: str) -> tuple[int, int]:
    bits, group = format[3:].split("_G")
    return int(bits), int(group)


def integer(block: bytes, bits: int, group: int, i: int) -> int:
    """Weight i of a block: of 32 weights, byte w of a plane of n bits holds the weights w, w + 4n, w + 8n, ..., the first lowest."""
    low = 8 if bits == 8 else 4 if bits >= 4 else 2
    planes, at, out = ([] if bits == low else [(bits - low, low)]) + [(low, 0)], 8, 0
    for size, shift in planes:
        width = 4 * size
        byte = block[at + i // 32 * width + i % 32 % width]
        out |= (byte >> i % 32 // width * size & (1 << size) - 1) << shift
        at += group // 8 * size
    return out


@pytest.mark.parametrize("format", GROUPED)
def test_packed_integers_are_where_the_layout_says_and_unpack(format):
    (bits, group), rng = bits_and_group(format), np.random.default_rng(7)
    quants = rng.integers(0, 1 << bits, (3, 256), dtype=np.uint8)
    scales, offsets = rng.standard_normal((2, 3, 256 // group)).astype(np.float32)
    rows = pack_groups(format, quants, scales, offsets)
    blocks = rows.reshape(3, -1, FORMATS[format].nbytes)
    assert blocks.shape[1] == 256 // group and FORMATS[format].nbytes == 8 + group * bits // 8
    for r, b in ((0, 0), (2, 256 // group - 1)):
        assert np.frombuffer(blocks[r, b, :8].tobytes(), "<f4").tolist() == [scales[r, b], offsets[r, b]]
        assert [integer(blocks[r, b].tobytes(), bits, group, i) for i in range(group)] == quants[r, b * group : (b + 1) * group].tolist()
    want = np.repeat(scales, group, 1) * quants + np.repeat(offsets, group, 1)
    np.testing.assert_array_equal(unpack(format, blocks.reshape(-1, blocks.shape[2])).reshape(3, 256), want)


def test_a_scale_of_several_blocks_is_repeated():
    quants = np.zeros((2, 256), np.uint8)
    one = np.array([[1.5], [2.5]], np.float32)
    rows = pack_groups("INT4_G64", quants, one, -one)
    np.testing.assert_array_equal(rows, pack_groups("INT4_G64", quants, np.repeat(one, 4, 1), -np.repeat(one, 4, 1)))


@pytest.mark.parametrize(
    ("bits", "group", "columns", "format"),
    [
        (4, 128, 4096, "INT4_G128"),
        (4, 1024, 4096, "INT4_G128"),
        (3, 64, 4096, "INT3_G64"),
        (4, 4096, 4064, "INT4_G32"),
        (1, 32, 64, "INT2_G32"),
        (7, 96, 192, "INT8_G32"),
        (4, 16, 4096, None),
        (4, 128, 100, None),
    ],
)
def test_the_format_that_holds_integers_without_a_change(bits, group, columns, format):
    assert grouped_format(bits, group, columns) == format
