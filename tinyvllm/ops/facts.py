"""Facts about the operands of products and of attention that a backend's limits are checked against."""

from __future__ import annotations

from tinyvllm.backends.buffers import cache_format
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import KernelTable, KernelWeight, NormWeights
from tinyvllm.batch import LayerCache
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import MixedWeight, PackedWeight, StoredWeight, TileWeight


def product_facts(
    placement: Placement,
    weight: KernelWeight | KernelTable,
    norm: NormWeights | None = None,
    outputs: int = 0,
    head_dim: int = 0,
    cache: LayerCache | None = None,
) -> ShapeFacts:
    """Of a product with `weight`, after `norm` if there is one; `outputs` if they are not the weight's rows; `cache` if it writes one."""
    part = weight.parts[0] if isinstance(weight, MixedWeight) else weight  # all are in one layout
    layout = Layout.TILES if isinstance(part, TileWeight) else Layout.PANELS if isinstance(part, PackedWeight) else Layout.ROWS
    return ShapeFacts(
        placement,
        inputs=weight.I,
        outputs=outputs or weight.O,
        format=weight.format,
        layout=layout,
        matrices=len(weight.parts) if isinstance(weight, (StoredWeight, MixedWeight)) else 1,
        norm="" if norm is None else norm.kind,
        eps=0.0 if norm is None else float(norm.eps),
        head_dim=head_dim,
        cache_format="" if cache is None else cache_format(cache),
    )


def attention_facts(placement: Placement, cache: LayerCache, query_heads: int, table_blocks: int, cap: bool, sinks: bool) -> ShapeFacts:
    """Of attention over a cache."""
    return ShapeFacts(
        placement,
        head_dim=cache.D,
        query_heads=query_heads,
        cap=cap,
        sinks=sinks,
        latent=cache.latent,
        kv_heads=cache.K,
        block_size=cache.S,
        table_blocks=table_blocks,
        cache_format=cache_format(cache),
        cache_elements=int(cache.keys.numel()),
        cache_bytes=int(cache.keys.nbytes()),
    )
