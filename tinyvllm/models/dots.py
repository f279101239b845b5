"""dots.llm1, its differences from LLaMA: norms of q and k, and experts that sigmoids choose, with some that all rows share."""

from __future__ import annotations

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform, hf_windows
from tinyvllm.models.mixture import gguf_expert_sources, gguf_experts, hf_expert_sources, hf_sigmoid_experts


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    head_dim = fields.integer("head_dim", fields.integer("hidden_size", low=1) // fields.integer("num_attention_heads", low=1), low=1)
    windows = hf_windows(fields, fields.layers(), default_on=True)
    return llama.hf_config(
        fields, family="dots1", qk_norm=head_dim, windows=windows, **hf_sigmoid_experts(fields, renormalize=False, first_dense=0)
    )


def from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="dots1.", where="GGUF metadata")
    norm, experts = source.shape("blk.0.attn_q_norm.weight"), gguf_experts(source, fields, renormalize=False, sigmoid=True)
    return llama.gguf_config(source, family="dots1", qk_norm=norm[0] if norm else 0, **experts)


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    if kind == "gguf":
        return gguf_expert_sources(config, name) or ((name,), None)
    return hf_expert_sources(config, name) or ((llama.hf_name(name),), None)
