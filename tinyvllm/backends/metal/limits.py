"""Shapes that the Metal kernels support."""

from __future__ import annotations

from tinyvllm.backends.limits import (
    Limits,
    ShapeFacts,
    at_most,
    between,
    less_than,
    matrices,
    multiple_of,
    no_layer_norm,
    norm_by_head,
    own_values,
    plain_logits,
    plain_outputs,
    plain_rows,
    power_of_two,
    rms_norm_only,
    shared_bias,
    silu_gate,
    stored_values,
)
from tinyvllm.backends.recurrent import MAX_KEY_DIM
from tinyvllm.quant.formats import FORMATS

WIDTH = 32  # columns that the kernels read weights by


def _columns(facts: ShapeFacts) -> int:
    """Columns that a row must be a multiple of: a block of each part's format, at least WIDTH."""
    return max(WIDTH, *(FORMATS[name].elements for name in facts.format.split("+")))


def wide_heads(facts: ShapeFacts) -> str | None:
    """Heads above 256 features have two halves of values."""
    return None if facts.head_dim <= 256 else _WIDE(facts)


_WIDE = multiple_of("head_dim", 32)
_INPUTS = multiple_of("inputs", _columns)
_HEADS = multiple_of("head_dim", 16)
_EXPERTS = at_most("experts", 1024)  # a thread counts the rows of each
_ATTENTION = (
    _HEADS,
    between("head_dim", 32, 512),
    wide_heads,
    less_than("cache_elements", 1 << 34),  # the kernels' index limit; packed caches count bytes
    power_of_two("block_size", 8, 256),
    at_most("queries_per_kv_head", 32),
)

LIMITS: Limits = {
    "embed": (_INPUTS, plain_rows),
    "norm_qkv_rope_store": (_INPUTS, matrices(3, "q, k and v"), rms_norm_only, _HEADS, norm_by_head, own_values),
    "kv_append": (_HEADS, stored_values),
    "attention_decode": (*_ATTENTION, stored_values),
    "attention_prefill": (*_ATTENTION, stored_values),
    "matmul": (*plain_outputs, _INPUTS, matrices(1, "several are multiplied only together with their norm")),
    "lora_bias": (multiple_of("inputs", WIDTH), multiple_of("outputs", 16), no_layer_norm),
    "gated_delta": (_HEADS, at_most("head_dim", MAX_KEY_DIM), multiple_of("outputs", 16)),
    "norm_gate_up_silu": (silu_gate, _INPUTS, matrices(2, "gate and up"), rms_norm_only),
    "norm_route": (_INPUTS, _EXPERTS, no_layer_norm),
    "experts_gate_up_silu": (_INPUTS, matrices(2, "gate and up"), _EXPERTS, rms_norm_only, shared_bias),
    "experts_down": (multiple_of("outputs", 4), _INPUTS, matrices(1, "down of all experts"), _EXPERTS),
    "norm_head": (*plain_logits, _INPUTS, rms_norm_only),
    "advance": (),
    "kv_copy": (multiple_of("block_bytes", 16),),
    "sample": (at_most("vocabulary", 1 << 18),),  # what its bins can count
}
