"""Gemma 2 and 3, their differences from LLaMA: norms before and after attention and MLP with weights stored as 1 less, a gate with GELU, a
scaled embedding, windows in some layers; Gemma 2 caps scores and logits; Gemma 3 has norms of q and k, and layers with a window rotate
by another theta (Gemma 2: arXiv:2408.00118, Gemma 3: arXiv:2503.19786).
"""

from __future__ import annotations

from typing import Any

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform, gguf_windows, hf_window_rope, hf_windows
from tinyvllm.ops.rope import RopeScaling

_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EVERY_2, _EVERY_3 = 2, 6  # layers of Gemma 2 and of Gemma 3, one of which sees all keys
_LOCAL_THETA = 10_000.0  # Gemma 3's in layers with a window
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose attention scale is that of the model's width; GGUF has no key for it


def gemma2_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return _hf_config(fields, llama.Defaults(tied=True, head_dim=256), "gemma2", _EVERY_2, caps=(50.0, 30.0))


def gemma3_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    theta = fields.number("rope_local_base_freq", _LOCAL_THETA, above=1)
    window_rope = hf_window_rope(fields, fields.integer("max_position_embeddings", 2048, low=2), theta)
    defaults = llama.Defaults(theta=1_000_000.0, tied=True, head_dim=256, rope="full_attention")
    every, head_dim = fields.integer("sliding_window_pattern", _EVERY_3, low=1), fields.integer("head_dim", 256, low=1)
    return _hf_config(fields, defaults, "gemma3", every, caps=(0.0, 0.0), qk_norm=head_dim, window_rope=window_rope)


def _hf_config(
    fields: Fields, defaults: llama.Defaults, family: str, every: int, caps: tuple[float, float], **differences: Any
) -> ModelConfig:
    """`caps` of scores and of logits are the family's defaults; null in the file is none."""
    scores, logits = (
        fields.number(key, cap) if fields.values.get(key, cap) is not None else 0.0
        for key, cap in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
    )
    return llama.hf_config(
        fields,
        defaults,
        family=family,
        windows=hf_windows(fields, fields.layers(), default_on=True, every=every, default_window=4096),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0, above=0) ** -0.5,
        attention_cap=scores,
        logits_cap=logits,
        norm_offset=1.0,
        **_shared(fields.integer("hidden_size", low=1)),
        **differences,
    )


def _shared(dim: int) -> dict[str, Any]:
    return dict(post_norms=True, gelu=True, embedding_scale=dim**0.5)


def gemma2_from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="gemma2.", where="GGUF metadata")
    caps = dict(attention_cap=fields.number("attn_logit_softcapping", 50.0), logits_cap=fields.number("final_logit_softcapping", 30.0))
    return _gguf_config(source, fields, "gemma2", _EVERY_2, **caps)


def gemma3_from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="gemma3.", where="GGUF metadata")
    norm, theta = source.shape("blk.0.attn_q_norm.weight"), fields.number("rope.freq_base_swa", _LOCAL_THETA, above=1)
    cap = fields.number("final_logit_softcapping", 0.0)
    differences = dict(qk_norm=norm[0] if norm else 0, logits_cap=cap, window_rope=(theta, RopeScaling()))
    return _gguf_config(source, fields, "gemma3", _EVERY_3, rope_theta=fields.number("rope.freq_base", 1e6, above=1), **differences)


def _gguf_config(source: Source, fields: Fields, family: str, every: int, **differences: Any) -> ModelConfig:
    """GGUF's norms have the 1 in their weights."""
    layers, dim, heads = (
        fields.layers("block_count"),
        fields.integer("embedding_length", low=1),
        fields.integer("attention.head_count", low=1),
    )
    return llama.gguf_config(
        source,
        family=family,
        windows=gguf_windows(fields, layers, every),
        attention_scale=(dim / heads) ** -0.5 if layers == _LAYERS_OF_27B[family] else 0.0,
        **_shared(dim),
        **differences,
    )


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    return (name if kind == "gguf" else llama.hf_name(name, _NAMES),), None
