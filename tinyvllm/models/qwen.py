"""Qwen 2, 2.5 and 3, dense and with experts: their differences from LLaMA: biases on q, k and v; norms of q and k; experts, in Qwen2-MoE
with one that all rows share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform, hf_windows
from tinyvllm.models.mixture import gguf_expert_sources, gguf_experts, hf_expert_sources


class TextFields(Fields):
    """Without how positions in images are divided among features: with text alone all of them are those of the tokens."""

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            rest = {name: one for name, one in value.items() if name not in ("mrope_section", "mrope_interleaved")}
            return {name: "default" if name in ("type", "rope_type") and one == "mrope" else one for name, one in rest.items()}
        return value


def _windows(fields: Fields) -> tuple[int, ...]:
    return hf_windows(fields, fields.layers(), default_on=False)


def qwen2_from_hf(source: Source) -> ModelConfig:
    fields = TextFields(source.config)
    return llama.hf_config(fields, family="qwen2", qkv_bias=True, output_bias=False, windows=_windows(fields))


def qwen3_from_hf(source: Source) -> ModelConfig:
    fields = TextFields(source.config)
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
    fields = Fields(source.config, prefix=f"{source.config['general.architecture']}.", where="GGUF metadata")
    norm, experts = source.shape("blk.0.attn_q_norm.weight"), gguf_experts(source, fields, renormalize=True)
    return llama.gguf_config(source, family="qwen3", qk_norm=norm[0] if norm else 0, **experts)


def qwen2_moe_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    shared, bias = fields.integer("shared_expert_intermediate_size", 5632, low=1), fields.boolean("qkv_bias", True)
    experts = _experts(fields) | dict(shared_expert_dim=shared)
    return llama.hf_config(fields, family="qwen2", qkv_bias=bias, output_bias=False, windows=_windows(fields), **experts)


def qwen2_moe_from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="qwen2moe.", where="GGUF metadata")
    return llama.gguf_config(source, family="qwen2", **gguf_experts(source, fields, renormalize=False))


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """Qwen's GGUF files keep the halves layout."""
    if kind == "gguf":
        return gguf_expert_sources(config, name) or ((name,), None)
    return hf_expert_sources(config, name, "shared_expert") or ((llama.hf_name(name),), None)
