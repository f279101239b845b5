"""Copies of whole blocks of the KV cache, for sequences that diverge while they share one."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import select
from tinyvllm.placement import Placement


def copy_blocks(pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
    """One layer's pool [P, 2, K, S, D] with block pairs[n, 0] copied to block pairs[n, 1] for every n below count [1], in place.

    pairs [N, 2] int32; no block may be in two pairs. Returns the pool after the copies. To be called between steps: this does not order
    what a step reads through an alias of the pool.
    """
    P, N, block = int(pool.shape[0]), int(pairs.shape[0]), pool.nbytes() // int(pool.shape[0])
    placement = Placement.of(pool.device)
    kernel = select("kv_copy", placement, f"blocks of {block} bytes", ShapeFacts(placement, block_bytes=block))
    if kernel is not None:
        return kernel.backend.copy_blocks(kernel.variant, pool, pairs, count)
    numbers = Tensor.arange(N, device=pool.device).reshape(1, N)
    hit = (pairs[:, 1].reshape(1, N) == Tensor.arange(P, device=pool.device).reshape(P, 1)) & (numbers < count)  # [P, N]
    source = hit.any(1).where(hit.where(pairs[:, 0].reshape(1, N), 0).sum(1), Tensor.arange(P, device=pool.device))
    return pool.assign(pool[source].contiguous())
