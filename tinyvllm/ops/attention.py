"""Attention over the paged KV cache: by kernels, or by the portable path in plain tinygrad, their specification, fallback and oracle.

On the portable path each sequence's blocks are gathered through the block table into a padded batch [B, C] and masked by position. The
gather is an index, which tinygrad folds into the loads of the kernel that uses it; nothing of size [B, C, K, D] is written to memory.
"""

from __future__ import annotations

from tinygrad import Tensor, UOp

from tinyvllm.backends.buffers import cache_format
from tinyvllm.backends.registry import Selection, select
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.ops.facts import attention_facts
from tinyvllm.ops.kv_pack import unpacked
from tinyvllm.placement import Placement


class _Padded:
    """Sequences padded to Q queries each: their block tables up to the step's longest context, and which keys each query sees."""

    def __init__(self, positions: Tensor, tables: Tensor, m: int | UOp, S: int):
        B, Q = positions.shape
        M = int(tables.shape[1])
        self.B, self.Q, self.m, self.S = B, Q, m, S
        self._positions = positions.reshape(B, 1, 1, Q, 1, 1)
        self._at = Tensor.arange(M * S, device=tables.device).reshape(M, S)[:m].reshape(1, 1, 1, 1, m, S)
        self._tables = tables[:, :m]
        self._masks: dict[int, Tensor] = {}

    def mask(self, window: int) -> Tensor:
        """Which keys each query sees, [B, 1, 1, Q, m, S]; built once for all layers of one window."""
        if window not in self._masks:
            seen = self._at <= self._positions
            self._masks[window] = seen & (self._at > self._positions - window) if window > 0 else seen
        return self._masks[window]

    def attend(self, q: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        """q [B, Q, H, D] against the first m blocks of each table; result [B, Q, H, D]."""
        (_, _, H, D), B, Q, m, S = q.shape, self.B, self.Q, self.m, self.S
        K = cache.K
        G = H // K
        if cache.packed is not None:
            gathered = unpacked(cache, self._tables)
        else:
            gathered = cache.keys[self._tables][:, :, 0], cache.values[self._tables][:, :, 1]  # [B, m, K, S, D]
        k, v = (x.permute(0, 2, 1, 3, 4).reshape(B, K, 1, 1, m, S, D).float() for x in gathered)
        q = q.reshape(B, Q, K, G, D).permute(0, 2, 3, 1, 4).reshape(B, K, G, Q, 1, 1, D)
        seen = self.mask(window)
        scores = seen.where((q * k).sum(-1) * scale, -float("inf")).contiguous()  # [B, K, G, Q, m, S]
        weights = (scores - scores.max((4, 5), keepdim=True)).exp().contiguous()
        # also the values: a block may hold NaNs of an earlier request, and 0 * NaN is NaN
        out = (weights.unsqueeze(-1) * seen.unsqueeze(-1).where(v, 0)).sum((4, 5)) / weights.sum((4, 5)).unsqueeze(-1)  # [B, K, G, Q, D]
        return out.permute(0, 3, 1, 2, 4).reshape(B, Q, H, D)


class PagedAttention:
    """Attention of one step: softmax(q k^T * scale + mask) v for every row of the flat batch.

    What all layers share (tables, masks, the indices from the flat batch to the padded one and back) is built once, here.
    """

    def __init__(self, batch: Batch, S: int):
        self._batch = batch
        Bd, Bp, Q, T = batch.num_decodes, batch.num_chunks, batch.max_query, int(batch.tokens.shape[0])
        tables, positions, m = batch.block_tables, batch.positions, batch.num_blocks
        self._singles = _Padded(positions[:Bd].unsqueeze(1), tables[:Bd], m, S) if Bd else None
        self._rows: Tensor | None = None
        if Bp > 1:
            starts = batch.query_starts[Bd : Bd + Bp] - Bd  # [Bp]
            self._rows = (starts.unsqueeze(1) + Tensor.arange(Q, device=tables.device)).minimum(T - Bd - 1)  # [Bp, Q]
            t = Tensor.arange(T - Bd, device=tables.device)
            ends = batch.query_starts[Bd + 1 : Bd + Bp].unsqueeze(0) - Bd
            owner = (ends <= t.unsqueeze(1)).where(1, 0).sum(1).cast("int32")  # [T - Bd]
            self._back = (owner * Q + (t - starts[owner]).minimum(Q - 1)).cast("int32").contiguous()
        chunk_positions = positions[Bd:].unsqueeze(0) if self._rows is None else positions[Bd:][self._rows]
        self._chunks = _Padded(chunk_positions, tables[Bd:], m, S) if Bp else None

    def __call__(self, q: Tensor, cache: LayerCache, scale: float, window: int = 0) -> Tensor:
        """q [T, H, D] float32 to [T, H * D] float32, against a cache that already holds this step's keys and values; q is as
        the cache's keys are (`norm_qkv_rope_store`).

        A row at position p sees keys 0..p of its own sequence, with `window` > 0 only the last `window` of them. H is a multiple of K
        (grouped queries).
        """
        decode, prefill = self._kernel("attention_decode", cache, q), self._kernel("attention_prefill", cache, q)
        Bd, T = self._batch.num_decodes, int(q.shape[0])
        singles = chunks = None
        if self._singles is not None:
            if decode is not None:
                singles = decode.backend.attention_decode(decode.variant, q, cache, scale, window, self._batch)
            else:
                singles = self._singles.attend(q[:Bd].unsqueeze(1), cache, scale, window).reshape(Bd, -1).contiguous()
        if self._chunks is None:
            assert singles is not None
            return singles
        if prefill is not None:
            both = singles is not None and decode is not None
            out, backend = singles if both else None, prefill.backend
            chunks = backend.attention_prefill(prefill.variant, out, q, cache, scale, window, self._batch)
            if both or singles is None:
                return chunks
            chunks = chunks[Bd:]
        elif self._rows is None:
            chunks = self._chunks.attend(q[Bd:].unsqueeze(0), cache, scale, window).reshape(T - Bd, -1).contiguous()
        else:
            out = self._chunks.attend(q[Bd:][self._rows], cache, scale, window)  # [Bp, Q, H, D]
            chunks = out.reshape(-1, int(q.shape[1] * q.shape[2]))[self._back].contiguous()
        return chunks if singles is None else singles[:Bd].cat(chunks).contiguous()

    def _kernel(self, stem: str, cache: LayerCache, q: Tensor) -> Selection | None:
        """The kernel of one of the two stems; None for the reference, or if the step has no sequences for it."""
        if (self._singles if stem == "attention_decode" else self._chunks) is None:
            return None
        (H, D), K, placement = (int(d) for d in q.shape[1:]), cache.K, Placement.of(q.device)
        return select(stem, placement, f"H={H}, K={K}, D={D} {cache_format(cache)}", attention_facts(placement, cache, H))
