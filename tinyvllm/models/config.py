"""A model's configuration, read from a checkpoint's description. Each family has its own file; this one holds what they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from tinygrad.llm.model import TransformerConfig

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.ops.rope import SCALINGS, RopeScaling

MAX_EXPERTS = 4096  # several times more than any published model has


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """tinygrad's configuration and the fields it lacks. `windows` holds one sliding window per layer, 0 for full attention."""

    family: str = "llama"
    tied: bool = False
    scaling: RopeScaling = RopeScaling()
    windows: tuple[int, ...] = ()
    output_bias: bool = False
    mlp_bias: bool = False
    dense_layers: frozenset[int] = frozenset()
    prefix: str = ""  # of the file's tensor names, where checkpoints of one family differ


class Source(Protocol):
    """A checkpoint as families read it: its description, its tensors' shapes, and the values of small tensors."""

    @property
    def kind(self) -> str: ...  # "safetensors" or "gguf"

    @property
    def config(self) -> Mapping[str, Any]: ...

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def array(self, name: str) -> np.ndarray: ...


Transform = Callable[[list[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class WeightRecipe:
    """One tensor of the model: its name and shape, the file tensors it comes from, and their transform (weights/recipe.py)."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    transform: Transform | None = field(default=None, compare=False)


def vocabulary(source: Source, fields: Fields) -> int:
    """The vocabulary size: rows of a GGUF file's embedding, or as in its metadata."""
    embedding = source.shape("token_embd.weight")
    return embedding[0] if embedding and embedding[0] else fields.integer("vocab_size", low=1)


def check_heads(fields: Fields, config: ModelConfig) -> ModelConfig:
    """ModelError for impossible head counts or rotary dimensions. Sizes below 1 were refused when they were read."""
    if config.n_heads % config.n_kv_heads:
        raise ModelError(f"{fields.where}: {config.n_heads} query heads cannot be divided among {config.n_kv_heads} key/value heads")
    if config.rope_dim % 2 or not 2 <= config.rope_dim <= config.head_dim:
        raise ModelError(f"{fields.where}: rotary dimension {config.rope_dim} must be even, from 2 to head_dim {config.head_dim}")
    return config


def hf_rope(fields: Fields, max_context: int) -> tuple[float, float, RopeScaling]:
    """theta, the rotated share of head_dim and the scaling; from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if fields.get("rope_parameters") not in (None, {}) else "rope_scaling"
    raw = fields.get(name, {})
    if not isinstance(raw, Mapping):
        raise ModelError(f"{fields.where}: {name} must be an object, got {quoted(raw)}")
    rope = Fields(raw, where=f"{fields.where}, {name}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0), above=1)
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0), above=0, high=1)
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in SCALINGS:
        raise ModelError(f"{fields.where}: rope scaling {quoted(kind)} is not supported; supported are {', '.join(SCALINGS)}")
    if kind == "default":
        return theta, share, RopeScaling()
    context = "original_max_position_embeddings"
    trained = rope.integer(context, fields.integer(context, max_context), low=2)  # LongRoPE divides by its logarithm
    scaling = RopeScaling(
        kind=kind,
        factor=rope.number("factor", max_context / trained if kind == "longrope" else 1.0, above=0),
        original_context=trained,
        low_freq_factor=rope.number("low_freq_factor", 1.0, above=0),
        high_freq_factor=rope.number("high_freq_factor", 4.0, above=0),
        beta_fast=rope.number("beta_fast", 32.0, above=0),
        beta_slow=rope.number("beta_slow", 1.0, above=0),
        attention_factor=None if rope.get("attention_factor") is None else rope.number("attention_factor", above=0),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
    )
    if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        low = f"low_freq_factor {scaling.low_freq_factor}"
        raise ModelError(f"{rope.where}: high_freq_factor must be above {low}, got {scaling.high_freq_factor}")
    return theta, share, scaling


def check_factors(fields: Fields, config: ModelConfig) -> ModelConfig:
    """LongRoPE needs one factor per rotated pair, short and long, to divide by."""
    if config.scaling.kind == "longrope":
        for name, factors in (("short_factor", config.scaling.short_factor), ("long_factor", config.scaling.long_factor)):
            if len(factors) != config.rope_dim // 2:
                pairs = config.rope_dim // 2
                raise ModelError(f"{fields.where}: {name} must hold {pairs} factors, one per rotated pair, got {len(factors)}")
            if not all(0 < factor < math.inf for factor in factors):
                raise ModelError(f"{fields.where}: {name} must hold numbers above 0, got {min(factors)}")
    return config


def hf_windows(fields: Fields, num_layers: int, default_on: bool) -> tuple[int, ...]:
    """One sliding window per layer, 0 where attention is full."""
    window, used = fields.integer("sliding_window", 0), fields.boolean("use_sliding_window", default_on)
    if not window or not used:
        return (0,) * num_layers
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not known or len(kinds) != num_layers:
            expected = f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers"
            raise ModelError(f"{fields.where}: {expected}, got {quoted(kinds)}")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    full = fields.integer("max_window_layers", 0)
    return tuple(window if layer >= full else 0 for layer in range(num_layers))
