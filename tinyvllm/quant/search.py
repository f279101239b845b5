"""Searches for the scales of packed blocks: the oracle of kernels/cpu/quantize.c, which computes the same bits.

The methods are those of llama.cpp's quantizers (ggml-quants.c): `signed_scale` is its make_qx_quants, `refined_scale` make_q3_quants,
`scale_and_minimum` make_qkx2_quants and make_qkx3_quants, `positive_scale` make_qp_quants, `table_scale` the search of IQ4_NL. Each
tries scales around the one that maps the largest number to the last quant and keeps the best by the weighted squared error, after a
least squares fit to the rounded numbers.

Arrays have the elements of a group first and groups last, float32 [n, G]: a row of them is one lane's step of the kernel. Sums run from
element 0 to n - 1 in float32, because another order gives other bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinyvllm.quant.bits import Floats

_ONE = np.float32(1)
_TENTH = np.float32(0.1)
TINY = np.float32(1e-15)  # a group whose numbers are all smaller is a group of zeros


def ordered_sum(terms: Iterable[np.ndarray]) -> Floats:
    """The sum of float32 arrays, one after the other."""
    total: Floats | None = None
    for term in terms:
        total = np.float32(0) + term if total is None else total + term
    assert total is not None
    return total


def divided(a: np.ndarray | np.float32, b: np.ndarray | np.float32) -> Floats:
    """a / b, and 0 where b is 0 or so small that the quotient is infinite."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        quotient = np.asarray(a / b, np.float32)
    return np.where((b != 0) & np.isfinite(quotient), quotient, np.float32(0))


def largest(x: np.ndarray) -> Floats:
    """Of each group the number of largest magnitude, the first of several."""
    found: Floats = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    return found


def positive_peak(x: np.ndarray) -> Floats:
    """Of each group the largest number, and 0 (not -0) if none is above it."""
    peak: Floats = x.max(axis=0)
    return np.where(peak > 0, peak, np.float32(0))


def rounded(x: np.ndarray, low: int, high: int) -> Floats:
    """To the nearest whole number, ties to even, from `low` to `high`; NaN becomes `low`."""
    whole: Floats = np.fmin(np.fmax(np.rint(x), np.float32(low)), np.float32(high))
    return whole


def signed_scale(x: np.ndarray, levels: int, weights: np.ndarray) -> tuple[Floats, Floats]:
    """Scale [G] and quants [n, G] from 0 to 2 levels - 1, for x about scale * (quant - levels)."""
    peak = largest(x)
    empty = np.abs(peak) < TINY
    best_inverse = divided(np.full_like(peak, -levels), peak)
    products, squares = _fit(x, weights, rounded(best_inverse * x, -levels, levels - 1))
    scale = divided(products, squares)
    best = scale * products
    for step in (*range(-9, 0), *range(1, 10)):
        inverse = divided(np.full_like(peak, -(np.float32(levels) + _TENTH * np.float32(step))), peak)
        products, squares = _fit(x, weights, rounded(inverse * x, -levels, levels - 1))
        better = (squares > 0) & (products * products > best * squares)
        fitted = divided(products, squares)
        best_inverse = np.where(better, inverse, best_inverse)
        scale, best = np.where(better, fitted, scale), np.where(better, fitted * products, best)
    quants = rounded(best_inverse * x, -levels, levels - 1) + np.float32(levels)
    return np.where(empty, np.float32(0), scale), np.where(empty, np.float32(0), quants)


def _fit(x: np.ndarray, weights: np.ndarray, quants: np.ndarray) -> tuple[Floats, Floats]:
    """Sums of w x q and w q q."""
    return ordered_sum(w * v * q for w, v, q in zip(weights, x, quants)), ordered_sum(w * q * q for w, q in zip(weights, quants))


def refined_scale(x: np.ndarray, levels: int) -> tuple[Floats, Floats]:
    """As `signed_scale` with the squares of x for weights, by another search: one quant after the other, five times."""
    peak = largest(x)
    empty = np.abs(peak) < TINY
    quants = rounded(divided(np.full_like(peak, -levels), peak) * x, -levels, levels - 1)
    weights = x * x
    products, squares = _fit(x, weights, quants)
    for _ in range(5):
        products, squares = _descend(x, weights, quants, products, squares, -levels, levels - 1)
    scale = np.where(squares > 0, divided(products, squares), np.float32(0))
    return np.where(empty, np.float32(0), scale), np.where(empty, np.float32(0), quants + np.float32(levels))


def _descend(
    x: np.ndarray, weights: np.ndarray, quants: np.ndarray, products: Floats, squares: Floats, low: int, high: int
) -> tuple[Floats, Floats]:
    """Moves each quant in place to where the others' scale puts it, if that lowers the error; the new sums."""
    for v, w, q in zip(x, weights, quants):
        rest, rest_squares = products - w * v * q, squares - w * q * q
        moved = rounded(divided(v * rest_squares, rest), low, high)
        with_moved, with_squares = rest + w * v * moved, rest_squares + w * moved * moved
        better = (rest > 0) & (moved != q) & (with_squares > 0)
        better &= with_moved * with_moved * squares > products * products * with_squares
        q[:] = np.where(better, moved, q)
        products, squares = np.where(better, with_moved, products), np.where(better, with_squares, squares)
    return products, squares


def scale_and_minimum(
    x: np.ndarray, weights: np.ndarray, top: int, first: float, step: float, steps: int, absolute: bool = False
) -> tuple[Floats, Floats, Floats]:
    """Scale and minimum [G], not negative, and quants [n, G] from 0 to `top`, for x about scale * quant - minimum.

    Inverse scales are tried from top + `first` in `steps` steps over the range of the numbers, from the best minimum so far. The error is
    of squares, or of magnitudes if `absolute`.
    """
    low, high = -positive_peak(-x) + np.float32(0), x.max(axis=0)
    empty = high == low
    sum_w, sum_x = ordered_sum(weights), ordered_sum(w * v for w, v in zip(weights, x))
    inverse = divided(np.full_like(low, top), high - low)
    best_inverse, best_low, scale = inverse, low, divided(np.ones_like(low), inverse)
    error = _error(x, weights, rounded(inverse * (x - low), 0, top), scale, low, absolute)
    for i in range(steps + 1):
        inverse = divided(np.full_like(low, np.float32(first) + np.float32(step) * np.float32(i) + np.float32(top)), high - low)
        quants = rounded(inverse * (x - low), 0, top)
        fitted, fitted_low, solvable = _line(x, weights, quants, sum_w, sum_x)
        tried = _error(x, weights, quants, fitted, fitted_low, absolute)
        better = solvable & (tried < error)
        best_inverse, best_low = np.where(better, inverse, best_inverse), np.where(better, low, best_low)
        scale, low, error = np.where(better, fitted, scale), np.where(better, fitted_low, low), np.where(better, tried, error)
    quants = np.where(empty, np.float32(0), rounded(best_inverse * (x - best_low), 0, top))
    return np.where(empty, np.float32(0), scale), -low, quants


def _line(x: np.ndarray, weights: np.ndarray, quants: np.ndarray, sum_w: Floats, sum_x: Floats) -> tuple[Floats, Floats, np.ndarray]:
    """The weighted least squares line x = scale * quant + low, with low at most 0, and where there is one."""
    sum_l = ordered_sum(w * q for w, q in zip(weights, quants))
    sum_l2 = ordered_sum(w * q * q for w, q in zip(weights, quants))
    sum_xl = ordered_sum(w * q * v for w, q, v in zip(weights, quants, x))
    determinant = sum_w * sum_l2 - sum_l * sum_l
    scale = divided(sum_w * sum_xl - sum_x * sum_l, determinant)
    low = divided(sum_l2 * sum_x - sum_l * sum_xl, determinant)
    above = low > 0
    return np.where(above, divided(sum_xl, sum_l2), scale), np.where(above, np.float32(0), low), determinant > 0


def _error(x: np.ndarray, weights: np.ndarray, quants: np.ndarray, scale: Floats, low: Floats, absolute: bool) -> Floats:
    differences = (scale * q + low - v for q, v in zip(quants, x))
    return ordered_sum(w * (np.abs(d) if absolute else d * d) for w, d in zip(weights, differences))


def positive_scale(x: np.ndarray, top: int, weights: np.ndarray) -> tuple[Floats, Floats]:
    """Scale [G] and quants [n, G] from 0 to `top`, for x about scale * quant, where x is not negative."""
    peak = positive_peak(x)
    empty = peak < TINY
    best_inverse = divided(np.full_like(peak, top), peak)
    error = _distance(x, weights, best_inverse, top)
    for step in (*range(-4, 0), *range(1, 5)):
        inverse = divided(np.full_like(peak, _TENTH * np.float32(step) + np.float32(top)), peak)
        tried = _distance(x, weights, inverse, top)
        best_inverse, error = np.where(tried < error, inverse, best_inverse), np.where(tried < error, tried, error)
    quants = rounded(best_inverse * x, 0, top)
    products, squares = _fit(x, weights, quants)
    for _ in range(5):
        products, squares = _descend(x, weights, quants, products, squares, 0, top)
    scale = np.where(squares > 0, divided(products, squares), np.float32(0))
    return np.where(empty, np.float32(0), scale), np.where(empty, np.float32(0), quants)


def _distance(x: np.ndarray, weights: np.ndarray, inverse: Floats, top: int) -> Floats:
    scale = divided(np.ones_like(inverse), inverse)
    differences = (v - scale * rounded(inverse * v, 0, top) for v in x)
    return ordered_sum(w * d * d for w, d in zip(weights, differences))


def table_scale(x: np.ndarray, values: tuple[float, ...], weights: np.ndarray) -> Floats:
    """Scale [G] for x about scale * value, by the values of a table whose first one has the largest magnitude."""
    peak, first = largest(x), np.float32(values[0])
    empty = np.abs(peak) < TINY
    inverse = divided(np.ones_like(peak), divided(-peak, first))
    products, squares = _fit_table(x, weights, inverse, values)
    scale = divided(products, squares)
    best = scale * products
    for step in range(-7, 8):
        inverse = divided(np.full_like(peak, np.float32(step) + first), peak)
        products, squares = _fit_table(x, weights, inverse, values)
        better = (squares > 0) & (products * products > best * squares)
        fitted = divided(products, squares)
        scale, best = np.where(better, fitted, scale), np.where(better, fitted * products, best)
    return np.where(empty, np.float32(0), scale)


def _fit_table(x: np.ndarray, weights: np.ndarray, inverse: Floats, values: tuple[float, ...]) -> tuple[Floats, Floats]:
    """As `_fit`, for the nearest values; w q x is multiplied in this order."""
    near = np.array(values, np.float32)[nearest_index(inverse * x, values)]
    return ordered_sum(w * q * v for w, q, v in zip(weights, near, x)), ordered_sum(w * q * q for w, q in zip(weights, near))


def nearest_index(x: np.ndarray, values: tuple[float, ...]) -> np.ndarray:
    """The index of the nearest of ascending values; halfway between two, that of the larger one."""
    table = np.array(values, np.float32)
    return np.searchsorted((table[:-1] + table[1:]) / np.float32(2), x, side="right")
