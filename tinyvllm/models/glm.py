"""GLM-4 (0414), its differences from LLaMA: norms before and after attention and MLP, gate and up in one matrix, and a rotation of adjacent
features in the first half of each head. GLM-4.5, 4.6 and 4.7 with experts have LLaMA's norms, and rotate distant features.
"""

from __future__ import annotations

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform
from tinyvllm.models.mixture import gguf_expert_sources, gguf_experts, hf_expert_sources, hf_sigmoid_experts

_NAMES = {
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate": "mlp.gate_up_proj",
    "ffn_up": "mlp.gate_up_proj",
}


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    defaults = llama.Defaults(share=0.5, eps=0.00000015625, bias=True, head_dim=128)
    return llama.hf_config(fields, defaults, family="glm4", post_norms=True, output_bias=False)


def from_gguf(source: Source) -> ModelConfig:
    return llama.gguf_config(source, family="glm4", post_norms=True)


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    *prefix, part, suffix = name.split(".")
    half = llama.half_of_gate_up(config, part) if part in ("ffn_gate", "ffn_up") else None
    if kind == "gguf":
        return (".".join([*prefix, "ffn_up" if half else part, suffix]),), half or llama.unpair(config, name)
    return (llama.hf_name(name, _NAMES),), half or llama.unpair(config, name)


def moe_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    head_dim = fields.integer("head_dim", fields.integer("hidden_size", low=1) // fields.integer("num_attention_heads", low=1), low=1)
    return llama.hf_config(
        fields,
        llama.Defaults(share=0.5, eps=1e-5),
        family="glm4moe",
        output_bias=False,
        qk_norm=head_dim if fields.boolean("use_qk_norm") else 0,
        draft_layers=fields.integer("num_nextn_predict_layers", 0),
        **hf_sigmoid_experts(fields, renormalize=True, first_dense=1),
    )


def moe_from_gguf(source: Source) -> ModelConfig:
    """`block_count` also counts the layers for drafts."""
    fields = Fields(source.config, prefix="glm4moe.", where="GGUF metadata")
    norm, layers = source.shape("blk.0.attn_q_norm.weight"), fields.layers("block_count")
    drafts = fields.integer("nextn_predict_layers", 0, high=layers - 1)
    return llama.gguf_config(
        source,
        family="glm4moe",
        num_blocks=layers - drafts,
        draft_layers=drafts,
        qk_norm=norm[0] if norm else 0,
        **gguf_experts(source, fields, renormalize=True, sigmoid=True),
    )


def moe_sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """GGUF's name for the norm before the MLP is that of GLM-4's after attention."""
    if kind == "gguf":
        return gguf_expert_sources(config, name) or ((name.replace(".ffn_norm.", ".post_attention_norm."),), None)
    return hf_expert_sources(config, name) or ((llama.hf_name(name),), None)
