"""The first half of an attention layer: norm, the three projections, rotation, and the write of keys and values into the cache."""

from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor

from tinyvllm.backends.buffers import cache_format
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import QKV, TensorWeight, Weight, packed_parts
from tinyvllm.backends.registry import select
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import store_kv, store_latents, store_packed_kv
from tinyvllm.errors import KernelError
from tinyvllm.ops.facts import product_facts
from tinyvllm.ops.kv_pack import packed_rows, queries_for
from tinyvllm.ops.linear import products
from tinyvllm.ops.norm import Norm, rms_norm
from tinyvllm.ops.rope import apply_rope
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import MixedWeight, PackedWeight
from tinyvllm.quant.slices import HeadShare

__all__ = ["QKV", "append_kv", "append_latents", "norm_qkv_rope_store"]


def norm_qkv_rope_store(
    x: Tensor, norm: Norm | None, qkv: QKV, angles: Tensor | None, cache: LayerCache, batch: Batch
) -> tuple[Tensor, LayerCache]:
    """Queries of normalised x, and the cache with this step's keys and values in it.

    x [T, E] float32; angles [T, R] or None where positions are learned.
    Returns q [T, H, D] float32, rotated and as the cache's keys are (`queries_for`), and the cache after the write; attention must read
    from that. Of q alone (`QKV.parts`) nothing is written.
    """
    D, placement = cache.D, Placement.of(x.device)
    whole = qkv.q_norm is not None and int(qkv.q_norm.shape[0]) != D
    by_kernels = whole or norm is None or qkv.parts < 3 or qkv.value_norm
    if not isinstance(qkv.weight, TensorWeight):
        shape = f"{qkv.weight.I}->{qkv.weight.O} {qkv.weight.format}, D={D}"
        facts = product_facts(placement, qkv.weight, norm, head_dim=D, cache=cache)
        others = qkv.parts < 3 or qkv.value_norm
        facts = replace(facts, kv_heads=cache.K, block_size=cache.S, whole_qk_norm=whole, other_values=others)
        shape += " whole norms" * whole + " other values" * facts.other_values
        kernel = select("norm_qkv_rope_store", placement, shape, facts)
        if kernel is not None and norm is not None:
            return kernel.backend.norm_qkv_rope_store(kernel.variant, x, norm, qkv, qkv.weight, angles, cache, batch)
    # without the copy, tinygrad recomputes the norm for every output
    y = products(x if norm is None else norm(x).contiguous(), qkv.weight, batch.rows, qkv.bias, by_kernels)
    y, share = y.reshape(int(x.shape[0]), -1, D), _head_share(qkv.weight)
    K = cache.K if qkv.parts > 1 else 0
    keys = K if share is None or qkv.k_norm is None else int(qkv.k_norm.shape[0]) // D
    H = int(y.shape[1]) - keys - K * (qkv.parts == 3)
    q = _as_attended(y[:, :H], qkv.q_norm, qkv.qk_eps, None if share is None else share.heads, angles)
    if K:
        k = _as_attended(y[:, H : H + keys], qkv.k_norm, qkv.qk_eps, None if share is None else share.kv_heads, angles)
        v = rms_norm(y[:, -K:], None, qkv.qk_eps) if qkv.value_norm else y[:, -K:]
        cache = append_kv(k.contiguous(), v.contiguous(), cache, batch)
    return queries_for(cache, q.contiguous()), cache


def _as_attended(x: Tensor, norm: Tensor | None, eps: float, own: slice | None, angles: Tensor | None) -> Tensor:
    """Heads x [T, H, D] of q or k normed and rotated, of a rank the `own` ones of all."""
    x = x if norm is None else normed_heads(x, norm, eps)
    x = x if own is None else x[:, own]
    return x if angles is None else apply_rope(x.contiguous(), angles)


def _head_share(weight: Weight) -> HeadShare | None:
    """Of a rank that has q and k of all heads, which are its own."""
    share = packed_parts(weight)[0].share if isinstance(weight, (PackedWeight, MixedWeight)) else None
    return share if isinstance(share, HeadShare) else None


def normed_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H, D] normed head by head with a weight [D], or all heads at once with a weight [H D]."""
    return rms_norm(x.reshape(int(x.shape[0]), -1, int(weight.shape[0])), weight, eps).reshape(*x.shape)


def append_latents(keys: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
    """A cache of latents after keys [T, 1, D] float32 were written at the batch's slots."""
    placement = Placement.of(keys.device)
    facts = ShapeFacts(placement, head_dim=cache.D, cache_format=cache_format(cache), latent=cache.latent)
    kernel = select("kv_append", placement, f"K=1, D={cache.D} {facts.cache_format} latents", facts)
    if kernel is not None:
        return kernel.backend.append_kv(kernel.variant, keys, keys, cache, batch)
    _check_undivided(cache)
    return store_latents(cache, keys, batch.slots)


def append_kv(k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
    """The cache after k, v [T, K, D] float32 were written at the batch's slots, in the cache's format."""
    K, D, placement = cache.K, cache.D, Placement.of(k.device)
    facts = ShapeFacts(placement, head_dim=D, cache_format=cache_format(cache))
    kernel = select("kv_append", placement, f"K={K}, D={D} {facts.cache_format}", facts)
    if kernel is not None:
        return kernel.backend.append_kv(kernel.variant, k, v, cache, batch)
    _check_undivided(cache)
    if cache.packed is None:
        return store_kv(cache, k, v, batch.slots)
    format = cache.packed.format
    return store_packed_kv(cache, packed_rows(format, k, keys=True), packed_rows(format, v, keys=False), batch.slots)


def _check_undivided(cache: LayerCache) -> None:
    """KernelError where ranks divide contexts: the reference has no parts."""
    if cache.ranks is not None:
        raise KernelError("context parallelism: no kernel stores a rank's part of keys and values; leave TINYVLLM_KERNELS out")
