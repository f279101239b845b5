"""Attention over the paged KV cache: by kernels, or by the portable path in plain tinygrad, their specification, fallback and oracle.

On the portable path each sequence's blocks are gathered through the block table into a padded batch [B, C] and masked by position. The
gather is an index, which tinygrad folds into the loads of the kernel that uses it; nothing of size [B, C, K, D] is written to memory.
"""

from __future__ import annotations

import functools

from tinygrad import Tensor, UOp

from tinyvllm.backends.buffers import cache_format
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import Selection, choice_of, select
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.errors import KernelError
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

    def attend(self, q: Tensor, cache: LayerCache, scale: float, window: int, cap: float, sinks: Tensor | None) -> Tensor:
        """q [B, Q, H, D] against the first m blocks of each table; result [B, Q, H, D], of latents [B, Q, H, their features]."""
        (_, _, H, D), B, Q, m, S = q.shape, self.B, self.Q, self.m, self.S
        K, V = cache.K, cache.value_dim
        G = H // K
        k, v = (x.permute(0, 2, 1, 3, 4).reshape(B, K, 1, 1, m, S, x.shape[4]).float() for x in _gathered(cache, self._tables))
        q = q.reshape(B, Q, K, G, D).permute(0, 2, 3, 1, 4).reshape(B, K, G, Q, 1, 1, D)
        seen = self.mask(window)
        products = (q * k).sum(-1) * scale
        products = products if cap == 0.0 else (products / cap).tanh() * cap
        scores = seen.where(products, -float("inf")).contiguous()  # [B, K, G, Q, m, S]
        top = scores.max((4, 5), keepdim=True)
        own = None if sinks is None else sinks.reshape(1, K, G, 1, 1, 1)
        top = top if own is None else top.maximum(own)
        weights = (scores - top).exp().contiguous()
        total = weights.sum((4, 5)).unsqueeze(-1)
        total = total if own is None else total + (own - top).exp().squeeze(5)
        # also the values: a block may hold NaNs of an earlier request, and 0 * NaN is NaN
        out = (weights.unsqueeze(-1) * seen.unsqueeze(-1).where(v, 0)).sum((4, 5)) / total  # [B, K, G, Q, V]
        return out.permute(0, 3, 1, 2, 4).reshape(B, Q, H, V)


def _gathered(cache: LayerCache, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, m, K, S, D] and values of the blocks tables [B, m]."""
    if cache.packed is not None:
        return unpacked(cache, tables)
    if cache.latent:
        return cache.keys[tables][:, :, 0], cache.values[tables][:, :, 0, :, :, : cache.latent]
    return cache.keys[tables][:, :, 0], cache.values[tables][:, :, 1]


class PagedAttention:
    """Attention of one step: softmax(q k^T * scale + mask) v for every row of the flat batch; with a cap c softmax(c tanh(. / c) + mask) v.
    With sinks each head has one more score, which is no product and has no value.

    What all layers share (tables, masks, the indices from the flat batch to the padded one and back) is built once, where the reference
    computes.
    """

    def __init__(self, batch: Batch, S: int):
        self._batch, self._S = batch, S

    @functools.cached_property
    def _singles(self) -> _Padded:
        """The sequences of one token."""
        batch, Bd = self._batch, self._batch.num_decodes
        return _Padded(batch.positions[:Bd].unsqueeze(1), batch.block_tables[:Bd], batch.num_blocks, self._S)

    @functools.cached_property
    def _chunks(self) -> _Padded:
        """The sequences of several tokens."""
        batch, Bd = self._batch, self._batch.num_decodes
        positions = batch.positions[Bd:]
        positions = positions.unsqueeze(0) if batch.num_chunks == 1 else positions[self._indices[0]]
        return _Padded(positions, batch.block_tables[Bd:], batch.num_blocks, self._S)

    @functools.cached_property
    def _indices(self) -> tuple[Tensor, Tensor]:
        """Of several chunks: from the flat batch to the padded one, [Bp, Q], and back, [T - Bd]."""
        batch, device = self._batch, self._batch.block_tables.device
        Bd, Bp, Q, T = batch.num_decodes, batch.num_chunks, batch.max_query, int(batch.tokens.shape[0])
        starts = batch.query_starts[Bd : Bd + Bp] - Bd  # [Bp]
        rows = (starts.unsqueeze(1) + Tensor.arange(Q, device=device)).minimum(T - Bd - 1)
        t = Tensor.arange(T - Bd, device=device)
        ends = batch.query_starts[Bd + 1 : Bd + Bp].unsqueeze(0) - Bd
        owner = (ends <= t.unsqueeze(1)).where(1, 0).sum(1).cast("int32")  # [T - Bd]
        return rows, (owner * Q + (t - starts[owner]).minimum(Q - 1)).cast("int32").contiguous()

    def __call__(
        self, q: Tensor, cache: LayerCache, scale: float, window: int = 0, cap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, H, D] float32 to [T, H * D] float32, against a cache that already holds this step's keys and values; q is as
        the cache's keys are (`norm_qkv_rope_store`). Of a cache of latents the result is [T, H * their features].

        A row at position p sees keys 0..p of its own sequence, with `window` > 0 only the last `window` of them. H is a multiple of K
        (grouped queries). sinks [H] float32.
        """
        if cache.ranks is not None:
            return self._of_ranks(q, cache, scale, window, cap, sinks)
        decode, prefill = (self._kernel(stem, cache, q, cap, sinks) for stem in ("attention_decode", "attention_prefill"))
        Bd, Bp, T = self._batch.num_decodes, self._batch.num_chunks, int(q.shape[0])
        singles = chunks = None
        if Bd:
            if decode is not None:
                singles = decode.backend.attention_decode(decode.variant, q, cache, scale, window, self._batch, cap, sinks)
            else:
                singles = self._singles.attend(q[:Bd].unsqueeze(1), cache, scale, window, cap, sinks).reshape(Bd, -1).contiguous()
        if not Bp:
            assert singles is not None
            return singles
        if prefill is not None:
            both = singles is not None and decode is not None
            out, backend = singles if both else None, prefill.backend
            chunks = backend.attention_prefill(prefill.variant, out, q, cache, scale, window, self._batch, cap, sinks)
            if both or singles is None:
                return chunks
            chunks = chunks[Bd:]
        elif Bp == 1:
            chunks = self._chunks.attend(q[Bd:].unsqueeze(0), cache, scale, window, cap, sinks).reshape(T - Bd, -1).contiguous()
        else:
            rows, back = self._indices
            out = self._chunks.attend(q[Bd:][rows], cache, scale, window, cap, sinks)  # [Bp, Q, H, D]
            chunks = out.reshape(-1, int(q.shape[1]) * cache.value_dim)[back].contiguous()
        return chunks if singles is None else singles[:Bd].cat(chunks).contiguous()

    def _of_ranks(self, q: Tensor, cache: LayerCache, scale: float, window: int, cap: float, sinks: Tensor | None) -> Tensor:
        """Attention to keys of which this rank has a part, by the kernels that chunks of prompts have in one process."""
        shape, facts = self._need(cache, q, cap, sinks)
        kernel = select("attention_prefill", facts.placement, shape, facts)
        if kernel is None:
            why = choice_of("attention_prefill", shape, facts).why
            raise KernelError(f"context parallelism: only kernels attend to a divided context, and none does here ({why}); use one process")
        return kernel.backend.attention_ranks(kernel.variant, q, cache, scale, window, self._batch, cap, sinks)

    def _kernel(self, stem: str, cache: LayerCache, q: Tensor, cap: float, sinks: Tensor | None) -> Selection | None:
        """The kernel of one of the two stems; None for the reference, or if the step has no sequences for it."""
        if (self._batch.num_decodes if stem == "attention_decode" else self._batch.num_chunks) == 0:
            return None
        shape, facts = self._need(cache, q, cap, sinks)
        return select(stem, facts.placement, shape, facts)

    def _need(self, cache: LayerCache, q: Tensor, cap: float, sinks: Tensor | None) -> tuple[str, ShapeFacts]:
        """The shape in words, and what kernels are selected by."""
        (H, D), K, placement = (int(d) for d in q.shape[1:]), cache.K, Placement.of(q.device)
        policies = f"{' capped' * (cap != 0.0)}{' sinks' * (sinks is not None)}{' latents' * (cache.latent > 0)}"
        facts = attention_facts(placement, cache, H, int(self._batch.block_tables.shape[1]), cap != 0.0, sinks is not None)
        return f"H={H}, K={K}, D={D} {cache_format(cache)}{policies}", facts
