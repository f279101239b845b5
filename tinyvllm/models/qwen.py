"""Qwen 2, 2.5 and 3, dense and with experts: their differences from LLaMA: biases on q, k and v; norms of q and k; experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform, hf_windows


def _windows(fields: Fields) -> tuple[int, ...]:
    return hf_windows(fields, fields.layers(), default_on=False)


def qwen2_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return llama.hf_config(fields, family="qwen2", qkv_bias=True, output_bias=False, windows=_windows(fields))


def qwen3_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    head_dim = fields.integer("head_dim", fields.integer("hidden_size", low=1) // fields.integer("num_attention_heads", low=1), low=1)
    return llama.hf_config(fields, family="qwen3", qk_norm=head_dim, windows=_windows(fields), **_experts(fields))


def _experts(fields: Fields) -> dict[str, Any]:
    count = fields.integer("num_local_experts" if fields.get("num_experts") is None else "num_experts", 0, high=MAX_EXPERTS)
    if not count:
        return {}
    every, plain = fields.integer("decoder_sparse_step", 1, low=1), fields.integers("mlp_only_layers")
    layers = range(fields.layers())
    return dict(
        num_experts=count,
        num_experts_per_tok=fields.integer("num_experts_per_tok", low=1, high=count),
        norm_topk_prob=fields.boolean("norm_topk_prob"),
        hidden_dim=fields.integer("moe_intermediate_size", low=1),
        dense_hidden_dim=fields.integer("intermediate_size", low=1),
        dense_layers=frozenset(i for i in layers if i in plain or (i + 1) % every),
    )


def qwen2_from_gguf(source: Source) -> ModelConfig:
    return llama.gguf_config(source, family="qwen2")


def qwen3_from_gguf(source: Source) -> ModelConfig:
    norm = source.shape("blk.0.attn_q_norm.weight")
    return llama.gguf_config(source, family="qwen3", qk_norm=norm[0] if norm else 0)


def qwen3_moe_from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="qwen3moe.", where="GGUF metadata")
    norm, layers = source.shape("blk.0.attn_q_norm.weight"), fields.layers("block_count")
    count = fields.integer("expert_count", low=1, high=MAX_EXPERTS)
    return llama.gguf_config(
        source,
        family="qwen3",
        qk_norm=norm[0] if norm else 0,
        num_experts=count,
        num_experts_per_tok=fields.integer("expert_used_count", low=1, high=count),
        norm_topk_prob=fields.boolean("expert_weights_norm", True),
        hidden_dim=fields.integer("expert_feed_forward_length", low=1),
        dense_hidden_dim=fields.integer("feed_forward_length", 0),
        dense_layers=frozenset(i for i in range(layers) if source.shape(f"blk.{i}.ffn_gate_inp.weight") is None),
    )


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """Qwen's GGUF files keep the halves layout, and the experts of a layer in one tensor; in safetensors they have one each."""
    if kind == "gguf":
        return (name,), llama.experts_in_rows if "_exps." in name else None
    if "_exps." in name or "ffn_gate_inp." in name:
        return _expert_sources(config, name)
    return (llama.hf_name(name),), None


def _expert_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None]:
    _, layer, part, _ = name.split(".")
    mlp = f"model.layers.{layer}.mlp"
    if part == "ffn_gate_inp":
        return (f"{mlp}.gate.weight",), None
    projection = part.removeprefix("ffn_").removesuffix("_exps")
    return tuple(f"{mlp}.experts.{e}.{projection}_proj.weight" for e in range(config.num_experts)), np.concatenate
