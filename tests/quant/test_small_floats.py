"""Floats of eight bits and fewer against their definitions, and the block formats made of them, against hand-computed numbers."""

from __future__ import annotations

import struct

import numpy as np

from tinyvllm.quant.codecs import bf16_to_f32, unpack
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.small_floats import e4m3_is_nan, e4m3_to_f32, e8m0_to_f32

CODES = np.arange(256, dtype=np.uint8)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(code: int) -> float:
    """A sign, four bits of an exponent with bias 7, three of a fraction; no infinities, and NaN where all bits but the sign are set."""
    sign, exponent, fraction = -1.0 if code >> 7 else 1.0, code >> 3 & 15, (code & 7) / 8
    if exponent == 15 and fraction == 7 / 8:
        return float("nan")
    return sign * (fraction * 2.0**-6 if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 7))


def test_e4m3_by_its_definition() -> None:
    want = np.array([e4m3(code) for code in range(256)], np.float32)
    nan = e4m3_is_nan(CODES)
    assert (np.isnan(want) == nan).all() and nan.sum() == 2
    np.testing.assert_array_equal(e4m3_to_f32(CODES)[~nan].view(np.uint32), want[~nan].view(np.uint32))
    assert e4m3_to_f32(CODES[nan]).tolist() == [480, -480]


def test_e4m3_is_exact_in_bfloat16() -> None:
    values = e4m3_to_f32(CODES)
    np.testing.assert_array_equal(bf16_to_f32((values.view(np.uint32) >> 16).astype(np.uint16)), values)


def test_e8m0_by_its_definition() -> None:
    want = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float32)
    np.testing.assert_array_equal(e8m0_to_f32(CODES), want)


def block(*parts: float | bytes | list[int]) -> np.ndarray:
    """Floats as float32."""
    return np.frombuffer(b"".join(struct.pack("<f", p) if isinstance(p, float) else bytes(p) for p in parts), np.uint8)[None]


def test_hand_computed_blocks() -> None:
    ones = [0x38] * 126  # 1.0
    fp8 = unpack("FP8_G128", block(0.5, [0xC0, 0x01, *ones]))[0]
    assert fp8[:3].tolist() == [-1.0, 0.5 * 2.0**-9, 0.5]  # -2; the smallest subnormal
    mxfp8 = unpack("MXFP8", block([130], [0x7E, *ones[:31]]))[0]
    assert mxfp8[:2].tolist() == [8 * 448, 8]
    scales, quants = [0x38, 0x40, *[0x38] * 6], [0x21, 0x0F, *[0] * 62]
    nvfp4 = unpack("NVFP4_G128", block(0.25, scales, quants))[0]  # values are twice the float's
    assert (nvfp4[0], nvfp4[1], nvfp4[16], nvfp4[17]) == (0.25, 0.25 * -12, 2 * 0.25 * 2, 0)
    nf4 = unpack("NF4", block(3.0, [0xF0, 0x7C, *[0x77] * 30]))[0]
    assert nf4[:5].tolist() == [-3, 3, np.float32(0.44070982933044434) * 3, 0, 0]
    fp4 = unpack("BNB_FP4", block(12.0, [0x32, 0x89, *[0] * 30]))[0]
    np.testing.assert_allclose(fp4[:4], [8, 12, -0.0625, 0], rtol=1e-6)


def test_a_scale_that_is_nan_makes_its_group_nan() -> None:
    assert np.isnan(unpack("FP8_G128", block(float("nan"), [0] * 128))).all()
    assert np.isnan(unpack("MXFP8", block([255], [0] * 32))).all()


def test_values_of_four_bits() -> None:
    np.testing.assert_array_equal(np.array(FORMATS["NVFP4_G128"].values) / 2, FP4)
    for name in ("NF4", "BNB_FP4"):
        values = FORMATS[name].values
        assert len(values) == 16 and np.float32(values).tolist() == list(values) and max(map(abs, values)) == 1
