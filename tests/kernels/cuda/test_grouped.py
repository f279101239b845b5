"""The CUDA header of the grouped formats, with every number of bits and every group: products of few and many rows, and a table.

The other tests of kernels take a few of these formats (tests/formats.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.emulator import emulate
from tests.formats import EXAMPLES
from tests.kernels.cuda import small_products
from tests.kernels.cuda.test_large_products import Cut, Data, Product
from tests.kernels.cuda.test_movers import embed, file_rows, int32
from tests.kernels.cuda.test_pack_tiles import file_bytes, packed
from tests.kernels.cuda.test_small_products import matvec
from tests.kernels.cuda.tiles import close, laid, numbers, product, same_bits, tiled
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS, GROUPED
from tinyvllm.quant.layouts import RowSource, pack_tiles
from tinyvllm.quant.random_rows import packable_width

SHORT = ("INT2_G128", "INT8_G32")
OTHERS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in GROUPED if name not in EXAMPLES]


def planted(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    """From here on kernels are compiled with `wrong` in the place of `right`, which their text has once."""

    def text(kernel: Kernel, instead: Path | None = None) -> str:
        whole = kernel_text(kernel, instead)
        assert whole.count(right) == 1
        return whole.replace(right, wrong)

    monkeypatch.setattr(emulate, "kernel_text", text)


@pytest.mark.parametrize("format", OTHERS)
def test_products_with_the_same_bits_for_any_number_of_rows(format: str) -> None:
    T, O, I = 16, 37, packable_width(format, 672)
    data = Data(Product(format, T, O, I))
    many = data.run(Cut(32, 16, (1, 1, 2)), 11)
    close(many, *data.expected(11))
    few = matvec(small_products.matvec(3, O, I, format), laid(data.x[4:7]), data.weight)
    same_bits(few, many[4:7])


@pytest.mark.parametrize("format", OTHERS)
def test_tiles_and_single_numbers(format: str) -> None:
    """Tables of 37 rows, any bits."""
    rows = file_rows(format)
    values, tokens = unpack(format, rows.reshape(-1, FORMATS[format].nbytes)).reshape(len(rows), -1), int32(0, 36, 16, 9)
    for tiles, table in ((0, rows), (1, pack_tiles(format, rows))):
        np.testing.assert_array_equal(embed(format, tiles, laid(table), tokens, 4), values[tokens])
    any_bits = file_bytes(format, 37, packable_width(format, 96))
    source = RowSource.of(format, any_bits)
    np.testing.assert_array_equal(packed(source, 37, packable_width(format, 96), any_bits.size * 2), pack_tiles(format, any_bits))


FAULTS = [
    ("INT2_G128", "(t % 2 ? record[at + 2] : record[at])", "record[at]"),
    ("INT3_G64", "record[4 + 2 * step + row] >> t", "record[4 + row] >> t"),
    ("INT6_G32", "(twos & 0x03030303u) << LOW", "(twos & 0x01010101u) << LOW"),
    ("INT8_G32", "ZERO_POINT = LOW == 8 ? -128 : 0", "ZERO_POINT = 0"),
    ("INT4_G128", "__uint_as_float(record[i + 1])", "__uint_as_float(record[i])"),
    ("FP8_G128", "word << 4 & 0x07F007F0u", "word << 4 & 0x07E007E0u"),
    ("MXFP8", "e == 255 ? 0x7FC00000u : e == 0 ? 0x400000u : e << 23", "(e + 1) << 23"),
    ("NVFP4_G128", "const int word = 2 + step / 2 * 2", "const int word = 2"),
    ("NF4", "four >> 4, 16", "four >> 8, 16"),
]


QUICK = ("INT2_G128", "INT8_G32", "FP8_G128", "NF4")


@pytest.mark.parametrize(
    "format, right, wrong", [pytest.param(*each, marks=() if each[0] in QUICK else pytest.mark.long) for each in FAULTS]
)
def test_a_fault_in_the_header_is_noticed(format: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of another lane, another step, a lost bit, zero point, or row; of small floats, too."""
    O, I = 37, packable_width(format, 288)
    weight, x, kernel = tiled(numbers(O, I), format), numbers(1, I), small_products.matvec(1, O, I, format)
    close(matvec(kernel, x, weight), *product(x, weight))
    planted(monkeypatch, right, wrong)
    with pytest.raises(AssertionError, match="off by"):
        close(matvec(kernel, x, weight), *product(x, weight))
