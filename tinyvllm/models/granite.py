"""Granite 3 and 4, their differences from LLaMA: four multipliers, and experts in some. Granite 4's files are those of its hybrids, with
attention in all layers; one without experts has as its MLP the one that the others' experts share.
"""

from __future__ import annotations

from typing import Any

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform
from tinyvllm.models.mixture import experts_in_rows, gguf_experts, part_of_experts

_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
# As transformers computes with them; files have these names where it was told not to keep the published ones.
_COMPUTED = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_up_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
}
_OF_HYBRID = {part.removesuffix("_shexp"): name for part, name in _NAMES.items() if part.endswith("_shexp")} | _NAMES


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return llama.hf_config(fields, family="granite", **_multipliers(fields))


def moe_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    shared = fields.integer("shared_intermediate_size", 0)
    return llama.hf_config(fields, family="granitemoe", **_experts(fields, shared), **_multipliers(fields))


def _experts(fields: Fields, shared: int) -> dict[str, Any]:
    """`shared` is the width of the MLP that all rows share; without experts it is the only one."""
    count = fields.integer("num_local_experts", 8, high=MAX_EXPERTS)
    if not count:
        return dict(hidden_dim=shared)
    used = fields.integer("num_experts_per_tok", 2, low=1, high=count)
    return dict(num_experts=count, num_experts_per_tok=used, norm_topk_prob=True, shared_expert_dim=shared, shared_expert_gate=False)


def hybrid_from_hf(source: Source) -> ModelConfig:
    """Granite 4: without a `position_embedding_type` of "rope" no layer rotates."""
    fields = Fields(source.config)
    layers, kinds, rope = fields.layers(), fields.get("layer_types"), fields.get("position_embedding_type")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("attention", "full_attention") for kind in kinds):
        expected = "is not supported; of Granite 4 only models with attention in each layer are"
        raise ModelError(f"{fields.where}: layer_types {quoted(kinds)} {expected}")
    if rope not in (None, "rope", "nope"):
        raise ModelError(f"{fields.where}: position_embedding_type {quoted(rope)} is not supported; expected 'rope' or 'nope'")
    return llama.hf_config(
        fields,
        family="granite4",
        no_rope=frozenset() if rope == "rope" else frozenset(range(layers)),
        **_experts(fields, fields.integer("shared_intermediate_size", 1024, low=1)),
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
    """Of both architectures."""
    architecture = str(source.config["general.architecture"])
    fields = Fields(source.config, prefix=f"{architecture}.", where="GGUF metadata")
    return llama.gguf_config(
        source,
        family=architecture,
        **gguf_experts(source, fields, renormalize=True),
        embedding_scale=fields.number("embedding_scale", 1.0, above=0),
        residual_scale=fields.number("residual_scale", 1.0, above=0),
        attention_scale=fields.number("attention.scale", 0.0),
        logits_divisor=fields.number("logit_scale", 1.0, above=0),
    )


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """Of hybrids and of models with experts: gate and up are in one matrix."""
    if kind == "gguf":
        return llama.sources(config, kind, name)
    part = name.split(".")[-2]
    source = llama.hf_name(name, _OF_HYBRID | _COMPUTED if config.experts_in_one else _OF_HYBRID)
    if config.experts_in_one and part.endswith("_exps"):
        source = source.removesuffix(".weight")
    return (source,), _transform(config, part)


def _transform(config: ModelConfig, part: str) -> Transform | None:
    kind, _, place = part.removeprefix("ffn_").partition("_")
    if part == "ffn_down_exps":
        return experts_in_rows
    if kind not in ("gate", "up") or place == "inp":
        return None
    width = config.shared_expert_dim if place == "shexp" else config.hidden_dim
    rows = (0, width) if kind == "gate" else (width, 2 * width)
    return part_of_experts(config.num_experts, *rows) if place == "exps" else llama.rows_of(*rows)
