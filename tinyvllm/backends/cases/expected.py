"""Products and what follows them in float64: the answers of cases, recorded for each format, and computed for mixed parts."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import (
    EPS,
    GATED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PERIOD,
    QKV_OUTPUTS,
    Arrays,
    activations,
    columns,
    norm_weight,
    numbers,
    parts_of,
)
from tinyvllm.quant.layouts import unpack_rows


def dense(names: str, sizes: tuple[int, ...], seed: int) -> np.ndarray:
    """The weights of all parts, float64 [O, I]."""
    return np.concatenate([unpack_rows(format, rows).astype(np.float64) for format, rows in parts_of(names, sizes, seed)])


def normalized(I: int) -> np.ndarray:
    x = activations(I).astype(np.float64)
    return np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * norm_weight(I))


def gate_up(names: str) -> Arrays:
    y = normalized(columns(names)) @ dense(names, (GATED, GATED), 8).T
    gate, up = y[:, :GATED], y[:, GATED:]
    return {"y": gate / (1 + np.exp(-gate)) * up}


def qkv(names: str) -> Arrays:
    H, K, D = HEADS, KV_HEADS, HEAD_DIM
    y = normalized(columns(names)) @ dense(names, QKV_OUTPUTS, 10).T + numbers(11, (H + 2 * K) * D)
    heads, angles = y.reshape(PERIOD, H + 2 * K, D), numbers(12, PERIOD, D).astype(np.float64)[:, None]
    cos, sin, a, b = angles[..., : D // 2], angles[..., D // 2 :], heads[..., : D // 2], heads[..., D // 2 :]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    kept = np.concatenate([turned[:, H : H + K], heads[:, H + K :]], axis=1)
    return {"q": turned[:, :H].reshape(PERIOD, -1), "kv": kept.reshape(PERIOD, -1), "kept": np.ones(1)}


def mixed_answer(case: Case) -> Arrays:
    """The answer of a product whose parts are in several formats; there are too many of these to record."""
    return {"norm_gate_up_silu": gate_up, "norm_qkv_rope_store": qkv}[case.stem](case.format)
