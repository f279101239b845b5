"""ERNIE 4.5 (dense), its differences from LLaMA: one switch for all biases, and rotary pairs of adjacent features."""

from __future__ import annotations

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, Transform


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    tied = fields.boolean("tie_word_embeddings", True)  # transformers' default for this family
    bias, layers = fields.boolean("use_bias"), fields.layers()
    return llama.hf_config(fields, family="ernie4_5", qkv_bias=bias, output_bias=bias, mlp_bias=bias, windows=(0,) * layers, tied=tied)


def from_gguf(source: Source) -> ModelConfig:
    return llama.gguf_config(source, family="ernie4_5")


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    return (name if kind == "gguf" else llama.hf_name(name),), llama.unpair(config, name)
