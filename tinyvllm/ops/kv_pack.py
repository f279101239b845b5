"""Packed keys and values in tinygrad: the portable path of stores and of attention. tinyvllm/quant/kv.py says what the bytes mean."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.batch import KVLayout, LayerCache
from tinyvllm.quant.kv import LIMITS, NAN_SCALE, ZERO_BELOW, is_rotated, rotation_size, scale_step

_INFINITY = 0x7F800000
_WHOLE = 1.5 * 2.0**23  # added to a small float32, this rounds it to a whole number, which is then in the lowest bits


def rotated(x: Tensor) -> Tensor:
    """float32 [..., D] times the symmetric Hadamard matrix of its blocks, in the order of `rotate` in quant/kv.py."""
    shape, size, distance = tuple(int(d) for d in x.shape), rotation_size(int(x.shape[-1])), 1
    while distance < size:
        a, b = (half.squeeze(-2) for half in x.reshape(*shape[:-1], -1, 2, distance).split(1, -2))
        x, distance = Tensor.stack(a + b, a - b, dim=-2).reshape(shape).contiguous(), 2 * distance
    return x.mul(float(size**-0.5))


def queries_for(cache: LayerCache, q: Tensor) -> Tensor:
    """q [T, H, D] as attention over the cache takes them: rotated as its keys are."""
    return rotated(q).contiguous() if cache.packed and is_rotated(cache.packed.format, keys=True) else q


def packed_rows(format: str, x: Tensor, keys: bool) -> Tensor:
    """uint8 [..., bytes + 2] of keys or values float32 [..., D]: the quants of each row, and then its scale."""
    x = rotated(x).contiguous() if is_rotated(format, keys) else x
    top = (x.bitcast(dtypes.uint32) & 0x7FFFFFFF).max(-1, keepdim=True)
    finite = top < _INFINITY
    usable = finite & (top >= _bits(ZERO_BELOW))
    bits = (usable.where(top, 0).bitcast(dtypes.float32) * float(scale_step(format, keys))).bitcast(dtypes.uint32)
    scale = finite.where((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, NAN_SCALE).contiguous()
    inverse = usable.where(usable.where((scale << 16).bitcast(dtypes.float32), 1.0).reciprocal(), 0.0)
    limit = LIMITS[format]
    # the limits change nothing that was not above them by a rounding, and keep a compiler from fusing the product with what follows
    y = (finite.where(x, 0.0) * inverse).maximum(-limit).minimum(limit)
    parts = _quants(format, y), (scale & 255).cast(dtypes.uint8), (scale >> 8).cast(dtypes.uint8)
    return parts[0].cat(*parts[1:], dim=-1).contiguous()


def _quants(format: str, y: Tensor) -> Tensor:
    if format == "KV_INT8":
        return ((y + _WHOLE).bitcast(dtypes.uint32) + 128).cast(dtypes.uint8)
    if format == "KV_FP8":
        bits = y.bitcast(dtypes.uint32)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = (size.bitcast(dtypes.float32) + 2.0**14).bitcast(dtypes.uint32) - _bits(2.0**14)
        return ((size < _bits(2.0**-6)).where(small, normal) | ((bits >> 24) & 0x80)).cast(dtypes.uint8)
    # the maximum keeps tinygrad from adding the two constants first
    numbers = ((y + LIMITS[format]).maximum(0.0) + _WHOLE).bitcast(dtypes.uint32) & 15
    low, high = numbers.chunk(2, -1)
    return (low | (high << 4)).cast(dtypes.uint8)


def unpacked(cache: LayerCache, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values float32 [B, m, K, S, D] of the blocks tables [B, m], as they were packed."""
    layout = cache.packed
    assert layout is not None
    K, S, N = layout.K, layout.S, layout.row_bytes
    P, side = int(cache.keys.shape[0]), K * S * N
    keys = cache.keys[:, :side].reshape(P, K, N // 4, S, 4).permute(0, 1, 3, 2, 4)  # [P, K, S, N / 4, 4]
    values = cache.values[:, side : 2 * side].reshape(P, K, S // 4, N, 4).permute(0, 1, 2, 4, 3)  # [P, K, S / 4, 4, N]
    sides = []
    for i, (pool, quants) in enumerate(zip(cache, (keys, values), strict=True)):
        scales = pool[:, layout.scales :].reshape(P, 2, K, S, 2)[:, i][tables]  # [B, m, K, S, 2]
        bits = scales[..., 0:1].cast(dtypes.uint32) << 16 | scales[..., 1:2].cast(dtypes.uint32) << 24
        held = quants[tables]
        held = held.reshape(*held.shape[:2], K, S, N)
        sides.append(_numbers(layout, held) * bits.bitcast(dtypes.float32))
    return sides[0], sides[1]


def _numbers(layout: KVLayout, quants: Tensor) -> Tensor:
    """float32 [..., D] that bytes [..., N] stand for, without their scale."""
    if layout.format == "KV_INT8":
        return quants.cast(dtypes.float32) - 128
    if layout.format == "KV_INT4":
        halves = quants.unsqueeze(-2) >> Tensor([[0], [4]], dtype=dtypes.uint8, device=quants.device)
        return ((halves & 15).cast(dtypes.float32) - LIMITS["KV_INT4"]).reshape(*quants.shape[:-1], layout.D)
    bits = quants.cast(dtypes.uint32)
    size = bits & 0x7F
    normal = (((size << 20) + (120 << 23)) | ((bits & 0x80) << 24)).bitcast(dtypes.float32)
    small = (size.cast(dtypes.float32) * 2.0**-9) * (bits >= 0x80).where(-1.0, 1.0)
    return (size < 8).where(small, normal)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))
