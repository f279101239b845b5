"""Log-probabilities of drawn tokens and of the most probable ones, computed on the host from raw logits on request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tinyvllm.request import Logprob


def logprobs_of(logits: np.ndarray, tokens: Sequence[int], top: Sequence[int]) -> list[dict[int, Logprob]]:
    """One dict per row of logits float32 [N, V]: the drawn token first, then the `top[n]` most probable, the best first.

    Natural logarithms of softmax(logits), before penalties, bias, temperature and filters. A rank counts the tokens that are strictly
    more probable, plus 1; of equals the lower id is listed first.
    """
    return [_row(row, token, count) for row, token, count in zip(logits, tokens, top, strict=True)]


def _row(logits: np.ndarray, token: int, count: int) -> dict[int, Logprob]:
    best = logits.max()
    normalizer = float(best) + math.log(np.exp(logits - best).sum(dtype=np.float64))
    listed = [token, *_top_ids(logits, count)]
    return {t: Logprob(float(logits[t]) - normalizer, 1 + int(np.count_nonzero(logits > logits[t]))) for t in listed}


def _top_ids(logits: np.ndarray, count: int) -> list[int]:
    """Ids of the `count` largest logits, largest first, of equals the lower id."""
    count = min(count, len(logits))
    if count == 0:
        return []
    smallest = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= smallest)  # in order of ids, with all ties
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return [int(t) for t in candidates[order]]
