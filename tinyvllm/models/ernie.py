"""ERNIE 4.5, its differences from LLaMA: one switch for all biases, rotary pairs of adjacent features, and experts in some, which are
chosen by shares of a softmax with a bias.
"""

from __future__ import annotations

from typing import Any

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform
from tinyvllm.models.mixture import gguf_expert_sources, gguf_experts, hf_expert_sources


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    tied = fields.boolean("tie_word_embeddings", True)  # transformers' default for this family
    bias, layers = fields.boolean("use_bias"), fields.layers()
    return llama.hf_config(fields, family="ernie4_5", qkv_bias=bias, output_bias=bias, mlp_bias=bias, windows=(0,) * layers, tied=tied)


def from_gguf(source: Source) -> ModelConfig:
    return llama.gguf_config(source, family="ernie4_5")


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    return (name if kind == "gguf" else llama.hf_name(name),), llama.unpair(config, name)


def moe_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    tied, bias, layers = fields.boolean("tie_word_embeddings", True), fields.boolean("use_bias"), fields.layers()
    if bias:
        raise ModelError(f"{fields.where}: use_bias is not supported with experts; supported is false")
    return llama.hf_config(
        fields, llama.Defaults(theta=500_000.0, eps=1e-5), family="ernie4_5-moe", windows=(0,) * layers, tied=tied, **_experts(fields)
    )


def _experts(fields: Fields) -> dict[str, Any]:
    layers, every = fields.layers(), fields.integer("moe_layer_interval", 1, low=1)
    start, end = fields.integer("moe_layer_start_index", 1), fields.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else fields.integer("moe_layer_end_index")
    count, width = fields.integer("moe_num_experts", 64, low=1, high=MAX_EXPERTS), fields.integer("moe_intermediate_size", 1536, low=1)
    return dict(
        num_experts=count,
        num_experts_per_tok=fields.integer("moe_k", 6, low=1, high=count),
        norm_topk_prob=True,
        hidden_dim=width,
        dense_hidden_dim=fields.integer("intermediate_size", low=1),
        dense_layers=frozenset(i for i in range(layers) if (i + 1) % every or not start <= i <= last),
        shared_expert_dim=width * fields.integer("moe_num_shared_experts", 2, high=MAX_EXPERTS),
        shared_expert_gate=False,
        router_bias="choice",
    )


def moe_from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="ernie4_5-moe.", where="GGUF metadata")
    return llama.gguf_config(source, family="ernie4_5-moe", **gguf_experts(source, fields, renormalize=True))


def moe_sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    if kind == "gguf":
        return gguf_expert_sources(config, name) or sources(config, kind, name)
    bias = f"{'gate.' * config.experts_in_one}moe_statics.e_score_correction_bias"
    return hf_expert_sources(config, name, bias=bias) or sources(config, kind, name)
