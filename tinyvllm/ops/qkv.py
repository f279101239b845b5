"""The first half of an attention layer: norm, the three projections, rotation, and the write of keys and values into the cache."""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.ops.kernel import Kernel
from tinyvllm.ops.launch import launch, store_kv
from tinyvllm.ops.linear import Weight, constant, empty, prepared_bytes, product, refused_width, scratch
from tinyvllm.ops.norm import Norm, rms_norm
from tinyvllm.ops.registry import pick
from tinyvllm.ops.rope import apply_rope
from tinyvllm.ops.weight import PackedWeight, panel_bytes

CACHE_FORMATS = {dtypes.float32: "F32", dtypes.float16: "F16", dtypes.bfloat16: "BF16"}


@dataclass(frozen=True, eq=False)
class QKV:
    """The weight [(H + 2K) D, E], rows of q, then k, then v; its bias or None; the q/k norms [D] of Qwen3 or None."""

    weight: Weight
    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qk_eps: float = 1e-6


def norm_qkv_rope_store(
    x: Tensor, norm: Norm, qkv: QKV, angles: Tensor | None, cache: LayerCache, batch: Batch
) -> tuple[Tensor, LayerCache]:
    """Queries of normalised x, and the cache with this step's keys and values in it.

    x [T, E] float32; angles [T, R] or None where positions are learned; cache of [P, 2, K, S, D].
    Returns q [T, H, D] float32, rotated, and the cache after the write, from which attention must read.
    """
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    if isinstance(qkv.weight, PackedWeight):
        shape = f"{qkv.weight.I}->{qkv.weight.O} {qkv.weight.format}, D={D}"
        refused = refused_width(qkv.weight.I) or (f"its head dimension {D} is not a multiple of 16" if D % 16 else None)
        row = pick("norm_qkv_rope_store", str(x.device), shape, refused)
        if row is not None:
            return _fused(row, x, norm, qkv, qkv.weight, angles, cache, batch)
    T = int(x.shape[0])
    # without the copy, tinygrad recomputes the norm for every output
    y = product(norm(x).contiguous(), qkv.weight)
    y = (y if qkv.bias is None else y + qkv.bias.float()).contiguous().reshape(T, -1, D)
    H = int(y.shape[1]) - 2 * K
    q, k, v = y[:, :H], y[:, H : H + K], y[:, H + K :]
    if qkv.q_norm is not None and qkv.k_norm is not None:
        q, k = rms_norm(q, qkv.q_norm, qkv.qk_eps), rms_norm(k, qkv.k_norm, qkv.qk_eps)
    if angles is not None:
        q, k = apply_rope(q.contiguous(), angles), apply_rope(k.contiguous(), angles)
    return q.contiguous(), append_kv(k.contiguous(), v.contiguous(), cache, batch)


def append_kv(k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
    """The cache after k, v [T, K, D] float32 were written at the batch's slots, rounded to the cache's dtype."""
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    refused = f"its head dimension {D} is not a multiple of 16" if D % 16 else None
    row = pick("kv_append", str(k.device), f"K={K}, D={D} {_format(cache)}", refused)
    if row is None:
        return store_kv(cache, k, v, batch.slots)
    T = int(k.shape[0])
    work = 2 * T * K * D * (4 + cache.keys.dtype.itemsize)
    kernel = Kernel.cpu("kv_append", row, 2, 4, bytes=work, K=K, S=S, D=D, CACHE_TYPE=_format(cache))
    return LayerCache(*launch(kernel, cache, [k, v, batch.slots, batch.rows]))


def _format(cache: LayerCache) -> str:
    return CACHE_FORMATS[cache.keys.dtype]


def _fused(
    row: str, x: Tensor, norm: Norm, qkv: QKV, weight: PackedWeight, angles: Tensor | None, cache: LayerCache, batch: Batch
) -> tuple[Tensor, LayerCache]:
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    T, E = int(x.shape[0]), weight.I
    H = weight.O // D - 2 * K
    R = 0 if angles is None else int(angles.shape[1])
    optional = norm.bias, weight.tensor, qkv.bias, qkv.q_norm, qkv.k_norm, angles
    ins = [x, norm.weight, *(t for t in optional if t is not None), batch.slots, batch.rows]
    kernel = Kernel.cpu(
        "norm_qkv_rope_store", row, 4, len(ins), 2 * T * E * weight.O, panel_bytes(weight.format, weight.O, E) + 4 * T * (E + H * D),
        E=E, H=H, K=K, D=D, S=S, R=R, WEIGHT=weight.format, CACHE_TYPE=_format(cache), NORM=norm.kind, BIAS=int(qkv.bias is not None),
        QK_NORM=int(qkv.q_norm is not None), EPS=constant(norm.eps), QK_EPS=constant(qkv.qk_eps),
    )  # fmt: skip
    outs = [empty(x, T, H, D), cache.keys, cache.values, scratch(x, prepared_bytes(weight.format, T, E))]
    q, keys, values, _ = launch(kernel, outs, ins)
    return q, LayerCache(keys, values)
