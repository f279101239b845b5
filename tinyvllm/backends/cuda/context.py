"""Calls of the CUDA kernels of ranks that divide contexts.

Decodes: each rank attends to its own keys, and all merge the results of each partition. Rows of prompts: each rank attends to all keys for
its own rows, after it has got the blocks of the others.
"""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.buffers import empty, integers, present, scratch
from tinyvllm.backends.cuda import context_plan, plan
from tinyvllm.backends.cuda.driver import gpu_at
from tinyvllm.backends.cuda.launch import launch
from tinyvllm.backends.cuda.ranks import launch_with, places_of
from tinyvllm.backends.shapes import Attention
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.integers import ceil_div
from tinyvllm.placement import RankGroup


class ContextKernels:
    """The methods of `CudaBackend` for ranks that divide contexts."""

    def attention_ranks(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        T, H, D = (int(d) for d in q.shape)
        a = Attention.of(q, cache, scale, window, batch, cap, sinks)
        out = _decodes(empty(q, T, H * D), q, cache, a, batch, sinks) if batch.num_decodes else None
        if batch.num_chunks:
            return _chunks(out, q, cache, a, batch, sinks)
        assert out is not None
        return out

    def own_rows(self, variant: str, x: Tensor, group: RankGroup, rows: Tensor) -> tuple[Tensor, Tensor]:
        T, N = (int(d) for d in x.shape)
        kernel = context_plan.own_rows(plan.BASE, T, N, group)
        out, count = launch(kernel, [empty(x, ceil_div(T, group.world_size), N), integers(x, 1)], [x, rows])
        return out, count

    def gather_rows(self, variant: str, part: Tensor, T: int, group: RankGroup, rows: Tensor) -> Tensor:
        N = int(part.shape[1])
        return launch_with(group, context_plan.gather_rows(plan.BASE, T, N, group), empty(part, T, N), [part, rows])


def _decodes(out: Tensor, q: Tensor, cache: LayerCache, a: Attention, batch: Batch, sinks: Tensor | None) -> Tensor:
    """`out` after its rows of decodes were written. Sequences for which a place has no room take turns.

    Launches in which the group meets depend on each other: all read and count the same turns.
    """
    group, gpu, count = cache.ranks, gpu_at(q), batch.num_decodes
    turns, sites, shared = places_of(group, q)
    at_once = context_plan.sequences_at_once(a, group)
    for first in range(0, count, at_once):
        some = min(at_once, count - first)
        attend = context_plan.attention_decode_ranks(plan.BASE, first, some, a, gpu, group)
        merge = context_plan.merge_ranks(plan.BASE, first, some, a, group)
        ins = [turns, q, cache.keys, batch.block_tables, batch.context_lens, batch.decodes, out]
        written = [*sites]
        written[group.rank] = launch(attend, [sites[group.rank]], ins)[0]
        ins = [shared, batch.context_lens, *present(sinks), batch.decodes]
        out = launch(merge, [out, turns, *written], ins)[0]
    return out


def _chunks(decodes: Tensor | None, q: Tensor, cache: LayerCache, a: Attention, batch: Batch, sinks: Tensor | None) -> Tensor:
    """Float32 [T, H * D], of whose rows of chunks only this rank's are written; `decodes` has those of the decodes, if there are any."""
    (T, H, D), group = (int(d) for d in q.shape), cache.ranks
    turns, sites, shared = places_of(group, q)
    block_bytes = cache.values.nbytes() // int(cache.values.shape[0])
    # the values' alias: a tensor that two kernels read after a store is copied, the whole pool
    caches = [cache.values if rank == group.rank else scratch(q, cache.values.nbytes()) for rank in range(group.world_size)]
    gather = context_plan.gather_blocks(plan.BASE, a, block_bytes, group)
    ins = [shared, q if decodes is None else decodes, batch.block_tables, batch.context_lens, batch.query_starts, batch.chunks]
    caches = launch(gather, [turns, *sites, *caches], ins)[1 + group.world_size :]
    rows = T - batch.num_decodes
    kernel = context_plan.attention_prefill(plan.BASE, rows, batch.num_chunks, a, gpu_at(q), group)
    ins = [q, *caches, batch.block_tables, batch.context_lens, batch.query_starts, *present(sinks), batch.rows, batch.chunks]
    return launch(kernel, [empty(q, T, H * D) if decodes is None else decodes], ins)[0]
