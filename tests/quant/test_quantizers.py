"""The writers of packed formats: the bytes that ggml's quantizer wrote for the same numbers, and errors as small as the format allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.quant.blocks import relative_error
from tinyvllm.quant.formats import QUANTIZATIONS
from tinyvllm.quant.layouts import quantize_rows, unpack_rows
from tinyvllm.quant.mixes import UNWEIGHTED

RECORDED = Path(__file__).with_name("ggml_blocks.npz")  # llama-cpp-python 0.3.36; tests/peers/test_quantizers.py writes it
WIDTH = 512
WEIGHTINGS = [(format, weighted) for format in QUANTIZATIONS for weighted in (0, 1) if not (weighted and format in UNWEIGHTED)]


def numbers() -> np.ndarray:
    """Rows of normal numbers, heavy tails, one sign, zeros and constants, many ties, and tiny numbers."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((8, WIDTH)) * 0.03
    x[1] *= rng.standard_t(2, WIDTH)
    x[2], x[3] = np.abs(x[2]), -np.abs(x[3])
    x[4, :256], x[4, 256:300] = 0, 0.25
    x[5] = np.round(x[5] * 100) / 100
    x[6] *= 0.001
    x[7, 256:] = 0
    return x.astype(np.float32)


def importance() -> np.ndarray:
    columns = np.random.default_rng(10).integers(0, 1 << 12, WIDTH)
    columns[7:40], columns[256:300] = 0, 0
    return (columns / np.float32(1 << 8)).astype(np.float32)


@pytest.mark.parametrize(("format", "weighted"), WEIGHTINGS)
def test_the_bytes_are_those_that_ggml_wrote(format, weighted):
    recorded = np.load(RECORDED)
    got = quantize_rows(format, recorded["numbers"], recorded["importance"] if weighted else None)
    np.testing.assert_array_equal(got, recorded[f"{format} {weighted}"])


@pytest.mark.parametrize("format", QUANTIZATIONS)
def test_rounding_stays_within_the_formats_error(format):
    values = np.random.default_rng(4).standard_normal((16, 1024)).astype(np.float32)
    assert 0.5 < relative_error(format, unpack_rows(format, quantize_rows(format, values)), values) < 1


@pytest.mark.parametrize("format", sorted(set(QUANTIZATIONS) - UNWEIGHTED))
def test_important_columns_have_smaller_errors(format):
    values = np.random.default_rng(4).standard_normal((64, 512)).astype(np.float32)
    columns = np.ones(512, np.float32)
    columns[::4] = 100

    def error(weights: np.ndarray | None) -> float:
        return float((columns * (unpack_rows(format, quantize_rows(format, values, weights)) - values) ** 2).sum())

    assert error(columns) < 0.97 * error(None)
