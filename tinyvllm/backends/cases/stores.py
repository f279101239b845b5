"""What a case finds in the slots of a KV cache."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import Arrays, S
from tinyvllm.backends.cases.site import cached_numbers
from tinyvllm.batch import LayerCache
from tinyvllm.quant.kv import is_rotated, rotate


def slots_of(T: int, count: int) -> list[int]:
    """Slots of T rows in a cache of three blocks, the last of which is for rows that do not count."""
    return [7 * t % (2 * S) if t < count else 3 * S - 1 for t in range(T)]


def unrotated(case: Case, q: np.ndarray) -> np.ndarray:
    """Queries [T, H, D] for a cache with rotated keys, rotated back or, as the matrix is its own inverse, made so."""
    return rotate(q) if is_rotated(case.cache, keys=True) else q


def stored(format: str, cache: LayerCache, before: np.ndarray, slots: list[int]) -> Arrays:
    """Keys and values of these slots [T, 2 * K * D], and whether the other slots of the first two blocks are as before."""
    held, old = (numbers[:2].transpose(0, 3, 1, 2, 4).reshape(2 * S, -1) for numbers in (cached_numbers(format, cache), before))
    kept = np.array_equal(np.delete(held, slots, axis=0), np.delete(old, slots, axis=0))
    return {"kv": held[slots], "kept": np.array([kept], np.int32)}
