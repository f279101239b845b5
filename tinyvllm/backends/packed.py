"""What the kernels of a device compute with as it is packed: weight formats, and types of the KV cache."""

from __future__ import annotations

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import backend_for, usable_variants
from tinyvllm.batch import PACKED_KV
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import packed_in


def packed_weights(placement: Placement) -> tuple[str, ...]:
    """Names of the formats whose matrices products here read as packed; others become floats at load."""
    backend = backend_for(placement)
    return () if backend is None or not usable_variants(placement, "matmul") else packed_in(backend.layout)


def packed_caches(placement: Placement) -> tuple[str, ...]:
    """Values of `kv_cache_dtype` whose packed blocks attention here reads, for usual heads of 128 numbers."""
    backend = backend_for(placement)
    if backend is None or not usable_variants(placement, "attention_decode"):
        return ()
    facts = {name: ShapeFacts(placement, cache_format=format, head_dim=128, block_size=16) for name, format in PACKED_KV.items()}
    return tuple(name for name, shape in facts.items() if backend.unsupported("attention_decode", shape) is None)
