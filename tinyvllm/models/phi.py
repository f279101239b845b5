"""Phi-3's differences from LLaMA: q, k and v in one matrix, gate and up in one, LongRoPE, sliding windows."""

from __future__ import annotations

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform, hf_windows


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return llama.hf_config(fields, family="phi3", windows=hf_windows(fields, fields.layers(), default_on=True))


def from_gguf(source: Source) -> ModelConfig:
    return llama.gguf_config(source, family="phi3", qkv_bias=False)


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    *prefix, part, suffix = name.split(".")
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rows = {"attn_q": (0, q), "attn_k": (q, q + kv), "attn_v": (q + kv, q + 2 * kv)}
    fused = {"attn": ("attn_qkv", "self_attn.qkv_proj"), "ffn": ("ffn_up", "mlp.gate_up_proj")}[part.split("_")[0]] if prefix else None
    if part not in (*rows, "ffn_gate", "ffn_up") or fused is None:
        return (name if kind == "gguf" else llama.hf_name(name),), None
    transform = llama.rows_of(*rows[part]) if part in rows else llama.half_of_gate_up(config, part)
    if kind == "gguf":
        return (".".join([*prefix, fused[0], suffix]),), transform
    return (f"model.layers.{prefix[1]}.{fused[1]}.{suffix}",), transform
