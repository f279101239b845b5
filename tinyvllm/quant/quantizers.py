"""Writers of each packed format's blocks, with the rounding of llama.cpp's quantizer: the oracle of kernels/cpu/quantize.c.

`WRITERS` has a numpy function a format: float32 [N, weights of a block] and their importances, or None -> uint8 [N, bytes of a block]. The
importance of a weight is the mean square of the activation that multiplies it (llama.cpp's imatrix): with importances, errors are
weighted by them and by the size of the weight. The searches are in quant/search.py, the layouts in FORMATS and in quant/codecs.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.bits import Bytes, Floats, half_bytes, join_planes
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.search import (
    TINY,
    divided,
    largest,
    nearest_index,
    ordered_sum,
    positive_peak,
    positive_scale,
    refined_scale,
    rounded,
    scale_and_minimum,
    signed_scale,
    table_scale,
)


@dataclass(frozen=True)
class Importance:
    """Of N blocks: `columns` [N, weights], the importance of each, and `mean_square` [N], the mean of the squares of the block's row."""

    columns: np.ndarray
    mean_square: np.ndarray


Writer = Callable[[Floats, Importance | None], Bytes]
WRITERS: dict[str, Writer] = {}


def _writes(name: str) -> Callable[[Writer], Writer]:
    def register(writer: Writer) -> Writer:
        WRITERS[name] = writer
        return writer

    return register


def row_importance(rows: np.ndarray, importance: np.ndarray, width: int) -> Importance:
    """What the blocks of `width` weights of rows float32 [O, I] share, for importances float32 [I] of the columns."""
    squares = ordered_sum((rows * rows).T) / np.float32(rows.shape[1])
    blocks = rows.shape[1] // width
    return Importance(np.tile(importance.reshape(blocks, width), (len(rows), 1)), squares.repeat(blocks))


# --- one scale a block, rounded without a search


@_writes("Q8_0")
def _pack_q8_0(values: Floats, importance: Importance | None) -> Bytes:
    """Scale by the largest magnitude / 127, round half away from zero."""
    scale = np.abs(values).max(axis=1) / np.float32(127)
    scaled = values * divided(np.ones_like(scale), scale)[:, None]
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    whole += magnitude - whole >= 0.5  # not floor(x + 0.5): that addition itself rounds
    quants = np.copysign(whole, scaled).astype(np.int8)
    return np.concatenate([half_bytes(scale), quants.view(np.uint8)], axis=1)


def _signed(values: Floats, importance: Importance | None, levels: int) -> tuple[Floats, Bytes]:
    """Scales [N] and quants [N, 32] of Q4_0 and Q5_0: the value of largest magnitude becomes -levels, or what the search finds."""
    if importance is not None:
        scale, quants = signed_scale(values.T, levels, _row_weights(values, importance))
        return scale, quants.T.astype(np.uint8)
    scale = largest(values.T) / np.float32(-levels)
    raised = values * divided(np.ones_like(scale), scale)[:, None] + np.float32(levels + 0.5)
    return scale, raised.astype(np.uint8).clip(0, 2 * levels - 1)


def _shifted(values: Floats, importance: Importance | None, top: int) -> tuple[Floats, Floats, Bytes]:
    """Scales [N], offsets [N] and quants [N, 32] of Q4_1 and Q5_1: the range of the values, or what the search finds."""
    if importance is not None:
        scale, minimum, quants = scale_and_minimum(values.T, _row_weights(values, importance), top, -0.9, 0.05, 36)
        return scale, -minimum, quants.T.astype(np.uint8)
    low, high = values.min(axis=1), values.max(axis=1)
    scale = (high - low) / np.float32(top)
    raised = (values - low[:, None]) * divided(np.ones_like(scale), scale)[:, None] + np.float32(0.5)
    return scale, low, raised.astype(np.uint8).clip(0, top)


def _row_weights(values: Floats, importance: Importance) -> Floats:
    weights: Floats = importance.columns * np.sqrt(importance.mean_square[:, None] + values * values)
    return weights.T


def _nibbles(quants: Bytes) -> Bytes:
    return join_planes(quants & 15, groups=1, width=16, bits=4)


def _fifth(quants: Bytes) -> Bytes:
    return np.packbits(quants >> 4, axis=1, bitorder="little")


@_writes("Q4_0")
def _pack_q4_0(values: Floats, importance: Importance | None) -> Bytes:
    scale, quants = _signed(values, importance, 8)
    return np.concatenate([half_bytes(scale), _nibbles(quants)], axis=1)


@_writes("Q5_0")
def _pack_q5_0(values: Floats, importance: Importance | None) -> Bytes:
    scale, quants = _signed(values, importance, 16)
    return np.concatenate([half_bytes(scale), _fifth(quants), _nibbles(quants)], axis=1)


@_writes("Q4_1")
def _pack_q4_1(values: Floats, importance: Importance | None) -> Bytes:
    scale, offset, quants = _shifted(values, importance, 15)
    return np.concatenate([half_bytes(scale), half_bytes(offset), _nibbles(quants)], axis=1)


@_writes("Q5_1")
def _pack_q5_1(values: Floats, importance: Importance | None) -> Bytes:
    scale, offset, quants = _shifted(values, importance, 31)
    return np.concatenate([half_bytes(scale), half_bytes(offset), _fifth(quants), _nibbles(quants)], axis=1)


@_writes("MXFP4")
def _pack_mxfp4(values: Floats, importance: Importance | None) -> Bytes:
    """The largest magnitude gets the exponent of 4, the power of two below the largest number; halfway, the smaller magnitude."""
    peak = np.abs(values).max(axis=1)
    exponent = np.where(peak > 0, np.frexp(peak)[1] - 1 - 2 + 127, 0).clip(0, 254)
    table = np.array(FORMATS["MXFP4"].values[:8], np.float32)
    middles = (table[:-1] + table[1:]) / 2
    scaled = np.ldexp(values.astype(np.float64), 128 - exponent[:, None])
    quants = np.searchsorted(middles, np.abs(scaled), side="left").astype(np.uint8)
    quants |= ((scaled < 0) & (quants > 0)).astype(np.uint8) << 3
    return np.concatenate([exponent.astype(np.uint8)[:, None], _nibbles(quants)], axis=1)


# --- blocks of 256: scales of parts are integers times one float16


def _groups(values: np.ndarray, width: int) -> np.ndarray:
    """Blocks [N, 256] -> [width, N * 256 / width]."""
    return np.ascontiguousarray(values.reshape(-1, width).T)


def _blocks(groups: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `_groups`."""
    return np.ascontiguousarray(groups.T).reshape(-1, 256)


def _block_weights(values: Floats, importance: Importance, factor: int) -> Floats:
    """importance * sqrt(s + x^2) [N, 256], where s is `factor` times the mean square of the block."""
    mean = np.float32(factor) * ordered_sum((values * values).T) / np.float32(256)
    weights: Floats = importance.columns * np.sqrt(mean[:, None] + values * values)
    return weights


def _requantized(x: Floats, scale: Floats, minimum: Floats, quants: Floats, low: int, high: int) -> Floats:
    """Quants of groups [n, G] by the scales as stored; those of the search where a scale is 0."""
    again = rounded(divided(x + minimum, np.broadcast_to(scale, x.shape)), low, high)
    return np.where(scale == 0, quants, again)


def _stored(scale: Floats) -> Floats:
    """The float16 of each number as float32."""
    return scale.astype(np.float16).astype(np.float32)


def _two_scales(scale: Floats, minimum: Floats, top: int, weights: Floats | None) -> tuple[Floats, Floats, Floats, Floats]:
    """From a block's scales and minimums [parts, N]: the two float16 [N], and their integers from 0 to `top` [parts, N]."""
    halves, integers = [], []
    for numbers in (scale, minimum):
        if weights is not None:
            best, whole = positive_scale(numbers, top, weights)
        else:
            peak = positive_peak(numbers)
            best, whole = peak / np.float32(top), rounded(divided(np.full_like(peak, top), peak) * numbers, 0, top)
        halves.append(best)
        integers.append(whole)
    return halves[0], halves[1], integers[0], integers[1]


def _minimum_parts(
    values: Floats, importance: Importance | None, width: int, top: int, scales_top: int, search: tuple[float, float, int], absolute: bool
) -> tuple[Floats, Floats, Bytes, Bytes, Bytes]:
    """Q2_K, Q4_K and Q5_K: float16 of scales and of minimums [N], their integers [N, parts], and quants [N, 256]."""
    x, parts = _groups(values, width), 256 // width
    if importance is not None:
        weights, search = _groups(_block_weights(values, importance, 1 if absolute else 2), width), (-0.9, 0.05, 36)
    elif absolute:
        weights = np.abs(x)
    else:
        weights = np.sqrt(ordered_sum(x * x) / np.float32(width)) + np.abs(x)
    scale, minimum, quants = scale_and_minimum(x, weights, top, *search, absolute=absolute and importance is None)
    part_weights = None if importance is None else ordered_sum(weights).reshape(-1, parts).T
    d, m, scales, minimums = _two_scales(scale.reshape(-1, parts).T, minimum.reshape(-1, parts).T, scales_top, part_weights)
    group_scale, group_minimum = (_stored(d) * scales).T.reshape(-1), (_stored(m) * minimums).T.reshape(-1)
    again = _requantized(x, group_scale, group_minimum, quants, 0, top)
    return d, m, scales.T.astype(np.uint8), minimums.T.astype(np.uint8), _blocks(again, width).astype(np.uint8)


@_writes("Q2_K")
def _pack_q2_k(values: Floats, importance: Importance | None) -> Bytes:
    d, m, scales, minimums, quants = _minimum_parts(values, importance, 16, 3, 15, (-0.5, 0.1, 15), absolute=True)
    return np.concatenate([scales | minimums << 4, join_planes(quants, 2, 32, 2), half_bytes(d), half_bytes(m)], axis=1)


def _six_bit_pairs(scales: Bytes, minimums: Bytes) -> Bytes:
    """Eight scales and minimums of six bits -> 12 bytes, as Q4_K and Q5_K have them."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4], axis=1)


@_writes("Q4_K")
def _pack_q4_k(values: Floats, importance: Importance | None) -> Bytes:
    d, m, scales, minimums, quants = _minimum_parts(values, importance, 32, 15, 63, (-1.0, 0.1, 20), absolute=False)
    return np.concatenate([half_bytes(d), half_bytes(m), _six_bit_pairs(scales, minimums), join_planes(quants, 4, 32, 4)], axis=1)


@_writes("Q5_K")
def _pack_q5_k(values: Floats, importance: Importance | None) -> Bytes:
    d, m, scales, minimums, quants = _minimum_parts(values, importance, 32, 31, 63, (-0.5, 0.1, 15), absolute=False)
    planes = [join_planes(quants >> 4, 1, 32, 1), join_planes(quants & 15, 4, 32, 4)]
    return np.concatenate([half_bytes(d), half_bytes(m), _six_bit_pairs(scales, minimums), *planes], axis=1)


def _peak_scale(scale: Floats, levels: int) -> tuple[Floats, Floats]:
    """The float16 of a block [N], and integers from -levels to levels - 1 [parts, N], such that the largest scale becomes -levels."""
    peak = largest(scale)
    inverse = divided(np.full_like(peak, -levels), peak)
    return divided(np.ones_like(inverse), inverse), rounded(inverse * scale, -levels, levels - 1)


@_writes("Q3_K")
def _pack_q3_k(values: Floats, importance: Importance | None) -> Bytes:
    x = _groups(values, 16)
    if importance is None:
        scale, quants = refined_scale(x, 4)
        d, scales = _peak_scale(scale.reshape(-1, 16).T, 32)
        scales = scales + np.float32(32) * (d != 0)
    else:
        weights = _groups(_block_weights(values, importance, 2), 16)
        scale, quants = signed_scale(x, 4, weights)
        d, scales = signed_scale(scale.reshape(-1, 16).T, 32, ordered_sum(weights).reshape(-1, 16).T)
    group_scale = (_stored(d) * (scales - np.float32(32))).T.reshape(-1)
    again = _requantized(x, group_scale, np.zeros_like(group_scale), quants - np.float32(4), -4, 3) + np.float32(4)
    codes, stored = _blocks(again, 16).astype(np.uint8), scales.T.astype(np.uint8)
    low, high = join_planes(stored & 15, 1, 8, 4), join_planes(stored >> 4, 1, 4, 2)
    return np.concatenate([join_planes(codes >> 2, 1, 32, 1), join_planes(codes & 3, 2, 32, 2), low, high, half_bytes(d)], axis=1)


@_writes("Q6_K")
def _pack_q6_k(values: Floats, importance: Importance | None) -> Bytes:
    x = _groups(values, 16)
    scale, quants = signed_scale(x, 32, x * x if importance is None else _groups(importance.columns, 16))
    scale = scale.reshape(-1, 16).T
    empty = np.abs(scale).max(axis=0) < TINY
    d, scales = _peak_scale(scale, 128)
    group_scale = (_stored(d) * scales).T.reshape(-1)
    again = _requantized(x, group_scale, np.zeros_like(group_scale), quants - np.float32(32), -32, 31) + np.float32(32)
    codes = _blocks(again, 16).astype(np.uint8)
    stored = scales.T.astype(np.int8).view(np.uint8)
    packed = np.concatenate([join_planes(codes & 15, 2, 64, 4), join_planes(codes >> 4, 2, 32, 2), stored, half_bytes(d)], axis=1)
    packed[empty] = 0
    return packed


# --- sixteen values by a table


def _table_weights(values: Floats, importance: Importance | None) -> Floats:
    """Weights [N, B]: the squares, or with importances as K formats have them, from the mean square of the block."""
    squares = values * values
    if importance is None:
        return squares
    mean = ordered_sum(squares.T) * np.float32(2 / values.shape[1])
    weights: Floats = importance.columns * np.sqrt(mean[:, None] + squares)
    return weights


@_writes("IQ4_NL")
def _pack_iq4_nl(values: Floats, importance: Importance | None) -> Bytes:
    table = FORMATS["IQ4_NL"].values
    scale = table_scale(values.T, table, _table_weights(values, importance).T)
    quants = nearest_index(divided(np.ones_like(scale), scale)[:, None] * values, table)
    return np.concatenate([half_bytes(scale), _nibbles(quants.astype(np.uint8))], axis=1)


@_writes("IQ4_XS")
def _pack_iq4_xs(values: Floats, importance: Importance | None) -> Bytes:
    """The scales of parts are rounded against the float32 scale of the block, before it becomes a float16."""
    table, x = FORMATS["IQ4_XS"].values, _groups(values, 32)
    scale = table_scale(x, table, _groups(_table_weights(values, importance), 32)).reshape(-1, 8).T
    d = -largest(scale) / np.float32(32)
    scales = rounded(divided(np.ones_like(d), d) * scale, -32, 31)
    inverse = divided(np.ones_like(scale), d * scales).T.reshape(-1)
    quants = np.ascontiguousarray(nearest_index(inverse * x, table).T).reshape(-1, 256)
    stored = (scales.T + np.float32(32)).astype(np.uint8)
    low, high = join_planes(stored & 15, 4, 1, 4), join_planes(stored >> 4, 2, 1, 2)
    return np.concatenate([half_bytes(d), high, low, join_planes(quants, 8, 16, 4)], axis=1)
