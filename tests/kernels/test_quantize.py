"""The kernel that quantizes matrices at load, bit by bit against its definition in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.calling import aligned, call
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16
from tinyvllm.quant.formats import QUANTIZATIONS
from tinyvllm.quant.layouts import quantize_rows, row_bytes
from tinyvllm.quant.mixes import UNWEIGHTED

VARIANTS = ["plain", *(["avx2"] if {"avx2", "fma", "f16c"} <= cpu_features() else []), *(["avx512"] if "avx512f" in cpu_features() else [])]
BEST = VARIANTS[-1]
ROWS, WIDTH = 12, 1280  # five blocks of 256: the last sixteen groups of 32 are not all there
WEIGHTINGS = [(format, weighted) for format in QUANTIZATIONS for weighted in (0, 1) if not (weighted and format in UNWEIGHTED)]
# One of each search, for the variants that are not this machine's best.
SEARCHES = [("Q8_0", 0), ("Q5_0", 1), ("Q3_K", 0), ("Q4_K", 1), ("IQ4_XS", 0), ("MXFP4", 0)]


def numbers() -> np.ndarray:
    """Normal numbers, heavy tails, zeros, one sign, constants, ties, and sizes down to those whose inverse is infinite."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((ROWS, WIDTH)) * 0.03).astype(np.float32)
    x[1] *= rng.standard_t(2, WIDTH).astype(np.float32)
    x[2, :300], x[2, 300::7] = 0, 0
    x[3], x[4] = np.abs(x[3]), -np.abs(x[4])
    x[5, :640], x[5, 640:] = 1, -0.5
    x[6] = np.round(x[6] * 100) / 100
    for row, size in ((7, 2e5), (8, 1e-6), (9, 1e-14), (10, 1e-36)):
        x[row] *= np.float32(size)
    x[11] = 0
    return x


def importance() -> np.ndarray:
    columns = (np.random.default_rng(6).standard_normal(WIDTH) ** 2).astype(np.float32)
    columns[7:40], columns[256:512] = 0, 0
    return columns


def quantize(variant: str, format: str, source: str, rows: np.ndarray, weighted: int, threads: int) -> tuple[np.ndarray, int]:
    kernel = Kernel.cpu("quantize", variant, 2, 3, SOURCE=source, FORMAT=format, I=WIDTH, WEIGHTED=weighted)
    out, fault = aligned((len(rows), row_bytes(format, WIDTH)), np.uint8), np.zeros(1, np.int32)
    columns = importance() if weighted else np.zeros(1, np.float32)
    call(kernel, out, fault, rows, columns, np.array([len(rows)], np.int32), threads=threads)
    return out, int(fault[0])


def check(variant: str, format: str, weighted: int) -> None:
    x = numbers()
    got, fault = quantize(variant, format, "F32", x, weighted, threads=2)
    np.testing.assert_array_equal(got, quantize_rows(format, x, importance() if weighted else None))
    assert not fault


@pytest.mark.parametrize(("format", "weighted"), WEIGHTINGS)
def test_the_best_variant_gives_the_bits_of_the_definition(format, weighted):
    check(BEST, format, weighted)


@pytest.mark.parametrize(("format", "weighted"), SEARCHES)
@pytest.mark.parametrize("variant", VARIANTS[:-1])
def test_every_variant_gives_the_same_bits(variant, format, weighted):
    check(variant, format, weighted)


@pytest.mark.parametrize("source", ["F16", "BF16"])
def test_stored_halves_are_read_at_any_address(source):
    x = numbers()
    stored = x.astype(np.float16) if source == "F16" else f32_to_bf16(x)
    exact = stored.astype(np.float32) if source == "F16" else bf16_to_f32(stored)
    room = np.zeros(stored.nbytes + 1, np.uint8)
    room[1:] = stored.reshape(-1).view(np.uint8)
    got, fault = quantize(BEST, "Q6_K", source, room[1:].reshape(ROWS, -1), 0, threads=3)
    np.testing.assert_array_equal(got, quantize_rows("Q6_K", exact))
    assert not fault


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 65505.0])
def test_numbers_that_cannot_be_stored_set_the_fault(number):
    x = numbers()
    x[3, WIDTH - 1] = number
    assert quantize(BEST, "Q8_0", "F32", x, 0, threads=2)[1] == 1
