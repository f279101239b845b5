"""Packed keys and values in numpy: what the bytes of a packed KV cache mean. The specification of the kernels, and the tests' oracle.

A row is one key or value of one token and head, D float32. It has one scale, a bfloat16, and depends on nothing else:

    KV_INT8  byte = 128 + round(x / scale), scale = max|x| / 127
    KV_FP8   byte = x / scale as float8 e4m3 (4 bits of exponent, no infinity), scale = max|x| / 448
    KV_INT4  (n - 7.5) * scale for n from 0 to 15, scale = max|x| / 7.5; byte i holds numbers i and i + D / 2, the first in its low bits.
             A key is rotated first, by a Hadamard matrix in blocks of the largest power of two that divides D, at most 256, and its
             scale is CLIP times that

All is float32, rounded to nearest, ties to even: the scale to bfloat16, then x * (1 / scale). A maximum below 2^-100 gives scale 0, and the
row reads back as zeros. A row with a NaN or an infinity gets a NaN as scale and reads back as NaNs, as one of them makes every score NaN.
The range of a bfloat16 is float32's, so no scale overflows.

Rotation by a Hadamard matrix before quantizing: QuaRot (Ashkboos et al., arXiv:2404.00456).
"""

from __future__ import annotations

import numpy as np

from tinyvllm.quant.small_floats import e4m3_to_f32

KV_FORMATS = ("KV_FP8", "KV_INT8", "KV_INT4")
CLIP = 0.9375  # after the rotation few numbers are near the largest one
LIMITS = {"KV_FP8": 448.0, "KV_INT8": 127.0, "KV_INT4": 7.5}
ZERO_BELOW = 2.0**-100  # a smaller maximum has scale 0
NAN_SCALE = 0x7FC0
MAX_ROTATION = 256


def scale_step(format: str, keys: bool) -> np.float32:
    """The scale of a row whose largest number is 1."""
    return np.float32((CLIP if is_rotated(format, keys) else 1.0) / LIMITS[format])


def is_rotated(format: str, keys: bool) -> bool:
    """Whether rows are rotated before they are quantized, and read back rotated: the queries must be, too."""
    return keys and format == "KV_INT4"


def rotation_size(D: int) -> int:
    """Numbers of a row that are rotated together."""
    return min(D & -D, MAX_ROTATION)


def rotate(rows: np.ndarray) -> np.ndarray:
    """float32 [..., D] times the symmetric Hadamard matrix: sums and differences at distances 1, 2, 4, ..., then the factor."""
    size = rotation_size(rows.shape[-1])
    y, distance = np.asarray(rows, np.float32), 1
    while distance < size:
        pairs = y.reshape(*rows.shape[:-1], -1, 2, distance)
        y = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2).reshape(rows.shape)
        distance *= 2
    return y * np.float32(size**-0.5)


def pack_rows(format: str, rows: np.ndarray, keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """(quants uint8 [..., bytes], scales uint16 [...]) of keys or values float32 [..., D]."""
    with np.errstate(invalid="ignore", over="ignore"):
        rows = rotate(rows) if is_rotated(format, keys) else np.ascontiguousarray(rows, np.float32)
    top = (rows.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(-1)
    finite, tiny = top < 0x7F800000, top < np.float32(ZERO_BELOW).view(np.uint32)
    bits = (np.where(finite, top, 0).astype(np.uint32).view(np.float32) * scale_step(format, keys)).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    scales = np.where(finite, np.where(tiny, 0, rounded), NAN_SCALE).astype(np.uint16)
    usable = finite & ~tiny
    inverse = np.where(usable, np.float32(1) / np.where(usable, _float(scales), np.float32(1)), np.float32(0)).astype(np.float32)
    return _quants(format, np.where(finite[..., None], rows, np.float32(0)) * inverse[..., None]), scales


def _quants(format: str, scaled: np.ndarray) -> np.ndarray:
    limit = np.float32(LIMITS[format])
    scaled = np.clip(scaled, -limit, limit)
    if format == "KV_INT8":
        return np.asarray(np.rint(scaled) + 128).astype(np.uint8)
    if format == "KV_FP8":
        return e4m3_bytes(scaled)
    numbers, half = np.rint(scaled + limit).astype(np.uint8), scaled.shape[-1] // 2
    return np.asarray(numbers[..., :half] | numbers[..., half:] << 4)


def unpack_rows(format: str, quants: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [..., D], as they were packed: rotated keys stay rotated."""
    if format == "KV_INT8":
        numbers = quants.astype(np.float32) - 128
    elif format == "KV_FP8":
        numbers = e4m3_to_f32(quants)  # no store writes the codes of NaN
    else:
        numbers = np.concatenate([quants & 15, quants >> 4], axis=-1).astype(np.float32) - np.float32(7.5)
    return np.asarray(numbers * _float(scales)[..., None], np.float32)


def pack_blocks(format: str, numbers: np.ndarray) -> np.ndarray:
    """Blocks uint8 [P, bytes] of keys and values float32 [P, 2, K, S, D]. The layout is that of `KVLayout` (tinyvllm/batch.py)."""
    sides = [pack_rows(format, numbers[:, side], side == 0) for side in (0, 1)]
    (keys, _), (values, _) = sides
    P, K, S, N = keys.shape
    keys = keys.reshape(P, K, S, N // 4, 4).swapaxes(2, 3).reshape(P, -1)
    values = values.reshape(P, K, S // 4, 4, N).swapaxes(3, 4).reshape(P, -1)
    scales = np.stack([scales for _, scales in sides], axis=1)
    return np.concatenate([keys, values, scales.astype("<u2").reshape(P, -1).view(np.uint8)], axis=1)


def unpack_blocks(format: str, blocks: np.ndarray, K: int, S: int, D: int) -> np.ndarray:
    """float32 [P, 2, K, S, D] of blocks uint8 [P, bytes], as they were packed."""
    P, N = len(blocks), D // 2 if format == "KV_INT4" else D
    side = K * S * N
    keys = blocks[:, :side].reshape(P, K, N // 4, S, 4).swapaxes(2, 3).reshape(P, K, S, N)
    values = blocks[:, side : 2 * side].reshape(P, K, S // 4, N, 4).swapaxes(3, 4).reshape(P, K, S, N)
    scales = np.ascontiguousarray(blocks[:, 2 * side :]).view("<u2").reshape(P, 2, K, S)
    return unpack_rows(format, np.stack([keys, values], axis=1), scales)


def e4m3_bytes(numbers: np.ndarray) -> np.ndarray:
    """float8 e4m3 of float32 from -448 to 448, ties to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    normal = (size + np.uint32(0x7FFFF) + (size >> np.uint32(20) & np.uint32(1)) >> np.uint32(20)) - np.uint32(120 << 3)
    small = (size.view(np.float32) + np.float32(2.0**14)).view(np.uint32) - np.float32(2.0**14).view(np.uint32)  # in units of 2^-9
    return np.asarray(np.where(size < np.float32(2.0**-6).view(np.uint32), small, normal) | bits >> np.uint32(24) & np.uint32(0x80)).astype(
        np.uint8
    )


def _float(scales: np.ndarray) -> np.ndarray:
    return (np.asarray(scales).astype(np.uint32) << np.uint32(16)).view(np.float32)
