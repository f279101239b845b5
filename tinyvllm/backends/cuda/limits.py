"""Shapes that the CUDA kernels support."""

from __future__ import annotations

from tinyvllm.backends.cuda.attention_plan import prefill_blocks, prefill_shared
from tinyvllm.backends.cuda.driver import gpu_of
from tinyvllm.backends.limits import (
    Limits,
    ShapeFacts,
    at_most,
    between,
    cache_formats,
    less_than,
    matrices,
    multiple_of,
    no_layer_norm,
    norm_by_head,
    own_values,
    pairs_of_sixteen,
    plain_logits,
    plain_outputs,
    plain_rows,
    power_of_two,
    rms_norm_only,
    shared_bias,
    silu_gate,
    stored_values,
    tiles_only,
)
from tinyvllm.backends.recurrent import MAX_KEY_DIM
from tinyvllm.batch import PACKED_KV
from tinyvllm.quant.formats import FORMATS


def prefill_fits_shared_memory(facts: ShapeFacts) -> str | None:
    """attention_prefill's smallest block of threads fits the GPU's shared memory."""
    D, cache, available = facts.head_dim, facts.cache_format, gpu_of(facts.placement).shared
    needed = min(prefill_shared(block, D, cache) for block in prefill_blocks(D, facts.queries_per_kv_head, cache))
    if needed <= available:
        return None
    return f"kernel needs {needed} bytes of shared memory at head dimension {D}; a block of threads has {available} here"


def wide_heads(facts: ShapeFacts) -> str | None:
    """Heads above 256 features have two halves of values."""
    return None if facts.head_dim <= 256 else _WIDE(facts)


def queries_of_a_block(facts: ShapeFacts) -> str | None:
    """attention_prefill has all query heads of a KV head in a block of threads."""
    return at_most("queries_per_kv_head", 64 if facts.head_dim <= 256 else 32)(facts)


def columns_of_blocks(facts: ShapeFacts) -> int:
    """Columns that kernels read at a time: 32, or the widest block of the weight's formats."""
    return max(32, *(FORMATS[name].elements for name in facts.format.split("+") if name))


_INPUTS = multiple_of("inputs", columns_of_blocks)
_HEADS = multiple_of("head_dim", 16)
_PRODUCT = (_INPUTS, tiles_only)
_ONE_FORMAT = matrices(1, "parts of several formats are multiplied by norm_qkv_rope_store and norm_gate_up_silu")
_EXPERTS = at_most("experts", 1024)  # a thread counts the rows of each
_WIDE = multiple_of("head_dim", 32)
_ATTENTION = (
    _HEADS,
    between("head_dim", 32, 512),
    cache_formats("F16", "BF16", *PACKED_KV.values()),  # what tensor cores take, or what becomes that
    pairs_of_sixteen,
    wide_heads,
    less_than("cache_bytes", 64 << 30),  # the kernels' index limit
    power_of_two("block_size", 8, 256),
    queries_of_a_block,
    prefill_fits_shared_memory,
)

LIMITS: Limits = {
    "embed": (_INPUTS, plain_rows),
    "norm_qkv_rope_store": (*_PRODUCT, rms_norm_only, _HEADS, norm_by_head, own_values),
    "kv_append": (_HEADS, stored_values),
    "attention_decode": (*_ATTENTION, stored_values),
    "attention_prefill": (*_ATTENTION, stored_values),
    "matmul": (*plain_outputs, *_PRODUCT, _ONE_FORMAT),
    "lora_bias": (multiple_of("inputs", 16), multiple_of("outputs", 16), no_layer_norm),
    "gated_delta": (_HEADS, at_most("head_dim", MAX_KEY_DIM), multiple_of("outputs", 16)),
    "norm_gate_up_silu": (silu_gate, multiple_of("outputs", 16), *_PRODUCT, rms_norm_only),
    "norm_route": (_INPUTS, _EXPERTS, no_layer_norm),
    "experts_gate_up_silu": (multiple_of("outputs", 16), *_PRODUCT, _ONE_FORMAT, _EXPERTS, no_layer_norm, shared_bias),
    "experts_down": (multiple_of("outputs", 16), *_PRODUCT, _ONE_FORMAT, _EXPERTS),
    "norm_head": (*plain_logits, *_PRODUCT, _ONE_FORMAT, rms_norm_only),
    "advance": (),
    "kv_copy": (multiple_of("block_bytes", 16),),
    "sample": (at_most("vocabulary", 1 << 18),),  # what its bins can count
    "pack_tiles": (_INPUTS,),
}
