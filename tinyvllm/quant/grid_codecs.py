"""Readers of formats below four bits that no kernel multiplies: grids with signs (IQ1, IQ2, IQ3), ternary and binary numbers, and NVFP4.

`READERS` has a numpy function a format, as quant/codecs.py describes them. Blocks have 256 weights, in parts with a small integer scale;
of TQ, Q1_0 and NVFP4 see each. Numbers are exact: a product of float16 by small integers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinyvllm.quant.bits import Bytes, Floats, bit_planes, half, words
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.grids import grid

_IQ1_SHIFT = np.float32(0.125)  # added to or subtracted from all eight numbers of a vector of IQ1
_EIGHTHS = np.arange(8, dtype=np.uint8)

READERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {}


def _reads(name: str) -> Callable[[Callable[[np.ndarray], np.ndarray]], Callable[[np.ndarray], np.ndarray]]:
    def register(codec: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        READERS[name] = codec
        return codec

    return register


def _signs(masks: np.ndarray) -> Floats:
    """uint8 [...] -> float32 [..., 8]: -1 where the bit of the element is set, else 1."""
    table: Floats = np.where(np.arange(256, dtype=np.uint8)[:, None] >> _EIGHTHS & 1, np.float32(-1), np.float32(1))
    signs: Floats = table[masks]
    return signs


def _even_signs(indices: np.ndarray) -> Floats:
    """Seven bits [...] -> signs float32 [..., 8]: the eighth makes the number of minuses even."""
    masks = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(masks[:, None], axis=1).sum(axis=1).astype(np.uint8) & 1
    table: Floats = _signs((masks | parity << 7).astype(np.uint8))
    signs: Floats = table[indices]
    return signs


def _nibble_pairs(data: Bytes) -> Bytes:
    """uint8 [N, n] -> [N, 2 n]: the low nibble of each byte, then its high one."""
    return np.stack([data & 15, data >> 4], axis=2).reshape(len(data), 2 * data.shape[1])


def _scaled(scales: np.ndarray, vectors: np.ndarray) -> Floats:
    """Vectors [N, n, w], in parts of equal size that share a scale [N, parts] -> float32 [N, n w]."""
    count = vectors.shape[1] * vectors.shape[2]
    parts = vectors.reshape(*scales.shape, count // scales.shape[1])
    parts *= scales[:, :, None]
    return parts.reshape(len(vectors), count)


@_reads("IQ2_XXS")
def _unpack_iq2_xxs(data: np.ndarray) -> np.ndarray:
    """Eight parts of 32: four bytes of indices, then a word of four times seven bits of signs and four bits of scale."""
    pairs = words(data, 2, 64, np.uint32).reshape(-1, 8, 2)
    indices, packed = np.ascontiguousarray(pairs[:, :, 0]).view(np.uint8), pairs[:, :, 1]
    signs = (packed[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127).reshape(-1, 32)
    scales = half(data, 0) * (np.float32(0.5) + (packed >> 28).astype(np.float32)) * np.float32(0.25)
    return _scaled(scales, grid("IQ2_XXS")[indices] * _even_signs(signs))


@_reads("IQ2_XS")
def _unpack_iq2_xs(data: np.ndarray) -> np.ndarray:
    """A word of 16 bits has the index of a vector, nine bits, and seven bits of signs; a nibble scales 16 weights."""
    packed = words(data, 2, 64, np.uint16)
    scales = half(data, 0) * (np.float32(0.5) + _nibble_pairs(data[:, 66:74])) * np.float32(0.25)
    return _scaled(scales, grid("IQ2_XS")[packed & 511] * _even_signs(packed >> 9))


@_reads("IQ2_S")
def _unpack_iq2_s(data: np.ndarray) -> np.ndarray:
    """32 low bytes of indices, 32 bytes of signs, then two high bits of each index and a nibble that scales 16 weights."""
    high = (data[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 32).astype(np.uint16)
    scales = half(data, 0) * (np.float32(0.5) + _nibble_pairs(data[:, 74:82])) * np.float32(0.25)
    return _scaled(scales, grid("IQ2_S")[data[:, 2:34] | high << 8] * _signs(data[:, 34:66]))


@_reads("IQ3_XXS")
def _unpack_iq3_xxs(data: np.ndarray) -> np.ndarray:
    """64 indices of vectors of four, then for each 32 weights a word as IQ2_XXS has it."""
    packed = words(data, 66, 32, np.uint32)
    signs = (packed[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127).reshape(-1, 32)
    scales = half(data, 0) * (np.float32(0.5) + (packed >> 28).astype(np.float32)) * np.float32(0.5)
    return _scaled(scales, grid("IQ3_XXS")[data[:, 2:66]].reshape(-1, 32, 8) * _even_signs(signs))


@_reads("IQ3_S")
def _unpack_iq3_s(data: np.ndarray) -> np.ndarray:
    """64 low bytes of indices, their ninth bits, 32 bytes of signs, and nibbles that scale 32 weights by 2 s + 1."""
    ninth = np.unpackbits(data[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    scales = half(data, 0) * (1 + 2 * _nibble_pairs(data[:, 106:110])).astype(np.float32)
    return _scaled(scales, grid("IQ3_S")[data[:, 2:66] | ninth << 8].reshape(-1, 32, 8) * _signs(data[:, 74:106]))


@_reads("IQ1_S")
def _unpack_iq1_s(data: np.ndarray) -> np.ndarray:
    """32 low bytes of indices; a word for each 32 weights has three high bits of four indices, the scale, and the shift's sign."""
    packed = words(data, 34, 16, np.uint16)
    high = (packed[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    shift = np.where(packed >> 15, -_IQ1_SHIFT, _IQ1_SHIFT).repeat(4, axis=1)
    scales = half(data, 0) * (2 * (packed >> 12 & 7) + 1).astype(np.float32)
    return _scaled(scales, grid("IQ1_S")[data[:, 2:34] | high << 8] + shift[:, :, None])


@_reads("IQ1_M")
def _unpack_iq1_m(data: np.ndarray) -> np.ndarray:
    """As IQ1_S with a nibble a vector for its high bits and its shift's sign, and three bits of scale for 16 weights.

    The float16 of the block is in the highest nibbles of the four words of scales, lowest nibble first.
    """
    packed = words(data, 48, 8, np.uint16)
    bits = (packed >> 12) << np.arange(0, 16, 4, dtype=np.uint16)
    scale = np.bitwise_or.reduce(bits, axis=1).view(np.float16).astype(np.float32)[:, None]
    scales = scale * (2 * (packed[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7) + 1).reshape(-1, 16).astype(np.float32)
    high = _nibble_pairs(data[:, 32:48])
    shift = np.where(high & 8, -_IQ1_SHIFT, _IQ1_SHIFT)
    return _scaled(scales, grid("IQ1_S")[data[:, :32] | (high & 7).astype(np.uint16) << 8] + shift[:, :, None])


# --- numbers of one or two values, and NVFP4


@_reads("TQ1_0")
def _unpack_tq1_0(data: np.ndarray) -> np.ndarray:
    """Five ternary digits a byte (the last four bytes: four), as a fraction of 256: the digit is what passes 256 when it is tripled."""
    digits = [_digits(data[:, :32], 5), _digits(data[:, 32:48], 5), _digits(data[:, 48:52], 4)]
    numbers: Floats = half(data, 52) * np.concatenate(digits, axis=1)
    return numbers


def _digits(data: Bytes, count: int) -> np.ndarray:
    """uint8 [N, n] -> int8 [N, count n] of -1, 0, 1: the first digits of all bytes, then the second ones."""
    fractions = data[:, None, :] * (np.uint8(3) ** np.arange(count, dtype=np.uint8))[:, None]
    digits = (fractions.astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)
    joined: np.ndarray = digits.reshape(len(data), count * data.shape[1])
    return joined


@_reads("TQ2_0")
def _unpack_tq2_0(data: np.ndarray) -> np.ndarray:
    quants = bit_planes(data, 0, groups=2, width=32, bits=2).reshape(-1, 256)
    return half(data, 64) * (quants.view(np.int8) - np.int8(1))


@_reads("Q1_0")
def _unpack_q1_0(data: np.ndarray) -> np.ndarray:
    """128 bits: the scale where one is set, else its negative."""
    scale = half(data, 0)
    return np.where(np.unpackbits(data[:, 2:18], axis=1, bitorder="little"), scale, -scale)


@_reads("NVFP4")
def _unpack_nvfp4(data: np.ndarray) -> np.ndarray:
    """Four parts of 16 floats of 4 bits, each with a scale of e4m3 without a sign; low nibbles are a part's first eight weights."""
    values = np.array(FORMATS["NVFP4"].values, np.float32)
    packed = data[:, 4:36].reshape(-1, 4, 8)
    parts = values[np.concatenate([packed & 15, packed >> 4], axis=2)]
    return _scaled(_half_e4m3(data[:, :4]), parts)


def _half_e4m3(data: Bytes) -> Floats:
    """Half the number that each byte is in e4m3 without its sign, because the values are doubled; 0 for 127, which is no number."""
    exponent, fraction = (data >> 3 & 15).astype(np.int32), (data & 7).astype(np.float32)
    mantissa = np.where(exponent > 0, 8 + fraction, fraction)
    numbers = np.ldexp(mantissa, np.maximum(exponent, 1) - 11).astype(np.float32)
    return np.where(data == 127, np.float32(0), numbers)
