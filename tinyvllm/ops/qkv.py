"""The first half of an attention layer: norm, the three projections, rotation, and the write of keys and values into the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import Tensor

from tinyvllm.batch import LayerCache
from tinyvllm.ops.launch import store_kv
from tinyvllm.ops.linear import linear
from tinyvllm.ops.norm import rms_norm
from tinyvllm.ops.rope import apply_rope


@dataclass(frozen=True)
class QKVWeights:
    """Weights q [H*D, E], k and v [K*D, E], their biases or None, and the q/k norms [D] of Qwen3 or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qk_eps: float = 1e-6


def norm_qkv_rope_store(
    x: Tensor, norm: Callable[[Tensor], Tensor], weights: QKVWeights, angles: Tensor | None, cache: LayerCache, slots: Tensor
) -> tuple[Tensor, LayerCache]:
    """Queries of normalised x, and the cache with this step's keys and values in it.

    x [T, E] float32; angles [T, R] or None where positions are learned; cache of [P, 2, K, S, D]; slots [T].
    Returns q [T, H, D] float32, rotated, and the cache after the write, from which attention must read.
    """
    T, K, D = x.shape[0], cache.keys.shape[2], cache.keys.shape[4]
    # without the copy, tinygrad recomputes the norm for every output of three products
    x = norm(x).contiguous()
    q = linear(x, weights.q, weights.q_bias).reshape(T, -1, D)
    k = linear(x, weights.k, weights.k_bias).reshape(T, K, D)
    v = linear(x, weights.v, weights.v_bias).reshape(T, K, D)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = rms_norm(q, weights.q_norm, weights.qk_eps), rms_norm(k, weights.k_norm, weights.qk_eps)
    if angles is not None:
        q, k = apply_rope(q.contiguous(), angles), apply_rope(k.contiguous(), angles)
    return q.contiguous(), store_kv(cache, k, v, slots)
