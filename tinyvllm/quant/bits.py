"""How formats place numbers in a block's bytes: half floats, nibbles, bit planes. Shared by the readers of all families."""

from __future__ import annotations

from typing import Any

import numpy as np

# As in numpy.typing, whose import takes 10 ms.
Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def half(data: np.ndarray, start: int) -> Floats:
    """The float16 at byte `start` of each block -> float32 [N, 1]."""
    return np.ascontiguousarray(data[:, start : start + 2]).view(np.float16).astype(np.float32)


def nibbles(data: np.ndarray, start: int) -> Bytes:
    """16 bytes from `start` -> uint8 [N, 32]: low nibbles are elements 0..15, high nibbles 16..31."""
    packed = data[:, start : start + 16]
    out = np.empty((len(data), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])
    return out.reshape(-1, 32)


def fifth_bits(data: np.ndarray, start: int) -> Bytes:
    """4 bytes from `start`, bit i for element i -> uint8 [N, 32] of 0 or 16."""
    return np.unpackbits(data[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def bit_planes(data: np.ndarray, start: int, groups: int, width: int, bits: int) -> Bytes:
    """`groups` runs of `width` bytes from `start`, each byte holding 8/bits numbers -> uint8 [N, groups, 8/bits, width].

    The lowest bits of a whole run come first: number j of byte w is element j * width + w of its group.
    """
    packed = data[:, start : start + groups * width].reshape(-1, groups, 1, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (packed >> shifts) & np.uint8((1 << bits) - 1)


def words(data: np.ndarray, start: int, nbytes: int, dtype: type[np.unsignedinteger]) -> np.ndarray[Any, np.dtype[np.unsignedinteger]]:
    """`nbytes` bytes from `start` of each block as little-endian integers [N, count]."""
    return np.ascontiguousarray(data[:, start : start + nbytes]).view(np.dtype(dtype).newbyteorder("<"))


def join_planes(quants: np.ndarray, groups: int, width: int, bits: int) -> Bytes:
    """The inverse of `bit_planes`: numbers [N, groups * 8/bits * width] below 2^bits -> uint8 [N, groups * width]."""
    planes = quants.astype(np.uint8).reshape(len(quants), groups, 8 // bits, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    joined: Bytes = np.bitwise_or.reduce(planes << shifts, axis=2).reshape(len(quants), -1)
    return joined


def half_bytes(values: np.ndarray) -> Bytes:
    """float32 [N] -> the bytes of their float16, uint8 [N, 2]."""
    return np.ascontiguousarray(values, np.float32).astype("<f2").reshape(-1, 1).view(np.uint8)
