"""Shapes that the CPU's kernels support."""

from __future__ import annotations

from tinyvllm.backends.limits import (
    Limits,
    ShapeFacts,
    between,
    grouped_rows,
    matrices,
    multiple_of,
    no_layer_norm,
    norm_by_head,
    normed_in_sixteens,
    pairs_of_sixteen,
    some_norm,
)

WIDTH = 32  # columns that the kernels read x and weights by

_INPUTS = multiple_of("inputs", WIDTH)
_HEADS = multiple_of("head_dim", 16)
_ONE_FORMAT = matrices(1, "parts of several formats are multiplied by norm_qkv_rope_store and norm_gate_up_silu")
_VALUES, _LATENTS = multiple_of("latent", 16), between("head_dim", 32, 1024)
_WIDTHS = between("head_dim", 32, 512)


def _widths(facts: ShapeFacts) -> str | None:
    """A key of a latent cache may be wider."""
    return (_LATENTS if facts.latent else _WIDTHS)(facts)


_ATTENTION = (_HEADS, _VALUES, _widths, pairs_of_sixteen)

LIMITS: Limits = {
    "embed": (_INPUTS,),
    "norm_qkv_rope_store": (_INPUTS, some_norm, _HEADS, norm_by_head),
    "kv_append": (_HEADS,),
    "attention_decode": _ATTENTION,
    "attention_prefill": _ATTENTION,
    "matmul": (_INPUTS, _ONE_FORMAT, normed_in_sixteens),
    "lora_bias": (multiple_of("inputs", 16), multiple_of("outputs", 16), no_layer_norm),
    "gated_delta": (_HEADS, multiple_of("outputs", 16)),
    "norm_gate_up_silu": (multiple_of("outputs", 16), _INPUTS, no_layer_norm),
    "norm_route": (_INPUTS, _ONE_FORMAT, no_layer_norm),
    "experts_gate_up_silu": (multiple_of("outputs", 16), _INPUTS, no_layer_norm, grouped_rows),
    "experts_down": (multiple_of("outputs", 16), _INPUTS, _ONE_FORMAT, grouped_rows),
    "norm_head": (_INPUTS, _ONE_FORMAT),
    "advance": (),
    "kv_copy": (multiple_of("block_bytes", 8),),
    "sample": (),
}
