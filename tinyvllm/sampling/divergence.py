"""How far two distributions over a vocabulary are apart, from their logits. Numpy in float64; no tensors."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [N, V] natural logarithms of softmax(logits [N, V])."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of q from p in nats, float64 [N], of log-probabilities [N, V]; infinite where it is no number."""
    kl = (np.exp(p) * (p - q)).sum(1)
    return np.where(np.isfinite(kl), np.maximum(kl, 0.0), np.inf)
