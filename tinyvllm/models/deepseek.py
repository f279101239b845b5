"""DeepSeek-V2 and V3 and GLM-4.7-Flash, their differences from LLaMA: latent attention, YaRN's temperature in the scale of the scores, and
experts of which some are shared, after layers without any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.models import llama
from tinyvllm.models.config import Latent, ModelConfig, Source, Transform
from tinyvllm.models.latent import gguf_latent_sources, hf_latent_sources
from tinyvllm.models.mixture import gguf_expert_sources, gguf_experts, hf_expert_sources, hf_sigmoid_experts
from tinyvllm.ops.rope import yarn_mscale

_KV_B = "attn_kv_b"  # of older GGUF files, in which keys and values have one matrix


def v2_from_hf(source: Source) -> ModelConfig:
    """Shares of the softmax over all experts. transformers does not divide them by their sum, whatever `norm_topk_prob` says."""
    fields = Fields(source.config)
    _only(fields, "norm_topk_prob", False, None)
    _only(fields, "scoring_func", "softmax", None)
    method = fields.get("topk_method", "greedy")
    _only(fields, "topk_method", "greedy", "group_limited_greedy", None)
    experts = hf_sigmoid_experts(_without_none(fields, "n_group", "topk_group"), renormalize=False, first_dense=0)
    experts |= dict(router_sigmoid=False, router_bias="", router_group_scores=1)
    if method != "group_limited_greedy":
        experts["router_groups"] = (1, 1)
    return _from_hf(fields, "deepseek2", llama.Defaults(), **experts)


def v3_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    _only(fields, "scoring_func", "sigmoid", None)
    _only(fields, "topk_method", "noaux_tc", None)
    experts = hf_sigmoid_experts(fields, renormalize=True, first_dense=3)
    return _from_hf(fields, "deepseek3", llama.Defaults(), draft_layers=fields.integer("num_nextn_predict_layers", 0), **experts)


def glm_lite_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    _only(fields, "topk_method", "noaux_tc", None)
    experts = hf_sigmoid_experts(fields, renormalize=True, first_dense=1)
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != fields.layers() or any(kind not in ("dense", "sparse") for kind in kinds):
            raise ModelError(f"{fields.where}: mlp_layer_types must name dense or sparse for each layer, got {quoted(kinds)}")
        experts["dense_layers"] = frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
    drafts = fields.integer("num_nextn_predict_layers", 0)
    return _from_hf(fields, "glm4moelite", llama.Defaults(eps=1e-5), draft_layers=drafts, **experts)


def _from_hf(fields: Fields, family: str, defaults: llama.Defaults, **experts: Any) -> ModelConfig:
    _only(fields, "attention_bias", False, None)
    _only(fields, "moe_layer_freq", 1, None)
    latent = Latent(
        rank=fields.integer("kv_lora_rank", 512, low=1),
        plain=fields.integer("qk_nope_head_dim", low=1),
        value=fields.integer("v_head_dim", low=1),
        q_rank=0 if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank", low=1),
        pairs=fields.boolean("rope_interleave", True),
    )
    return _with_scale(
        llama.hf_config(fields, defaults, family=family, **_sizes(latent, fields.integer("qk_rope_head_dim", low=2)), **experts)
    )


def _only(fields: Fields, key: str, *known: object) -> None:
    """ModelError for another value of the key than these, the first being what it should be."""
    value = fields.get(key)
    if not any(value == one and type(value) is type(one) for one in known):
        raise ModelError(f"{fields.where}: {key} = {quoted(value)} is not supported with latent attention; expected {quoted(known[0])}")


def _without_none(fields: Fields, *keys: str) -> Fields:
    """Without those of the keys whose value is null, which are then as if they were missing."""
    return Fields({key: value for key, value in fields.values.items() if value is not None or key not in keys}, where=fields.where)


def from_gguf(source: Source) -> ModelConfig:
    """`block_count` also counts the layers for drafts."""
    fields = Fields(source.config, prefix="deepseek2.", where="GGUF metadata")
    layers, rope = fields.layers("block_count"), fields.integer("rope.dimension_count", low=2)
    drafts = fields.integer("nextn_predict_layers", 0, high=layers - 1)
    queries, old = source.shape("blk.0.attn_q_a.weight"), source.shape(f"blk.0.{_KV_B}.weight")
    key = fields.integer("attention.key_length_mla", fields.integer("attention.key_length", low=1), low=rope + 1)
    latent = Latent(
        rank=fields.integer("attention.kv_lora_rank", low=1),
        plain=key - rope,
        value=fields.integer("attention.value_length_mla", fields.integer("attention.value_length", low=1), low=1),
        q_rank=queries[0] if queries else 0,
    )
    biased = any(source.shape(f"blk.{layer}.exp_probs_b.bias") is not None for layer in range(layers))
    experts = gguf_experts(source, fields, renormalize=False, sigmoid=biased)
    if experts and not experts["router_sigmoid"]:
        experts["router_group_scores"] = 1
    sizes = _sizes(latent, rope) | dict(num_blocks=layers - drafts, draft_layers=drafts, prefix=_KV_B if old else "")
    config = llama.gguf_config(source, family="deepseek2", **sizes, **experts)
    all_dim = 10 * config.scaling.mscale_all_dim  # these files have a tenth of it
    return _with_scale(replace(config, scaling=replace(config.scaling, mscale=all_dim, mscale_all_dim=all_dim)))


def _sizes(latent: Latent, rope: int) -> dict[str, Any]:
    width = latent.rank + rope
    return dict(latent=latent, n_kv_heads=1, head_dim=width, v_head_dim=width, rope_dim=rope)


def _with_scale(config: ModelConfig) -> ModelConfig:
    """With the scale of a head that is not absorbed, times the square of YaRN's temperature where it is for all features."""
    assert config.latent is not None
    s, scale = config.scaling, (config.latent.plain + config.rope_dim) ** -0.5
    stretched = s.kind != "default" and s.mscale_all_dim != 0.0
    return replace(config, attention_scale=scale * yarn_mscale(s.factor, s.mscale_all_dim) ** 2 if stretched else scale)


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    if kind == "gguf":
        return gguf_latent_sources(config, name) or gguf_expert_sources(config, name) or ((name,), None)
    return hf_latent_sources(config, name) or hf_expert_sources(config, name) or ((llama.hf_name(name),), None)
