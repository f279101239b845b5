"""Log-probabilities of drawn tokens and of the most probable ones, computed on the host from raw logits on request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tinyvllm.request import ALL_LOGPROBS, Logprob

_FEW = 64  # ranks that are counted one by one; more are searched in the sorted row


def logprobs_of(
    logits: np.ndarray, tokens: Sequence[int], top: Sequence[int], named: Sequence[Sequence[int] | None] | None = None
) -> list[dict[int, Logprob]]:
    """One dict per row of logits float32 [N, V]: the drawn token first, then the `top[n]` most probable (-1: all), the best first.

    Where `named[n]` has token ids, these are listed instead of the most probable. Natural logarithms of softmax(logits), before penalties,
    bias, temperature and filters. A rank counts the tokens that are strictly more probable, plus 1; of equals the lower id is listed first.
    """
    names = named or [None] * len(tokens)
    return [_row(row, token, count, ids) for row, token, count, ids in zip(logits, tokens, top, names, strict=True)]


def _row(logits: np.ndarray, token: int, count: int, named: Sequence[int] | None) -> dict[int, Logprob]:
    best = logits.max()
    normalizer = float(best) + math.log(np.exp(logits - best).sum(dtype=np.float64))
    others = named or _top_ids(logits, len(logits) if count == ALL_LOGPROBS else count)
    listed = list(dict.fromkeys([token, *others]))
    return {
        t: Logprob(float(value) - normalizer, rank)
        for t, value, rank in zip(listed, logits[listed], _ranks(logits, logits[listed]), strict=True)
    }


def _ranks(logits: np.ndarray, values: np.ndarray) -> list[int]:
    if len(values) <= _FEW:
        return [1 + int(np.count_nonzero(logits > value)) for value in values]
    above = len(logits) - np.searchsorted(np.sort(logits), values, side="right")
    return [1 + int(n) for n in above]


def _top_ids(logits: np.ndarray, count: int) -> list[int]:
    """Ids of the `count` largest logits, largest first, of equals the lower id."""
    count = min(count, len(logits))
    if count == 0:
        return []
    smallest = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= smallest)  # in order of ids, with all ties
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return [int(t) for t in candidates[order]]
