"""GLM-4 (0414), its differences from LLaMA: norms before and after attention and MLP, gate and up in one matrix, and a rotation of adjacent
features in the first half of each head.
"""

from __future__ import annotations

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform

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
