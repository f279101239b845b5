"""What stored numbers mean: the table of tensor formats, and how to unpack and pack their blocks.

A tensor in a file is a row of blocks; a block is some bytes that stand for some numbers. This file knows the blocks (ggml's layouts,
and the three plain float formats as blocks of one number). It knows no files, no shapes and no devices. It is also the oracle that the
packed kernels are tested against, so it is written to be read: one function a format, plain numpy, float32 out.

numpy has no bfloat16: its bits travel as uint16. Everything is little endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinyvllm.errors import FormatError

Unpack = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class BlockFormat:
    """One way of storing numbers. `elements` numbers take `nbytes` bytes.

    `type_id` is ggml's number for it. `unpack` turns uint8 [N, nbytes] into float32 [N, elements]; `pack` is its nearest inverse.
    Where `unpack` is None only the size is known: a file may hold such tensors, but no model can be made from them.
    """

    name: str
    type_id: int
    elements: int
    nbytes: int
    unpack: Unpack | None = None
    pack: Unpack | None = None


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


def _unpack_f32(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float32)


def _unpack_f16(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _unpack_bf16(data: np.ndarray) -> np.ndarray:
    return bf16_to_f32(np.ascontiguousarray(data).view(np.uint16))


# --- blocks of 32, one scale (and one minimum) each


def _half(data: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of every block -> float32 [N, 1]."""
    return np.ascontiguousarray(data[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray, start: int) -> np.ndarray:
    """16 bytes from `start` -> uint8 [N, 32]: the low halves are elements 0..15, the high halves 16..31."""
    packed = data[:, start : start + 16]
    out = np.empty((len(data), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])
    return out.reshape(-1, 32)


def _fifth_bits(data: np.ndarray, start: int) -> np.ndarray:
    """4 bytes from `start`, bit i for element i -> uint8 [N, 32] of 0 or 16."""
    return np.unpackbits(data[:, start : start + 4], axis=1, bitorder="little") << 4


def _unpack_q8_0(data: np.ndarray) -> np.ndarray:
    return _half(data, 0) * data[:, 2:].view(np.int8)


def _unpack_q4_0(data: np.ndarray) -> np.ndarray:
    return _half(data, 0) * (_nibbles(data, 2).view(np.int8) - np.int8(8))


def _unpack_q4_1(data: np.ndarray) -> np.ndarray:
    return _half(data, 0) * _nibbles(data, 4) + _half(data, 2)


def _unpack_q5_0(data: np.ndarray) -> np.ndarray:
    return _half(data, 0) * ((_nibbles(data, 6) | _fifth_bits(data, 2)).view(np.int8) - np.int8(16))


def _unpack_q5_1(data: np.ndarray) -> np.ndarray:
    return _half(data, 0) * (_nibbles(data, 8) | _fifth_bits(data, 4)) + _half(data, 2)


# --- blocks of 256 in sub-blocks of 16 or 32 ("K-quants"): the sub-blocks' scales are small integers times one float16 of the block


def _bit_planes(data: np.ndarray, start: int, groups: int, width: int, bits: int) -> np.ndarray:
    """`groups` runs of `width` bytes from `start`, each byte holding 8/bits numbers -> uint8 [N, groups, 8/bits, width].

    The lowest bits of a whole run come first: number j of byte w is element j * width + w of its group.
    """
    packed = data[:, start : start + groups * width].reshape(-1, groups, 1, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (packed >> shifts) & np.uint8((1 << bits) - 1)


def _unpack_q2_k(data: np.ndarray) -> np.ndarray:
    scales = data[:, :16]  # low half the scale, high half the minimum, of 16 elements each
    scale = _half(data, 80) * (scales & 15)
    minimum = _half(data, 82) * (scales >> 4)
    quants = _bit_planes(data, 16, groups=2, width=32, bits=2).reshape(-1, 16, 16)
    return (scale[:, :, None] * quants - minimum[:, :, None]).reshape(-1, 256)


def _unpack_q3_k(data: np.ndarray) -> np.ndarray:
    low = _bit_planes(data, 32, groups=2, width=32, bits=2).reshape(-1, 256)
    high = _bit_planes(data, 0, groups=1, width=32, bits=1).reshape(-1, 256)
    quants = (low | (high << 2)).view(np.int8) - np.int8(4)
    packed = data[:, 96:108]  # 16 scales of 6 bits: 8 bytes of low halves, then 4 bytes of two high bits each
    low_bits = _bit_planes(packed, 0, groups=1, width=8, bits=4).reshape(-1, 16)
    high_bits = _bit_planes(packed, 8, groups=1, width=4, bits=2).reshape(-1, 16)
    scale = _half(data, 108) * ((low_bits | (high_bits << 4)).view(np.int8) - np.int8(32))
    return (scale[:, :, None] * quants.reshape(-1, 16, 16)).reshape(-1, 256)


def _scales_and_minimums(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The head of Q4_K and Q5_K, d, dmin and 12 bytes with eight 6-bit scales and minimums -> two float32 [N, 8].

    Scales and minimums 0..3 are the low 6 bits of bytes 0..3 and 4..7; those of 4..7 have their low halves in bytes 8..11 and their
    two high bits on top of bytes 0..3 and 4..7.
    """
    first, second, rest = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=1)
    return _half(data, 0) * scales, _half(data, 2) * minimums


def _unpack_q4_k(data: np.ndarray) -> np.ndarray:
    scale, minimum = _scales_and_minimums(data)
    quants = _bit_planes(data, 16, groups=4, width=32, bits=4).reshape(-1, 8, 32)
    return (scale[:, :, None] * quants - minimum[:, :, None]).reshape(-1, 256)


def _unpack_q5_k(data: np.ndarray) -> np.ndarray:
    scale, minimum = _scales_and_minimums(data)
    low = _bit_planes(data, 48, groups=4, width=32, bits=4).reshape(-1, 8, 32)
    high = _bit_planes(data, 16, groups=1, width=32, bits=1).reshape(-1, 8, 32)
    return (scale[:, :, None] * (low | (high << 4)) - minimum[:, :, None]).reshape(-1, 256)


def _unpack_q6_k(data: np.ndarray) -> np.ndarray:
    low = _bit_planes(data, 0, groups=2, width=64, bits=4).reshape(-1, 256)
    high = _bit_planes(data, 128, groups=2, width=32, bits=2).reshape(-1, 256)
    quants = (low | (high << 4)).view(np.int8) - np.int8(32)
    scale = _half(data, 208) * data[:, 192:208].view(np.int8)
    return (scale[:, :, None] * quants.reshape(-1, 16, 16)).reshape(-1, 256)


# --- packing, as llama.cpp's reference quantizer does it


def _pack_f32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint8)


def _pack_f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8)


def _pack_bf16(values: np.ndarray) -> np.ndarray:
    return f32_to_bf16(values).view(np.uint8)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 for a scale of 0 (a block of zeros)."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _pack_q8_0(values: np.ndarray) -> np.ndarray:
    """Scale by the largest magnitude / 127, round half away from zero."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scale)
    magnitude = np.abs(scaled)
    rounded = np.floor(magnitude)
    rounded += magnitude - rounded >= 0.5  # not floor(x + 0.5): that addition itself rounds
    quants = np.copysign(rounded, scaled).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), quants.view(np.uint8)], axis=1)


def _pack_q4_0(values: np.ndarray) -> np.ndarray:
    """Scale so that the value of largest magnitude becomes -8 (the range is -8..7), round half up."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    quants = (values * _inverse(scale) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    nibbles = quants[:, :16] | (quants[:, 16:] << 4)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), nibbles], axis=1)


# --- the table


FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("F32", 0, 1, 4, _unpack_f32, _pack_f32),
        BlockFormat("F16", 1, 1, 2, _unpack_f16, _pack_f16),
        BlockFormat("BF16", 30, 1, 2, _unpack_bf16, _pack_bf16),
        BlockFormat("Q4_0", 2, 32, 18, _unpack_q4_0, _pack_q4_0),  # f16 d | 16 bytes of nibbles
        BlockFormat("Q4_1", 3, 32, 20, _unpack_q4_1),  # f16 d | f16 m | 16 bytes of nibbles
        BlockFormat("Q5_0", 6, 32, 22, _unpack_q5_0),  # f16 d | 32 fifth bits | 16 bytes of nibbles
        BlockFormat("Q5_1", 7, 32, 24, _unpack_q5_1),  # f16 d | f16 m | 32 fifth bits | 16 bytes of nibbles
        BlockFormat("Q8_0", 8, 32, 34, _unpack_q8_0, _pack_q8_0),  # f16 d | 32 int8
        BlockFormat("Q2_K", 10, 256, 84, _unpack_q2_k),  # 16 x (scale, min) of 4 bits | 256 x 2 bits | f16 d | f16 dmin
        BlockFormat("Q3_K", 11, 256, 110, _unpack_q3_k),  # 256 third bits | 256 x 2 bits | 16 x 6-bit scales | f16 d
        BlockFormat("Q4_K", 12, 256, 144, _unpack_q4_k),  # f16 d | f16 dmin | 8 x 6-bit (scale, min) | 256 x 4 bits
        BlockFormat("Q5_K", 13, 256, 176, _unpack_q5_k),  # as Q4_K, with 256 fifth bits before the nibbles
        BlockFormat("Q6_K", 14, 256, 210, _unpack_q6_k),  # 256 x 4 low bits | 256 x 2 high bits | 16 x int8 scales | f16 d
        # Known by size alone.
        BlockFormat("Q8_1", 9, 32, 40),
        BlockFormat("Q8_K", 15, 256, 292),
        BlockFormat("IQ2_XXS", 16, 256, 66),
        BlockFormat("IQ2_XS", 17, 256, 74),
        BlockFormat("IQ3_XXS", 18, 256, 98),
        BlockFormat("IQ1_S", 19, 256, 50),
        BlockFormat("IQ4_NL", 20, 32, 18),
        BlockFormat("IQ3_S", 21, 256, 110),
        BlockFormat("IQ2_S", 22, 256, 82),
        BlockFormat("IQ4_XS", 23, 256, 136),
        BlockFormat("I8", 24, 1, 1),
        BlockFormat("I16", 25, 1, 2),
        BlockFormat("I32", 26, 1, 4),
        BlockFormat("I64", 27, 1, 8),
        BlockFormat("F64", 28, 1, 8),
        BlockFormat("IQ1_M", 29, 256, 56),
        BlockFormat("TQ1_0", 34, 256, 54),
        BlockFormat("TQ2_0", 35, 256, 66),
        BlockFormat("MXFP4", 39, 32, 17),
        BlockFormat("NVFP4", 40, 64, 36),
    )
}
FORMATS_BY_TYPE_ID: dict[int, BlockFormat] = {f.type_id: f for f in FORMATS.values()}


def readable_formats() -> list[str]:
    return [f.name for f in FORMATS.values() if f.unpack is not None]


def unpack(name: str, data: np.ndarray) -> np.ndarray:
    """uint8 [N, nbytes] blocks of the named format -> float32 [N, elements]. FormatError for a format that has no reader."""
    known = FORMATS.get(name)
    if known is None or known.unpack is None:
        raise FormatError(f"formats: {name} cannot be unpacked; readable are {', '.join(readable_formats())}")
    with np.errstate(all="ignore"):  # infinite or NaN scales give infinite or NaN numbers, as stored
        return known.unpack(data)
