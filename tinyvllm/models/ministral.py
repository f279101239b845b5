"""Ministral 3, its differences from LLaMA: queries are scaled by their position, beyond the context of the first training."""

from __future__ import annotations

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, hf_windows, rope_fields


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    rope = rope_fields(fields)
    if not rope.values:
        raise ModelError(f"{fields.where}: the key 'rope_parameters' is missing; the model cannot be built without it")
    length = rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings", low=2), low=2)
    return llama.hf_config(
        fields,
        llama.Defaults(theta=1_000_000.0, eps=1e-5, head_dim=128),
        family="ministral3",
        windows=hf_windows(fields, fields.layers(), default_on=True),
        query_scaling=(rope.number("llama_4_scaling_beta", 0.0), length),
    )


def from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="mistral3.", where="GGUF metadata")
    length = fields.integer("rope.scaling.original_context_length", fields.integer("context_length", low=2), low=2)
    beta = fields.number("attention.temperature_scale", 0.0)
    return llama.gguf_config(
        source, family="ministral3", query_scaling=(beta, fields.integer("attention.temperature_length", length, low=1))
    )
