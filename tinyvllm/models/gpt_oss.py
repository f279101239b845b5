"""gpt-oss, its differences from LLaMA: a sink in each head, windows in every other layer, biases in all products, and experts with a
clamped gate (arXiv:2508.10925).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform, gguf_windows, hf_windows, rope_fields
from tinyvllm.models.mixture import flat, gguf_expert_sources, gguf_experts
from tinyvllm.ops.experts import GateClamp

_NAMES = {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
_EXPERTS = {"ffn_gate_exps": "gate_up_proj", "ffn_up_exps": "gate_up_proj", "ffn_down_exps": "down_proj"}
_EVERY = 2  # layers, the first of which has a window
_ALPHA, _LIMIT = 1.702, 7.0


def _shape(alpha: float, limit: float) -> dict[str, Any]:
    return dict(family="gpt-oss", sinks=True, biased_experts=True, experts_transposed=True, gate_clamp=GateClamp(alpha, limit))


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    if not rope_fields(fields).values:
        raise ModelError(f"{fields.where}: rope_scaling or rope_parameters must say how positions are scaled; download the file again")
    count = fields.integer("num_local_experts", 128, low=1, high=MAX_EXPERTS)
    alpha, limit = fields.number("swiglu_alpha", _ALPHA, above=0), fields.number("swiglu_limit", _LIMIT, above=0)
    return llama.hf_config(
        fields,
        llama.Defaults(theta=150_000.0, eps=1e-5, bias=True, head_dim=64),
        windows=hf_windows(fields, fields.layers(), default_on=True, every=_EVERY, default_window=128),
        num_experts=count,
        num_experts_per_tok=fields.integer("num_experts_per_tok", 4, low=1, high=count),
        norm_topk_prob=True,
        router_bias="logits",
        **_shape(alpha, limit),
    )


def from_gguf(source: Source) -> ModelConfig:
    """GGUF has no key for the gate's numbers, nor for YaRN's bounds not being whole numbers."""
    fields = Fields(source.config, prefix="gpt-oss.", where="GGUF metadata")
    windows, experts = gguf_windows(fields, fields.layers("block_count"), _EVERY), gguf_experts(source, fields, renormalize=True)
    config = llama.gguf_config(source, **_shape(_ALPHA, _LIMIT), **(experts | dict(windows=windows)))
    return replace(config, scaling=replace(config.scaling, truncate=False))


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """GGUF's name for the norm before the MLP is that of others' after attention."""
    if kind == "gguf":
        return gguf_expert_sources(config, name) or ((name.replace(".ffn_norm.", ".post_attention_norm."),), None)
    *_, layer, part, suffix = ("", "", *name.split("."))
    if part in _EXPERTS:
        source = f"model.layers.{layer}.mlp.experts.{_EXPERTS[part]}{'_bias' * (suffix == 'bias')}"
        return (source,), _of_experts(config, part, suffix)
    if part == "attn_sinks":
        return (f"model.layers.{layer}.{_NAMES[part]}",), None
    return (llama.hf_name(name, _NAMES),), None


def _of_experts(config: ModelConfig, part: str, suffix: str) -> Transform:
    """Rows of gate and up alternate. Floats are [X, I, O], codes of MXFP4 the rows [X O, bytes]."""

    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        values = arrays[0]
        if suffix == "bias":
            return flat([values if part == "ffn_down_exps" else values[:, start::2]])
        rows = values.swapaxes(1, 2) if values.ndim == 3 else values.reshape(config.num_experts, -1, values.shape[-1])
        rows = rows if part == "ffn_down_exps" else rows[:, start::2]
        return rows.reshape(-1, rows.shape[-1])

    start = int(part == "ffn_up_exps")
    return transform
