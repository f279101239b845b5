"""A model's configuration, read from a checkpoint's description. Each family has its own file; this one holds what they share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
from tinygrad.llm.model import TransformerConfig

from tinyvllm.errors import ModelError
from tinyvllm.foreign import quoted
from tinyvllm.ops.rope import SCALINGS, RopeScaling

MAX_LAYERS, MAX_EXPERTS = 1024, 4096  # several times more than any published model has


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


class Fields:
    """A checkpoint's description with typed getters whose errors name the key: config.json, or one architecture's part of GGUF metadata."""

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

    def _refuse(self, key: str, expected: str, value: object) -> NoReturn:
        raise ModelError(f"{self.where}: {self.prefix + key} must be {expected}, got {quoted(value)}")

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int | None = None) -> int:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            self._refuse(key, f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}", value)
        return value

    def layers(self, key: str = "num_hidden_layers") -> int:
        """The number of layers, bounded: lists with an entry per layer must not fill the memory before any tensor is checked."""
        return self.integer(key, low=1, high=MAX_LAYERS)

    def number(self, key: str, default: float | None = None, above: float | None = None, high: float = math.inf) -> float:
        value = self._need(key, default)
        if not _is_number(value) or (above is not None and value <= above) or value > high:
            limit = "" if high == math.inf else f" and at most {high:g}"
            self._refuse(key, "a number" if above is None else f"a number above {above:g}{limit}", value)
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, () if it is missing."""
        values = self.get(key, [])
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            self._refuse(key, "a list of integers", values)
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, () if it is missing."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(map(_is_number, values)):
            self._refuse(key, "a list of numbers", values)
        return tuple(map(float, values))

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value


def _is_number(value: object) -> bool:
    """Finite, and no integer beyond the range of a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


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
