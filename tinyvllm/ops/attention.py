"""Attention over the paged KV cache: the portable path in plain tinygrad ops. Specification, fallback and oracle of the kernels.

Each sequence's blocks are gathered through the block table into a padded batch [B, C] and masked by position. The gather is an index,
which tinygrad folds into the loads of the kernel that uses it; nothing of size [B, C, K, D] is written to memory.
"""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.batch import Batch, LayerCache


def paged_attention(q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int = 0) -> Tensor:
    """softmax(q k^T * scale + mask) v for every row of the flat batch.

    q [T, H, D] float32; cache of [P, 2, K, S, D] already holding this step's keys and values; result [T, H, D] float32. A row at position
    p sees keys 0..p of its own sequence, with `window` > 0 only the last `window` of them. H is a multiple of K (grouped queries).
    """
    Bd, Bp = batch.num_decodes, batch.num_chunks
    parts = []
    if Bd:
        singles = _padded(q[:Bd].unsqueeze(1), batch.positions[:Bd].unsqueeze(1), batch.block_tables[:Bd], cache, batch, scale, window)
        parts.append(singles[:, 0])
    if Bp == 1:
        chunk = _padded(q[Bd:].unsqueeze(0), batch.positions[Bd:].unsqueeze(0), batch.block_tables[Bd:], cache, batch, scale, window)
        parts.append(chunk[0])
    elif Bp > 1:
        parts.append(_chunks(q[Bd:], cache, batch, scale, window))
    return parts[0] if len(parts) == 1 else parts[0].cat(parts[1])


def _chunks(q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int) -> Tensor:
    """Several chunks: rows q [T, H, D] of the flat batch go to a padded [Bp, Q, H, D] and back by index."""
    Bd, Bp, Q, T = batch.num_decodes, batch.num_chunks, batch.max_query, int(q.shape[0])
    starts = batch.query_starts[Bd : Bd + Bp] - Bd  # [Bp]
    rows = (starts.unsqueeze(1) + Tensor.arange(Q, device=q.device)).minimum(T - 1)  # [Bp, Q]
    out = _padded(q[rows], batch.positions[Bd:][rows], batch.block_tables[Bd:], cache, batch, scale, window)
    t = Tensor.arange(T, device=q.device)
    owner = (batch.query_starts[Bd + 1 : Bd + Bp].unsqueeze(0) - Bd <= t.unsqueeze(1)).sum(1)  # [T]
    offset = (t - starts[owner]).minimum(Q - 1)
    return out.reshape(Bp * Q, *out.shape[2:])[(owner * Q + offset).cast("int32")]


def _padded(q: Tensor, positions: Tensor, tables: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int) -> Tensor:
    """q [B, Q, H, D] at positions [B, Q] against the first m blocks of tables [B, M]; result [B, Q, H, D]."""
    B, Q, H, D = q.shape
    K, S, M, m = cache.keys.shape[2], cache.keys.shape[3], tables.shape[1], batch.num_blocks
    G = H // K
    k, v = (pool[tables[:, :m]][:, :, i].permute(0, 2, 1, 3, 4).reshape(B, K, 1, 1, m, S, D).float() for i, pool in enumerate(cache))
    q = q.reshape(B, Q, K, G, D).permute(0, 2, 3, 1, 4).reshape(B, K, G, Q, 1, 1, D)
    scores = (q * k).sum(-1) * scale  # [B, K, G, Q, m, S]
    at = Tensor.arange(M * S, device=q.device).reshape(M, S)[:m].reshape(1, 1, 1, 1, m, S)
    p = positions.reshape(B, 1, 1, Q, 1, 1)
    seen = at <= p
    if window > 0:
        seen = seen & (at > p - window)
    scores = seen.where(scores, -float("inf")).contiguous()
    weights = (scores - scores.max((4, 5), keepdim=True)).exp().contiguous()
    out = (weights.unsqueeze(-1) * v).sum((4, 5)) / weights.sum((4, 5)).unsqueeze(-1)  # [B, K, G, Q, D]
    return out.permute(0, 3, 1, 2, 4).reshape(B, Q, H, D)
