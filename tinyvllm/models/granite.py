"""Granite 3 and 4 (dense), their differences from LLaMA: four multipliers. Granite 4's files are those of its hybrids, with attention in
all layers and no experts: its MLP is the one that the others' experts share.
"""

from __future__ import annotations

from typing import Any

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform

_NAMES = {"ffn_gate": "shared_mlp.input_linear", "ffn_up": "shared_mlp.input_linear", "ffn_down": "shared_mlp.output_linear"}


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return llama.hf_config(fields, family="granite", **_multipliers(fields))


def dense_hybrid_from_hf(source: Source) -> ModelConfig:
    """Granite 4: without a `position_embedding_type` of "rope" no layer rotates."""
    fields = Fields(source.config)
    layers, kinds, rope = fields.layers(), fields.get("layer_types"), fields.get("position_embedding_type")
    dense = "is not supported; of Granite 4 only models without experts and with attention in each layer are"
    if experts := fields.integer("num_local_experts", 8):
        raise ModelError(f"{fields.where}: num_local_experts {experts} {dense}")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise ModelError(f"{fields.where}: layer_types {quoted(kinds)} {dense}")
    if rope not in (None, "rope", "nope"):
        raise ModelError(f"{fields.where}: position_embedding_type {quoted(rope)} is not supported; expected 'rope' or 'nope'")
    return llama.hf_config(
        fields,
        family="granite4",
        hidden_dim=fields.integer("shared_intermediate_size", 1024, low=1),
        no_rope=frozenset() if rope == "rope" else frozenset(range(layers)),
        **_multipliers(fields),
    )


def _multipliers(fields: Fields) -> dict[str, Any]:
    return dict(
        embedding_scale=fields.number("embedding_multiplier", 1.0, above=0),
        residual_scale=fields.number("residual_multiplier", 1.0, above=0),
        attention_scale=fields.number("attention_multiplier", 1.0, above=0),
        logits_divisor=fields.number("logits_scaling", 1.0, above=0),
    )


def from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="granite.", where="GGUF metadata")
    return llama.gguf_config(
        source,
        family="granite",
        embedding_scale=fields.number("embedding_scale", 1.0, above=0),
        residual_scale=fields.number("residual_scale", 1.0, above=0),
        attention_scale=fields.number("attention.scale", 0.0),
        logits_divisor=fields.number("logit_scale", 1.0, above=0),
    )


def dense_hybrid_sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    part = name.split(".")[-2]
    return (llama.hf_name(name, _NAMES),), llama.half_of_gate_up(config, part) if part in ("ffn_gate", "ffn_up") else None
