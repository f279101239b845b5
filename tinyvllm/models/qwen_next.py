"""Qwen3-Next and Qwen3.5 and 3.6, the part that reads text: three of four layers have the gated delta rule instead of attention, whose
values a gate multiplies; a quarter of each head is rotated; norms' weights are stored as 1 less; experts as in Qwen2-MoE, or none.

Qwen3-Next's files have the projections of a layer with a state in two matrices, key head by key head. GGUF files of
Qwen3.5 have the value heads in another order, tiled: one of each key head, then the next of each. Adapters of a model from such a file have
the rows of safetensors.

A layer for drafts (`mtp.*` of safetensors) is one with attention, and experts where the model has some; the model does without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform, gguf_delta, hf_delta
from tinyvllm.models.delta import shape_of, value_order
from tinyvllm.models.mixture import gguf_expert_sources, gguf_experts, hf_expert_sources
from tinyvllm.models.qwen import TextFields

_NEXT, _LATER = "qwen3next", "qwen3.5"
_DRAFTS = "mtp."  # the tensors of the layer for drafts
_DRAFT_PARTS = {"fc": "fc", "embedding_norm": "pre_fc_norm_embedding", "state_norm": "pre_fc_norm_hidden", "norm": "norm"}
_VECTORS = {"ssm_a": "A_log", "ssm_dt": "dt_bias", "ssm_conv1d": "conv1d.weight", "ssm_norm": "norm.weight"}
_MATRICES = {"attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a"}
_DEFAULTS = llama.Defaults(share=0.25, head_dim=256)


# --- what descriptions say


def next_from_hf(source: Source) -> ModelConfig:
    return _from_hf(source, _NEXT)


def from_hf(source: Source) -> ModelConfig:
    return _from_hf(source, _LATER)


def _from_hf(source: Source, family: str) -> ModelConfig:
    fields = TextFields(source.config)
    for key, wanted in (("attn_output_gate", True), ("attention_bias", False)):
        if fields.boolean(key, wanted) is not wanted:
            raise ModelError(f"{fields.where}: {key} must be {str(wanted).lower()} in this family, got {quoted(fields.get(key))}")
    delta = hf_delta(fields)
    return llama.hf_config(
        fields,
        _DEFAULTS,
        family=family,
        qk_norm=fields.integer("head_dim", _DEFAULTS.head_dim, low=1),
        norm_offset=0.0 if is_mlx(source, delta["delta_layers"]) else 1.0,
        windows=(0,) * fields.layers(),
        ignored=(f"{_DRAFTS}*",),
        **delta,
        **_experts(fields, family),
    )


def is_mlx(source: Source, layers: Iterable[int]) -> bool:
    """Whether mlx-lm wrote the file: norms' weights are whole then, and convolutions [channels, taps, 1], by which mlx-lm tells too."""
    shapes = (source.shape(f"model.layers.{layer}.linear_attn.conv1d.weight") for layer in layers)
    return any(shape is not None and shape[-1] == 1 for shape in shapes)


def _experts(fields: Fields, family: str) -> dict[str, Any]:
    count = fields.integer("num_experts", 0, high=MAX_EXPERTS)
    if not count:
        return {}
    every, plain = fields.integer("decoder_sparse_step", 1, low=1), fields.integers("mlp_only_layers")
    width = fields.integer("moe_intermediate_size", low=1)
    return dict(
        num_experts=count,
        num_experts_per_tok=fields.integer("num_experts_per_tok", low=1, high=count),
        norm_topk_prob=family == _LATER or fields.boolean("norm_topk_prob", True),
        hidden_dim=width,
        dense_hidden_dim=fields.integer("intermediate_size", width, low=1),
        dense_layers=frozenset(i for i in range(fields.layers()) if i in plain or (i + 1) % every),
        shared_expert_dim=fields.integer("shared_expert_intermediate_size", low=1),
    )


def from_gguf(source: Source) -> ModelConfig:
    """Of all three architectures."""
    architecture = str(source.config["general.architecture"])
    fields = Fields(source.config, prefix=f"{architecture}.", where="GGUF metadata")
    drafts, layers = fields.integer("nextn_predict_layers", 0), fields.layers("block_count")
    if drafts >= layers:
        raise ModelError(f"{fields.where}: nextn_predict_layers must be below block_count {layers}, got {drafts}")
    delta = gguf_delta(source, fields, layers - drafts, tiled=architecture != "qwen3next")
    head_dim = fields.integer("attention.key_length", _DEFAULTS.head_dim, low=1)
    differences = dict(num_blocks=layers - drafts, draft_layers=drafts, windows=(0,) * (layers - drafts), qk_norm=head_dim)
    experts = gguf_experts(source, fields, renormalize=True)
    if experts:
        experts["dense_layers"] = frozenset(layer for layer in experts["dense_layers"] if layer < layers - drafts)
    family = _NEXT if architecture == "qwen3next" else _LATER
    return llama.gguf_config(source, family=family, head_dim=head_dim, v_head_dim=head_dim, **differences, **delta, **experts)


def draft_layer(config: ModelConfig, source: Source) -> ModelConfig:
    """A model of the layer for drafts alone, as a safetensors file has it; `config` is the model's, of a file of either kind."""
    mlp = f"{_DRAFTS}layers.0.mlp"
    dense = source.shape(f"{mlp}.gate.weight") is None
    return replace(
        config,
        num_blocks=1,
        delta=None,
        delta_layers=frozenset(),
        windows=(0,),
        dense_layers=frozenset({0} if dense and config.num_experts else ()),
        norm_offset=1.0,
        experts_in_one=source.shape(f"{mlp}.experts.gate_up_proj") is not None,
        experts_transposed=False,
        ignored=(),
        draft_layers=0,
    )


# --- where files have the tensors


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    return _gguf_sources(config, name) if kind == "gguf" else _hf_sources(config, name)


def _hf_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None]:
    if not name.startswith("blk."):
        return (llama.hf_name(name),), None
    _, layer, part, suffix = name.split(".")
    own = f"model.layers.{layer}.linear_attn"
    if part in _VECTORS:
        return (f"{own}.{_VECTORS[part]}",), _vector(config, part)
    if int(layer) in config.delta_layers:
        if part == "attn_output":
            return (f"{own}.out_proj.{suffix}",), None
        if part in _MATRICES and config.family == _NEXT:
            return (f"{own}.in_proj_{'ba' if part.startswith('ssm_') else 'qkvz'}.{suffix}",), _of_key_heads(config, part)
        if part in _MATRICES:
            return (f"{own}.{_MATRICES[part]}.{suffix}",), _tiled(config, part)
    elif part in ("attn_q", "attn_gate"):
        return (f"model.layers.{layer}.self_attn.q_proj.{suffix}",), _half_of_heads(config, part)
    return hf_expert_sources(config, name, "shared_expert") or ((llama.hf_name(name),), None)


def draft_sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """Of a tensor of `draft_layer`; safetensors alone have it."""
    *_, part, suffix = name.split(".")
    if part in _DRAFT_PARTS:
        return (f"{_DRAFTS}{_DRAFT_PARTS[part]}.{suffix}",), None
    names, transform = _hf_sources(config, name)
    return tuple(_DRAFTS + each.removeprefix("model.") for each in names), transform


def _gguf_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None]:
    *path, part, _ = (*name.split("."), "")[: 4 if name.startswith("blk.") else 3]
    if not name.startswith("blk."):
        return (name,), None
    blk, layer = ".".join(path), int(path[1])
    if part == "ffn_norm":
        return (f"{blk}.post_attention_norm.weight",), None
    if part in _VECTORS:
        names = {"ssm_a": "ssm_a", "ssm_dt": "ssm_dt.bias"}
        return (f"{blk}.{names.get(part, f'{part}.weight')}",), _vector(config, part)
    if layer in config.delta_layers:
        if part == "attn_output":
            return (f"{blk}.ssm_out.weight",), None
        if part in ("ssm_beta", "ssm_alpha") and config.family == _NEXT:
            return (f"{blk}.ssm_ba.weight",), _of_key_heads(config, part)
    elif part in ("attn_q", "attn_gate"):
        return (f"{blk}.attn_q.weight",), _half_of_heads(config, part)
    return gguf_expert_sources(config, name) or ((name,), None)


def _vector(config: ModelConfig, part: str) -> Transform | None:
    s = shape_of(config)
    return _moved(lambda a: a.reshape(s.channels, s.taps).T.reshape(-1)) if part == "ssm_conv1d" else None


def _moved(function: Callable[[np.ndarray], np.ndarray]) -> Transform:
    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        return function(arrays[0])

    return transform


def _half_of_heads(config: ModelConfig, part: str) -> Transform:
    """Of a matrix with the query and the gate of each head the one or the other."""
    H, D, half = config.n_heads, config.head_dim, int(part == "attn_gate")
    return _moved(lambda a: a.reshape(H, 2, D, *a.shape[1:])[:, half].reshape(H * D, *a.shape[1:]))


def _tiled(config: ModelConfig, part: str) -> Transform | None:
    """Rows of a projection as safetensors have them, in the order of a model whose value heads are tiled; None for others."""
    s = shape_of(config)
    if not s.tiled:
        return None
    order = value_order(s, s.value_dim if part.startswith("attn_") else 1)
    if part == "attn_qkv":
        order = np.concatenate([np.arange(2 * s.keys), 2 * s.keys + order])
    return _moved(lambda a: a[order])


def _of_key_heads(config: ModelConfig, part: str) -> Transform:
    """Of a matrix with q, k, v and z, or b and a, of each key head the rows of one product, all key heads' q first."""
    s = shape_of(config)
    group = s.value_heads // s.key_heads
    sizes = [s.key_dim, s.key_dim, group * s.value_dim, group * s.value_dim] if part.startswith("attn_") else [group, group]
    wanted = {"attn_qkv": (0, 1, 2), "attn_gate": (3,), "ssm_beta": (0,), "ssm_alpha": (1,)}[part]
    ends = np.cumsum(sizes).tolist()

    def rows(a: np.ndarray) -> np.ndarray:
        heads = a.reshape(s.key_heads, ends[-1], *a.shape[1:])
        parts = [heads[:, ends[i] - sizes[i] : ends[i]].reshape(-1, *a.shape[1:]) for i in wanted]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return _moved(rows)
