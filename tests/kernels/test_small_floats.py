"""Products with floats of a few bits: each weight alone, where sums of many would hide the smallest ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.in_turn import in_turn
from tests.kernels.calling import aligned
from tests.kernels.test_products import TARGETS, matmul, matmul_kernel
from tinyvllm.quant.formats import FORMATS, Activations
from tinyvllm.quant.layouts import pack_panels, unpack_rows
from tinyvllm.quant.random_rows import random_blocks

SMALL = [name for name, known in FORMATS.items() if known.e4m3 or known.float_values]
O, I = 64, 256


def rows_of(format: str) -> np.ndarray:
    """uint8 [O, bytes of a row]: every byte of the quants many times, also those that are NaN elsewhere; scales of both signs."""
    return random_blocks(format, O * I // FORMATS[format].elements, size=8.0, seed=3).reshape(O, -1)


def columns(count: int = I) -> np.ndarray:
    x = aligned((count, I), np.float32, 0)
    x[np.arange(count), np.arange(count)] = 1
    return x


def product(format: str, rows: np.ndarray, target: str) -> np.ndarray:
    packed = pack_panels(format, rows)
    panels = aligned(packed.shape, np.uint8, packed)
    return matmul(matmul_kernel(I, O, format, target), columns(), panels)


@pytest.mark.parametrize(("format", "target"), in_turn(SMALL, TARGETS))
def test_each_weight_is_exact(format: str, target: str) -> None:
    """x is 1 in one column: the product is the weight, bit by bit, subnormals as well."""
    rows = rows_of(format)
    want = unpack_rows(format, rows)
    np.testing.assert_array_equal(product(format, rows, target).T, want)
    if FORMATS[format].e4m3:
        codes = rows.reshape(-1, FORMATS[format].nbytes)[:, -FORMATS[format].field("quants").nbytes :]
        assert len(np.unique(codes)) == 256


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("format", ["FP8_G128", "MXFP8"])
def test_a_scale_that_is_nan_reaches_its_row_alone(format: str, target: str) -> None:
    rows, size = rows_of(format), FORMATS[format].field("quants").nbytes
    scales = rows.reshape(O, -1, FORMATS[format].nbytes)[5, 0, :-size]
    scales[...] = [255] if format == "MXFP8" else [0, 0, 0xC0, 0x7F]
    nan = np.isnan(product(format, rows, target)).any(axis=0)
    assert nan[5] and nan.sum() == 1


@pytest.mark.parametrize("target", TARGETS)
def test_scales_of_scales_are_exact(target: str) -> None:
    """NVFP4: x rounded to int8 is 127 / 127."""
    assert FORMATS["NVFP4_G128"].activations is Activations.INT8
    rows = rows_of("NVFP4_G128")
    np.testing.assert_allclose(product("NVFP4_G128", rows, target).T, unpack_rows("NVFP4_G128", rows), rtol=3e-7, atol=0)
