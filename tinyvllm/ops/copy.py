"""Copies of whole blocks of the KV cache, for sequences that part ways while they share one."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.base import calls_of
from tinyvllm.backends.registry import select
from tinyvllm.placement import Placement


def copy_blocks(pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
    """One layer's pool [P, 2, K, S, D] with block pairs[n, 1] made equal to block pairs[n, 0] for every n below count [1], in place.

    pairs [N, 2] int32; no block may be in two pairs. Returns the pool after it. Belongs between steps: what a step reads through an alias
    of the pool is not ordered by this.
    """
    P, N, block = int(pool.shape[0]), int(pairs.shape[0]), pool.nbytes() // int(pool.shape[0])
    calls = calls_of(str(pool.device))
    row = select("kv_copy", Placement.of(pool.device), f"blocks of {block} bytes", calls.refuses_block(block))
    if row is not None:
        out: Tensor = calls.copy_blocks(row, pool, pairs, count)
        return out
    numbers = Tensor.arange(N, device=pool.device).reshape(1, N)
    hit = (pairs[:, 1].reshape(1, N) == Tensor.arange(P, device=pool.device).reshape(P, 1)) & (numbers < count)  # [P, N]
    source = hit.any(1).where(hit.where(pairs[:, 0].reshape(1, N), 0).sum(1), Tensor.arange(P, device=pool.device))
    return pool.assign(pool[source].contiguous())
