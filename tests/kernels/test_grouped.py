"""The header of the grouped formats, with every number of bits and every group: products, and a table of either layout.

The other tests of kernels take a few of these formats (tests/formats.py); a header with two numbers compiles to 18 programs each.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.calling import aligned, call
from tests.kernels.test_products import TARGETS, close, matmul, matmul_kernel, numbers, pack, prepared
from tinyvllm.backends.kernel import Kernel
from tinyvllm.quant.formats import GROUPED
from tinyvllm.quant.layouts import pack_panels, unpack_rows
from tinyvllm.quant.random_rows import random_rows

WIDEST = [name for name in GROUPED if name.endswith("G128")]
PAIRS = [(name, TARGETS[0]) for name in GROUPED] + [(name, target) for name in WIDEST for target in TARGETS[1:]]


@pytest.mark.parametrize(("format", "target"), PAIRS)
def test_products_equal_the_float64_sums_with_the_same_bits_for_any_number_of_rows(format, target):
    I, O, T = 384, 50, 7
    x, (panels, weight) = numbers(T, I), pack(numbers(O, I, seed=1), format)
    kernel = matmul_kernel(I, O, format, target)
    got, rounded = matmul(kernel, x, panels), prepared(x, format)
    close(got, rounded @ weight.T, np.abs(rounded) @ np.abs(weight.T))
    for t in range(T):
        np.testing.assert_array_equal(matmul(kernel, x[t : t + 1], panels)[0], got[t])


@pytest.mark.parametrize("format", WIDEST)
def test_rows_of_a_table_are_exact(format):
    E, V = 256, 37
    rows = random_rows(format, V, E)
    tokens = np.array([0, 36, 15, 16], np.int32)
    for panels, table in ((0, rows.reshape(-1)), (1, pack_panels(format, rows))):
        out = aligned((len(tokens), E), np.float32)
        kernel = Kernel("embed", "cpu", TARGETS[0], (("E", E), ("V", V), ("WEIGHT", format), ("PANELS", panels)), 1, 3)
        call(kernel, out, aligned(table.shape, np.uint8, table), tokens, np.array([len(tokens)], np.int32))
        np.testing.assert_array_equal(out, unpack_rows(format, rows)[tokens])
