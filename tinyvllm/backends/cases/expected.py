"""Products and what follows them in float64: the answers of cases, recorded for each format, and computed for mixed parts."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import (
    CHOSEN,
    EPS,
    EXPERT_OUTPUTS,
    EXPERTS,
    GATED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PERIOD,
    QKV_OUTPUTS,
    ROUTED,
    ROUTES,
    SHARES,
    Arrays,
    activations,
    columns,
    expert_inputs,
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


def route(format: str) -> Arrays:
    logits = normalized(columns(format)) @ dense(format, (ROUTED,), 23).T / 64
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :ROUTES]
    powers = np.exp(np.take_along_axis(logits - logits.max(1, keepdims=True), chosen, 1))
    return {"shares": powers / powers.sum(1, keepdims=True), "chosen": chosen, "listed": np.ones(1)}


def experts_gate_up(names: str) -> Arrays:
    x, weight = normalized(columns(names)), dense(names, (EXPERTS * EXPERT_OUTPUTS,) * 2, 24).reshape(2, EXPERTS, EXPERT_OUTPUTS, -1)
    gate, up = (np.einsum("ti,tcoi->tco", x, half[CHOSEN]) for half in weight)
    return {"y": (gate / (1 + np.exp(-gate)) * up).reshape(PERIOD, -1)}


def experts_down(names: str) -> Arrays:
    h = expert_inputs(columns(names)).astype(np.float64)
    weight = dense(names, (EXPERTS * EXPERT_OUTPUTS,), 25).reshape(EXPERTS, EXPERT_OUTPUTS, -1)
    outputs = np.einsum("tci,tcoi->tco", h, weight[CHOSEN])
    return {"y": (outputs * SHARES[..., None]).sum(1) + numbers(7, PERIOD, EXPERT_OUTPUTS)}


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
    answers = {"norm_gate_up_silu": gate_up, "norm_qkv_rope_store": qkv, "experts_gate_up_silu": experts_gate_up}
    return answers[case.stem](case.format)
