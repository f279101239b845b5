"""Floats of eight bits and fewer, and the block formats made of them: readers for codecs.py, and the numbers that loaders need.

E4M3 is the OCP 8-bit float (arXiv:2209.05433): sign, four bits of exponent with bias 7, three of mantissa, no infinity. E8M0 is a power of
two with bias 127 (OCP Microscaling Formats 1.0), E2M1 the float of four bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinyvllm.quant.bits import Floats
from tinyvllm.quant.formats import FORMATS

E4M3_NAN = 0x7F  # and with the sign 0xFF: NaN in files; 480 in the blocks of quant/formats.py
E8M0_NAN = 0xFF
_CODES = np.arange(256, dtype=np.uint32)


def _e4m3_numbers() -> Floats:
    bits = (_CODES & 0x80) << 24 | (_CODES & 0x7F) << 20  # of a float32 whose exponent is 120 too small: a product normalises subnormals
    numbers: Floats = bits.view(np.float32) * np.float32(2.0**120)
    return numbers


_E4M3 = _e4m3_numbers()
_E8M0 = np.where(_CODES == E8M0_NAN, np.float32(np.nan), np.where(_CODES == 0, 0x400000, _CODES << 23).astype(np.uint32).view(np.float32))


def e4m3_to_f32(codes: np.ndarray) -> Floats:
    """uint8 [...] -> float32 [...], exact; the codes of NaN give +-480 (`e4m3_is_nan` tells them)."""
    return np.take(_E4M3, codes)


def e4m3_is_nan(codes: np.ndarray) -> np.ndarray:
    """uint8 [...] -> bool [...]"""
    nan: np.ndarray = (codes & 0x7F) == E4M3_NAN
    return nan


def e8m0_to_f32(codes: np.ndarray) -> Floats:
    """uint8 [...] -> float32 [...], 2^(code - 127) exactly, 255 a NaN."""
    return np.take(_E8M0, codes)


def _float_scale(data: np.ndarray) -> Floats:
    """The float32 that each block begins with, [N, 1]."""
    return np.ascontiguousarray(data[:, :4]).view(np.float32)


def _halves_in_turn(data: np.ndarray) -> np.ndarray:
    """uint8 [N, bytes] -> uint8 [N, 2 * bytes] of four bits each, the low half of each byte first."""
    return np.stack([data & 15, data >> 4], axis=2).reshape(len(data), 2 * data.shape[1])


def _unpack_fp8(data: np.ndarray) -> Floats:
    return _float_scale(data) * e4m3_to_f32(data[:, 4:])


def _unpack_mxfp8(data: np.ndarray) -> Floats:
    return e8m0_to_f32(data[:, :1]) * e4m3_to_f32(data[:, 1:])


def _unpack_nvfp4(data: np.ndarray) -> np.ndarray:
    """Scales of 16 weights; runs of 16 bytes whose low halves are 16 weights and whose high halves are the next 16."""
    scales = _float_scale(data) * e4m3_to_f32(data[:, 4:12])
    runs = data[:, 12:].reshape(len(data), 4, 1, 16)
    quants = np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(data), 8, 16)
    values: Floats = np.array(FORMATS["NVFP4_G128"].values, np.float32)[quants]
    return (scales[:, :, None] * values).reshape(len(data), 128)


def _unpack_from_table(name: str) -> Callable[[np.ndarray], np.ndarray]:
    values = np.array(FORMATS[name].values, np.float32)
    return lambda data: _float_scale(data) * values[_halves_in_turn(data[:, 4:])]


READERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "FP8_G128": _unpack_fp8,
    "MXFP8": _unpack_mxfp8,
    "NVFP4_G128": _unpack_nvfp4,
    "NF4": _unpack_from_table("NF4"),
    "BNB_FP4": _unpack_from_table("BNB_FP4"),
}
