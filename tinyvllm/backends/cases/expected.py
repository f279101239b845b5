"""Products, what follows them, and attention in float64: the answers of cases, recorded, or computed where they are too many."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.cases import attention
from tinyvllm.backends.cases.case import Case, Sizes
from tinyvllm.backends.cases.inputs import (
    CHOSEN,
    EPS,
    EXPERT_OUTPUTS,
    EXPERTS,
    GATED,
    GROUPS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MANY,
    OUTPUTS,
    PERIOD,
    QKV_OUTPUTS,
    QUERY_HEADS,
    ROUTED,
    ROUTES,
    SHARES,
    VOCABULARY,
    Arrays,
    activations,
    columns,
    expert_inputs,
    norm_weight,
    numbers,
    parts_of,
    repeated,
    token_ids,
)
from tinyvllm.quant.layouts import unpack_rows


def dense(names: str, sizes: tuple[int, ...], seed: int, inputs: int = 0) -> np.ndarray:
    """The weights of all parts, float64 [O, I]."""
    return np.concatenate([unpack_rows(format, rows).astype(np.float64) for format, rows in parts_of(names, sizes, seed, inputs)])


def normalized(I: int) -> np.ndarray:
    x = activations(I).astype(np.float64)
    return np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * norm_weight(I))


def matmul(names: str, sizes: Sizes | None = None) -> Arrays:
    I, O = (columns(names), OUTPUTS) if sizes is None else (sizes.inputs, sizes.outputs)
    y = activations(I).astype(np.float64) @ dense(names, (OUTPUTS,), 6, I).T
    return {"y": _repeated(y, O) + numbers(7, PERIOD, O)}


def embed(names: str, sizes: Sizes) -> Arrays:
    return {"x": dense(names, (VOCABULARY,), 5, sizes.inputs)[token_ids(PERIOD)]}


def head(names: str, sizes: Sizes | None = None) -> Arrays:
    I, V = (columns(names), VOCABULARY) if sizes is None else (sizes.inputs, sizes.outputs)
    logits = _repeated(normalized(I) @ dense(names, (VOCABULARY,), 9, I).T, V)
    return {"logits": logits, "best": logits.argmax(1)}


def _repeated(y: np.ndarray, outputs: int) -> np.ndarray:
    """What a weight gives whose rows repeat."""
    return np.asarray(repeated(y.T, outputs).T)


def gate_up(names: str, sizes: Sizes | None = None) -> Arrays:
    I, F = (columns(names), GATED) if sizes is None else (sizes.inputs, sizes.outputs)
    y = normalized(I) @ dense(names, (GATED, GATED), 8, I).T
    gate, up = y[:, :GATED], y[:, GATED:]
    return {"y": _repeated(gate / (1 + np.exp(-gate)) * up, F)}


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


def qkv(names: str, sizes: Sizes | None = None) -> Arrays:
    I, H, K, D = (columns(names), HEADS, KV_HEADS, HEAD_DIM) if sizes is None else (sizes.inputs, *sizes.heads, sizes.head_dim)
    y, ends = normalized(I) @ dense(names, QKV_OUTPUTS, 10, I).T, np.cumsum(QKV_OUTPUTS)[:-1]
    if sizes is None:
        y = y + numbers(11, (H + 2 * K) * D)
    else:
        y = np.concatenate([_repeated(part, n * D) for part, n in zip(np.split(y, ends, axis=1), (H, K, K), strict=True)], axis=1)
    heads, angles = y.reshape(PERIOD, H + 2 * K, D), numbers(12, PERIOD, D).astype(np.float64)[:, None]
    cos, sin, a, b = angles[..., : D // 2], angles[..., D // 2 :], heads[..., : D // 2], heads[..., D // 2 :]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    kept = np.concatenate([turned[:, H : H + K], heads[:, H + K :]], axis=1)
    return {"q": turned[:, :H].reshape(PERIOD, -1), "kv": kept.reshape(PERIOD, -1), "kept": np.ones(1)}


def attend(
    context: attention.Context, D: int, rows: list[tuple[int, int, int]], cap: bool = False, sinks: bool = False
) -> np.ndarray:  # fmt: skip
    """Rows (query, sequence, position): softmax over the keys up to the position, and the head's sink."""
    pool, tables, q = context.pool(D).astype(np.float64), context.tables, attention.queries(MANY[0], D)
    out = []
    for t, b, position in rows:
        keys, values = pool[tables[b]].transpose(1, 2, 0, 3, 4).reshape(2, GROUPS, -1, D)[:, :, : position + 1]
        for h in range(QUERY_HEADS):
            group, sink = h * GROUPS // QUERY_HEADS, attention.SINKS[h] if sinks else -np.inf
            scores = keys[group] @ q[t, h].astype(np.float64) * D**-0.5
            scores = attention.CAP * np.tanh(scores / attention.CAP) if cap else scores
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            out.append(weights / (weights.sum() + np.exp(sink - top)) @ values[group])
    return np.array(out).reshape(len(rows), -1)


def attention_decode(D: int, cap: bool = False, sinks: bool = False) -> Arrays:
    rows = [(b, b, length - 1) for b, length in enumerate(attention.DECODES.lengths)]
    return {"out": attend(attention.DECODES, D, rows, cap, sinks)}


def attention_prefill(D: int, cap: bool = False, sinks: bool = False) -> Arrays:
    first = attention.CHUNKS.lengths[0] - attention.STARTS[0]
    rows = [(t, int(t >= first), attention.STARTS[t >= first] + (t - first if t >= first else t)) for t in attention.CHUNK_ROWS]
    return {"out": attend(attention.CHUNKS, D, rows, cap, sinks)}


def computed_answer(case: Case) -> Arrays:
    """The answer of a product whose parts are in several formats or in a model's sizes, or of attention with policies or wide heads; there
    are too many of these to record, or they are large.
    """
    if case.sizes is not None:
        return _SIZED[case.stem](case.format, case.sizes)
    if case.head_dim:
        answer = attention_decode if case.stem == "attention_decode" else attention_prefill
        return answer(case.head_dim, case.cap, case.sinks)
    answers = {"norm_gate_up_silu": gate_up, "norm_qkv_rope_store": qkv, "experts_gate_up_silu": experts_gate_up}
    return answers[case.stem](case.format)


_SIZED = {"embed": embed, "matmul": matmul, "norm_gate_up_silu": gate_up, "norm_head": head, "norm_qkv_rope_store": qkv}
