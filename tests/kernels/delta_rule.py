"""The gated delta rule in float64, token by token: what kernels and the reference of tinyvllm/ops/delta.py are compared with. And the
kernels of GPUs at the sizes of models."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.operands import DeltaShape
from tinyvllm.backends.recurrent import plan


def gated_delta(
    s: DeltaShape, y: np.ndarray, state: np.ndarray, weights: dict[str, np.ndarray], eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """Values [T, VH DV] and the state [STATE] after the rows y [T, WIDTH] of one sequence, from `state` [STATE]."""
    y, state, w = y.astype(np.float64), state.astype(np.float64), {name: a.astype(np.float64) for name, a in weights.items()}
    kept = (s.taps - 1) * s.channels
    rows = np.concatenate([state[:kept].reshape(-1, s.channels), y[:, : s.channels]])
    S = state[kept:].reshape(s.value_heads, -1, s.key_dim, s.lanes).swapaxes(1, 2).reshape(s.value_heads, s.key_dim, s.value_dim).copy()
    taps, out = w["taps"].reshape(s.taps, s.channels), []
    for t, row in enumerate(y):
        x = silu((rows[t : t + s.taps] * taps).sum(0))
        q, k = (part.reshape(s.key_heads, s.key_dim) for part in (x[: s.keys], x[s.keys : 2 * s.keys]))
        q, k = (part / np.sqrt((part**2).sum(1, keepdims=True) + 1e-6) for part in (q, k))
        v, z = x[2 * s.keys :].reshape(s.value_heads, -1), row[s.channels :][: s.values].reshape(s.value_heads, -1)
        b, a = row[-2 * s.value_heads :].reshape(2, -1)
        values = []
        for h in range(s.value_heads):
            shared = h % s.key_heads if s.tiled else h * s.key_heads // s.value_heads
            S[h] *= np.exp(w["decay"][h] * np.logaddexp(0, a[h] + w["shift"][h]))
            S[h] += np.outer(k[shared], (v[h] - S[h].T @ k[shared]) / (1 + np.exp(-b[h])))
            o = S[h].T @ q[shared] / np.sqrt(s.key_dim)
            values.append(o / np.sqrt((o**2).mean() + eps) * w["norm"] * silu(z[h]))
        out.append(np.concatenate(values))
    tiles = S.reshape(s.value_heads, s.key_dim, -1, s.lanes).swapaxes(1, 2)
    return np.array(out), np.concatenate([rows[len(y) :].reshape(-1), tiles.reshape(-1)])


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def recurrent_samples(backend: str, variant: str, eps: str) -> dict[str, Kernel]:
    """Of Qwen3.5 27B, without drafts and with, and of the narrowest and the widest heads: kernels by name, for tests of their text."""
    found, large = {}, DeltaShape(16, 48, 128, 128, 4)
    for name, s, T, B, drafts in (
        ("1", large, 1, 1, 0), ("512", large, 512, 2, 0), ("drafts", large, 17, 17, 16),
        ("narrow heads", DeltaShape(2, 4, 16, 16, 2, True), 8, 8, 0), ("wide heads", DeltaShape(4, 4, 256, 256, 4), 64, 1, 0),
        ("wide heads with drafts", DeltaShape(4, 4, 256, 256, 4), 64, 9, 4),
    ):  # fmt: skip
        found[f"gated_delta of {name}"], found[f"delta_norm of {name}"] = plan(backend, variant, s, T, B, eps, drafts)
    return found
