"""Readers and writers of each format's blocks: one numpy function per format and direction, found by the format's name.

A block is a run of bytes that encodes a fixed number of weights (ggml's layouts; the three float formats are blocks of one number). These
functions are the oracle for the packed kernels, so they are written to be read. quant/formats.py is the table of the formats; it does
without numpy, because configuration and the command line read it.

numpy has no bfloat16: its bits are carried as uint16. Everything is little endian.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm.errors import FormatError
from tinyvllm.quant import grid_codecs
from tinyvllm.quant.bits import Bytes, Floats, bit_planes, fifth_bits, half, nibbles
from tinyvllm.quant.formats import FLOATS, FORMATS, GROUPED
from tinyvllm.quant.grouped import unpack_groups
from tinyvllm.quant.small_floats import READERS as SMALL_FLOAT_READERS

if TYPE_CHECKING:
    from tinyvllm.quant.quantizers import Importance

# How numpy carries the float formats.
NUMPY_DTYPES = {name: np.dtype("uint16" if name == "BF16" else FORMATS[name].dtype) for name in FLOATS}
Codec = Callable[[np.ndarray], np.ndarray]
_READERS: dict[str, Codec] = dict(grid_codecs.READERS)  # uint8 [N, bytes of a block] -> float32 [N, weights of a block]
_WRITERS: dict[str, Codec] = {}  # of floats: the nearest inverse


def unpack(name: str, data: np.ndarray) -> np.ndarray:
    """uint8 [N, bytes of a block] -> float32 [N, weights of a block], exact. FormatError for a format that has no reader."""
    if name not in _READERS:
        raise FormatError(f"formats: {name} cannot be unpacked; readable are {', '.join(readable_formats())}")
    with np.errstate(all="ignore"):  # infinite or NaN scales give infinite or NaN numbers, as stored
        return _READERS[name](data)


def pack(name: str, values: np.ndarray, importance: Importance | None = None) -> np.ndarray:
    """float32 [N, weights of a block] -> uint8 [N, bytes of a block], floats to nearest, packed formats as llama.cpp's quantizer.

    FormatError for a format that has no writer.
    """
    if name in _WRITERS:
        return _WRITERS[name](values)
    from tinyvllm.quant.quantizers import WRITERS  # which few starts need

    if name not in WRITERS:
        raise FormatError(f"formats: {name} cannot be packed; writable are {', '.join([*_WRITERS, *WRITERS])}")
    return WRITERS[name](values, importance)


def readable_formats() -> list[str]:
    """In the order of the table."""
    return [name for name in FORMATS if name in _READERS]


def _reads(name: str) -> Callable[[Codec], Codec]:
    def register(codec: Codec) -> Codec:
        _READERS[name] = codec
        return codec

    return register


def _writes(name: str) -> Callable[[Codec], Codec]:
    def register(codec: Codec) -> Codec:
        _WRITERS[name] = codec
        return codec

    return register


# --- plain floats


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 bits [...] -> float32 [...], exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 [...] -> uint16 bfloat16 bits [...], rounded to nearest, ties to even; a NaN stays a NaN (made quiet)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(values)
    if nan.any():  # rounding may carry a NaN's payload into infinity or into the sign
        rounded = np.where(nan, (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16)


@_reads("F32")
def _unpack_f32(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float32)


@_reads("F16")
def _unpack_f16(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


@_reads("BF16")
def _unpack_bf16(data: np.ndarray) -> np.ndarray:
    return bf16_to_f32(np.ascontiguousarray(data).view(np.uint16))


# --- blocks of 32, one scale (and one minimum) each


@_reads("Q8_0")
def _unpack_q8_0(data: np.ndarray) -> np.ndarray:
    return half(data, 0) * data[:, 2:].view(np.int8)


@_reads("Q4_0")
def _unpack_q4_0(data: np.ndarray) -> np.ndarray:
    return half(data, 0) * (nibbles(data, 2).view(np.int8) - np.int8(8))


@_reads("Q4_1")
def _unpack_q4_1(data: np.ndarray) -> np.ndarray:
    return half(data, 0) * nibbles(data, 4) + half(data, 2)


@_reads("Q5_0")
def _unpack_q5_0(data: np.ndarray) -> np.ndarray:
    return half(data, 0) * ((nibbles(data, 6) | fifth_bits(data, 2)).view(np.int8) - np.int8(16))


@_reads("Q5_1")
def _unpack_q5_1(data: np.ndarray) -> np.ndarray:
    return half(data, 0) * (nibbles(data, 8) | fifth_bits(data, 4)) + half(data, 2)


# --- K-quants: blocks of 256 in sub-blocks of 16 or 32, whose scales are small integers times one float16 of the block


@_reads("Q2_K")
def _unpack_q2_k(data: np.ndarray) -> np.ndarray:
    scales = data[:, :16]  # low nibble: scale, high nibble: minimum, of 16 elements each
    scale = half(data, 80) * (scales & 15)
    minimum = half(data, 82) * (scales >> 4)
    quants = bit_planes(data, 16, groups=2, width=32, bits=2).reshape(-1, 16, 16)
    return (scale[:, :, None] * quants - minimum[:, :, None]).reshape(-1, 256)


@_reads("Q3_K")
def _unpack_q3_k(data: np.ndarray) -> np.ndarray:
    low = bit_planes(data, 32, groups=2, width=32, bits=2).reshape(-1, 256)
    high = bit_planes(data, 0, groups=1, width=32, bits=1).reshape(-1, 256)
    quants = (low | (high << 2)).view(np.int8) - np.int8(4)
    packed = data[:, 96:108]  # 16 scales of 6 bits: 8 bytes of low nibbles, then 4 bytes of two high bits each
    low_bits = bit_planes(packed, 0, groups=1, width=8, bits=4).reshape(-1, 16)
    high_bits = bit_planes(packed, 8, groups=1, width=4, bits=2).reshape(-1, 16)
    scale: Floats = half(data, 108) * ((low_bits | (high_bits << 4)).view(np.int8) - np.int8(32))
    return (scale[:, :, None] * quants.reshape(-1, 16, 16)).reshape(-1, 256)


def _scales_and_minimums(data: np.ndarray) -> tuple[Floats, Floats]:
    """The first 16 bytes of Q4_K and Q5_K, d, dmin and eight 6-bit scales and minimums in 12 bytes -> two float32 [N, 8].

    Scales and minimums 0..3 are the low 6 bits of bytes 0..3 and 4..7; those of 4..7 have their low nibbles in bytes 8..11 and their
    two high bits in the top bits of bytes 0..3 and 4..7.
    """
    first, second, rest = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=1)
    return half(data, 0) * scales, half(data, 2) * minimums


@_reads("Q4_K")
def _unpack_q4_k(data: np.ndarray) -> np.ndarray:
    scale, minimum = _scales_and_minimums(data)
    quants = bit_planes(data, 16, groups=4, width=32, bits=4).reshape(-1, 8, 32)
    return (scale[:, :, None] * quants - minimum[:, :, None]).reshape(-1, 256)


@_reads("Q5_K")
def _unpack_q5_k(data: np.ndarray) -> np.ndarray:
    scale, minimum = _scales_and_minimums(data)
    low = bit_planes(data, 48, groups=4, width=32, bits=4).reshape(-1, 8, 32)
    high = bit_planes(data, 16, groups=1, width=32, bits=1).reshape(-1, 8, 32)
    return (scale[:, :, None] * (low | (high << 4)) - minimum[:, :, None]).reshape(-1, 256)


@_reads("Q6_K")
def _unpack_q6_k(data: np.ndarray) -> np.ndarray:
    low = bit_planes(data, 0, groups=2, width=64, bits=4).reshape(-1, 256)
    high = bit_planes(data, 128, groups=2, width=32, bits=2).reshape(-1, 256)
    quants = (low | (high << 4)).view(np.int8) - np.int8(32)
    scale = half(data, 208) * data[:, 192:208].view(np.int8)
    return (scale[:, :, None] * quants.reshape(-1, 16, 16)).reshape(-1, 256)


# --- sixteen values by a table


def _values(name: str, quants: Bytes) -> Floats:
    """The numbers that quants stand for, float32 of the same shape."""
    table: Floats = np.array(FORMATS[name].values, np.float32)
    return table[quants]


@_reads("IQ4_NL")
def _unpack_iq4_nl(data: np.ndarray) -> np.ndarray:
    return half(data, 0) * _values("IQ4_NL", nibbles(data, 2))


@_reads("IQ4_XS")
def _unpack_iq4_xs(data: np.ndarray) -> np.ndarray:
    low_bits = bit_planes(data, 4, groups=4, width=1, bits=4).reshape(-1, 8)
    high_bits = bit_planes(data, 2, groups=2, width=1, bits=2).reshape(-1, 8)
    scale = half(data, 0) * ((low_bits | (high_bits << 4)).view(np.int8) - np.int8(32))
    quants = bit_planes(data, 8, groups=8, width=16, bits=4).reshape(-1, 8, 32)
    return (scale[:, :, None] * _values("IQ4_XS", quants)).reshape(-1, 256)


@_reads("MXFP4")
def _unpack_mxfp4(data: np.ndarray) -> np.ndarray:
    """The exponent of e8m0 is one less here, because the values are twice those of e2m1."""
    scale = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 128)
    return (scale * _values("MXFP4", nibbles(data, 1))).astype(np.float32)


_READERS.update({name: partial(unpack_groups, FORMATS[name]) for name in GROUPED})
_READERS.update(SMALL_FLOAT_READERS)


# --- writers of floats; those of packed blocks are in quant/quantizers.py


@_writes("F32")
def _pack_f32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint8)


@_writes("F16")
def _pack_f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8)


@_writes("BF16")
def _pack_bf16(values: np.ndarray) -> np.ndarray:
    return f32_to_bf16(values).view(np.uint8)
