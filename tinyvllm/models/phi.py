"""Phi-3's differences from LLaMA: q, k and v in one matrix, gate and up in one, LongRoPE, sliding windows."""

from __future__ import annotations

import numpy as np

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform, hf_windows


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return llama.hf_config(fields, family="phi3", windows=hf_windows(fields, fields.layers(), default_on=True))


def from_gguf(source: Source) -> ModelConfig:
    return llama.gguf_config(source, family="phi3", qkv_bias=False)


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    part = name.split(".")[-2]
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rows = {"attn_q": (0, q), "attn_k": (q, q + kv), "attn_v": (q + kv, q + 2 * kv)}
    rows |= {"ffn_gate": (0, config.hidden_dim), "ffn_up": (config.hidden_dim, 2 * config.hidden_dim)}
    if part not in rows:
        return (name if kind == "gguf" else llama.hf_name(name),), None
    layer = name.split(".")[1]
    fused = {
        "gguf": ("attn_qkv", "ffn_up"),
        "safetensors": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
    }[kind][part.startswith("ffn")]
    prefix = f"blk.{layer}." if kind == "gguf" else f"model.layers.{layer}."
    return (f"{prefix}{fused}.weight",), _rows(*rows[part])


def _rows(start: int, stop: int) -> Transform:
    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0][start:stop]

    return transform
