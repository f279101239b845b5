"""Attention over the paged KV cache: the portable path in plain tinygrad ops. Specification, fallback and oracle of the kernels.

Each sequence's blocks are gathered through the block table into a padded batch [B, C] and masked by position. The gather is an index,
which tinygrad folds into the loads of the kernel that uses it; nothing of size [B, C, K, D] is written to memory.
"""

from __future__ import annotations

from tinygrad import Tensor, UOp

from tinyvllm.batch import Batch


def paged_attention(q: Tensor, pool: Tensor, batch: Batch, scale: float, window: int = 0) -> Tensor:
    """softmax(q k^T * scale + mask) v for every row of the flat batch.

    q [T, H, D] float32; pool [P, 2, K, S, D] already holding this step's keys and values; result [T, H, D] float32. A row at position p
    sees keys 0..p of its own sequence, with `window` > 0 only the last `window` of them. H is a multiple of K (grouped queries).
    """
    Bd, Bp, Q = batch.num_decodes, batch.num_chunks, batch.max_query
    parts = []
    if Bd:
        parts.append(_padded(q[:Bd].unsqueeze(1), batch.positions[:Bd].unsqueeze(1), batch.block_tables[:Bd], pool, batch.num_blocks, scale, window)[:, 0])
    if Bp == 1:
        positions = batch.positions[Bd:].unsqueeze(0)
        parts.append(_padded(q[Bd:].unsqueeze(0), positions, batch.block_tables[Bd:], pool, batch.num_blocks, scale, window)[0])
    elif Bp > 1:
        T = int(q.shape[0]) - Bd
        starts = batch.query_starts[Bd : Bd + Bp] - Bd  # [Bp]
        rows = (starts.unsqueeze(1) + Tensor.arange(Q, device=q.device)).minimum(T - 1)  # [Bp, Q]
        out = _padded(q[Bd:][rows], batch.positions[Bd:][rows], batch.block_tables[Bd:], pool, batch.num_blocks, scale, window)
        t = Tensor.arange(T, device=q.device)
        owner = (batch.query_starts[Bd + 1 : Bd + Bp].unsqueeze(0) - Bd <= t.unsqueeze(1)).sum(1)  # [T]
        offset = (t - starts[owner]).minimum(Q - 1)
        parts.append(out.reshape(Bp * Q, *out.shape[2:])[(owner * Q + offset).cast("int32")])
    return parts[0] if len(parts) == 1 else parts[0].cat(parts[1])


def _padded(q: Tensor, positions: Tensor, tables: Tensor, pool: Tensor, m: int | UOp, scale: float, window: int) -> Tensor:
    """q [B, Q, H, D] at positions [B, Q] against the first m blocks of tables [B, M]; result [B, Q, H, D]."""
    B, Q, H, D = q.shape
    K, S = pool.shape[2], pool.shape[3]
    G = H // K
    cached = pool[tables[:, :m]].permute(0, 2, 3, 1, 4, 5).reshape(B, 2, K, 1, 1, m, S, D)  # [B, 2, K, 1, 1, m, S, D]
    k, v = cached[:, 0].float(), cached[:, 1].float()
    q = q.reshape(B, Q, K, G, D).permute(0, 2, 3, 1, 4).reshape(B, K, G, Q, 1, 1, D)
    scores = (q * k).sum(-1) * scale  # [B, K, G, Q, m, S]
    at = Tensor.arange(tables.shape[1] * S, device=q.device).reshape(tables.shape[1], S)[:m].reshape(1, 1, 1, 1, m, S)
    p = positions.reshape(B, 1, 1, Q, 1, 1)
    seen = at <= p
    if window > 0:
        seen = seen & (at > p - window)
    scores = seen.where(scores, -float("inf")).contiguous()
    weights = (scores - scores.max((4, 5), keepdim=True)).exp().contiguous()
    out = (weights.unsqueeze(-1) * v).sum((4, 5)) / weights.sum((4, 5)).unsqueeze(-1)  # [B, K, G, Q, D]
    return out.permute(0, 3, 1, 2, 4).reshape(B, Q, H, D)
