"""OLMo 2 and 3, their differences from LLaMA: norms after attention and MLP instead of before, norms of q and k over all heads; OLMo 3 has
windows in three of four layers, whose rotation is never scaled. OLMoE has norms before, norms of q and k over all heads, and experts.
"""

from __future__ import annotations

from typing import Any

from tinyvllm.foreign import Fields
from tinyvllm.models import llama, qwen
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform, gguf_windows, hf_window_rope, hf_windows
from tinyvllm.models.mixture import gguf_experts
from tinyvllm.ops.rope import RopeScaling

_NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SHAPE: dict[str, Any] = dict(family="olmo2", pre_norms=False, post_norms=True, qk_norm=1, whole_qk_norm=True)
_EVERY = 4  # layers of OLMo 3, one of which sees all keys


def olmo2_from_hf(source: Source) -> ModelConfig:
    return llama.hf_config(Fields(source.config), llama.Defaults(eps=1e-5), **_SHAPE)


def olmo3_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    windows = hf_windows(fields, fields.layers(), default_on=True, every=_EVERY, default_window=4096)
    theta = fields.number("rope_theta", 500_000.0, above=1)
    window_rope = hf_window_rope(fields, fields.integer("max_position_embeddings", 2048, low=2), theta)
    defaults = llama.Defaults(theta=theta, eps=1e-5, rope="full_attention")
    return llama.hf_config(fields, defaults, windows=windows, window_rope=window_rope, **_SHAPE)


def from_gguf(source: Source) -> ModelConfig:
    """Both: OLMo 3 is an OLMo 2 with windows."""
    fields = Fields(source.config, prefix="olmo2.", where="GGUF metadata")
    windows = gguf_windows(fields, fields.layers("block_count"), _EVERY)
    window_rope = (fields.number("rope.freq_base", 10000.0, above=1), RopeScaling()) if any(windows) else None
    return llama.gguf_config(source, windows=windows, window_rope=window_rope, **_SHAPE)


def olmoe_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    count = fields.integer("num_experts", 64, low=1, high=MAX_EXPERTS)
    used, renormalize = fields.integer("num_experts_per_tok", 8, low=1, high=count), fields.boolean("norm_topk_prob")
    experts: dict[str, Any] = dict(num_experts=count, num_experts_per_tok=used, norm_topk_prob=renormalize)
    return llama.hf_config(fields, llama.Defaults(eps=1e-5), family="olmoe", qk_norm=1, whole_qk_norm=True, **experts)


def olmoe_from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="olmoe.", where="GGUF metadata")
    experts = gguf_experts(source, fields, renormalize=False)
    return llama.gguf_config(source, family="olmoe", qk_norm=1, whole_qk_norm=True, **experts)


olmoe_sources = qwen.sources  # the same names


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    return (name if kind == "gguf" else llama.hf_name(name, _NAMES),), None
