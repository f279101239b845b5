"""What a model is, read from a checkpoint's own description. Families (the other files here) say how; this file holds what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from tinygrad.llm.model import TransformerConfig

from tinyvllm.errors import ModelError
from tinyvllm.ops.rope import SCALINGS, RopeScaling


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """tinygrad's configuration and what it lacks. `windows` holds one sliding window per layer, 0 for full attention."""

    family: str = "llama"
    tied: bool = False
    scaling: RopeScaling = RopeScaling()
    windows: tuple[int, ...] = ()
    output_bias: bool = False
    mlp_bias: bool = False
    dense_layers: frozenset[int] = frozenset()
    prefix: str = ""  # of the file's tensor names, where checkpoints of one family differ


class Source(Protocol):
    """A checkpoint as families see it: its description and its tensors' shapes, and the values of small ones."""

    @property
    def kind(self) -> str: ...  # "safetensors" or "gguf"

    @property
    def config(self) -> Mapping[str, Any]: ...

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def array(self, name: str) -> np.ndarray: ...


Transform = Callable[[list[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Weight:
    """One tensor of the model: its name and shape, the file tensors it is made of, and what is done to them."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    transform: Transform | None = field(default=None, compare=False)


class Fields:
    """A checkpoint's description, read with complaints that name the key: config.json, or one architecture's part of GGUF metadata."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", where: str = "config.json"):
        self.values, self.prefix, self.where = values, prefix, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def _need(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.where}: the key {self.prefix + key!r} is missing; the model cannot be built without it")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{self.where}: {self.prefix + key} must be a whole number, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.where}: {self.prefix + key} must be a number, got {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {self.prefix + key} must be true or false, got {value!r}")
        return value


def check_heads(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Refuse head counts and sizes that cannot be."""
    if min(config.num_blocks, config.dim, config.n_heads, config.n_kv_heads, config.head_dim, config.vocab_size) < 1:
        raise ModelError(f"{fields.where}: layers, sizes and head counts must be 1 or more")
    if config.n_heads % config.n_kv_heads:
        raise ModelError(f"{fields.where}: {config.n_heads} query heads cannot be shared out over {config.n_kv_heads} key/value heads")
    if config.rope_dim % 2 or config.rope_dim > config.head_dim:
        raise ModelError(f"{fields.where}: rotary dimension {config.rope_dim} must be even and at most head_dim {config.head_dim}")
    return config


def hf_rope(fields: Fields, max_context: int) -> tuple[float, float, RopeScaling]:
    """theta, the rotated share of head_dim and the scaling; from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise ModelError(f"{fields.where}: rope_parameters must be an object, got {raw!r}")
    rope = Fields(raw, where=f"{fields.where}, rope_parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in SCALINGS:
        raise ModelError(f"{fields.where}: rope scaling {kind!r} is not supported; supported are {', '.join(SCALINGS)}")
    if kind == "default":
        return theta, share, RopeScaling()
    trained = rope.integer("original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_context))
    scaling = RopeScaling(
        kind=kind,
        factor=rope.number("factor", max_context / max(trained, 1) if kind == "longrope" else 1.0),
        original_context=trained,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=None if rope.get("attention_factor") is None else rope.number("attention_factor"),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        short_factor=tuple(rope.get("short_factor", ())),
        long_factor=tuple(rope.get("long_factor", ())),
    )
    return theta, share, scaling


def check_factors(fields: Fields, config: ModelConfig) -> ModelConfig:
    """LongRoPE needs one factor per rotated pair, short and long."""
    if config.scaling.kind == "longrope":
        for name, factors in (("short_factor", config.scaling.short_factor), ("long_factor", config.scaling.long_factor)):
            if len(factors) != config.rope_dim // 2:
                pairs = config.rope_dim // 2
                raise ModelError(f"{fields.where}: {name} must hold {pairs} factors, one per rotated pair, got {len(factors)}")
    return config


def hf_windows(fields: Fields, num_layers: int, default_on: bool) -> tuple[int, ...]:
    """One sliding window per layer, 0 where attention is full."""
    window = fields.get("sliding_window")
    if not window or not fields.boolean("use_sliding_window", default_on):
        return (0,) * num_layers
    window = fields.integer("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
            raise ModelError(f"{fields.where}: layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    full = fields.integer("max_window_layers", 0)
    return tuple(window if layer >= full else 0 for layer in range(num_layers))
