"""Mixtral: a Mistral whose layers are mixtures of experts, with shares of the softmax over the chosen ones."""

from __future__ import annotations

import numpy as np

from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform, hf_windows
from tinyvllm.models.mixture import hf_expert_sources

_PARTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    count = fields.integer("num_local_experts", 8, low=1, high=MAX_EXPERTS)
    return llama.hf_config(
        fields,
        llama.Defaults(theta=1e6, eps=1e-5),
        family="llama",
        windows=hf_windows(fields, fields.layers(), default_on=True),
        num_experts=count,
        num_experts_per_tok=fields.integer("num_experts_per_tok", 2, low=1, high=count),
        norm_topk_prob=True,
    )


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """In GGUF files a Mixtral is a llama with experts."""
    if kind == "gguf" or not name.startswith("blk.") or "ffn_" not in name or "ffn_norm" in name:
        return llama.sources(config, kind, name)
    _, layer, part, _ = name.split(".")
    if config.experts_in_one:  # as transformers computes with them
        return hf_expert_sources(config, name) or llama.sources(config, kind, name)
    mlp = f"model.layers.{layer}.block_sparse_moe"
    if part == "ffn_gate_inp":
        return (f"{mlp}.gate.weight",), None
    return tuple(f"{mlp}.experts.{e}.{_PARTS[part]}.weight" for e in range(config.num_experts)), np.concatenate
