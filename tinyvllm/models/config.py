"""A model's configuration, read from a checkpoint's description. Each family has its own file; this one holds what they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any, Protocol

import numpy as np
from tinygrad.llm.model import TransformerConfig

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.delta import DeltaShape
from tinyvllm.ops.experts import GateClamp, RouterBias
from tinyvllm.ops.rope import SCALINGS, RopeScaling

MAX_EXPERTS = 4096  # several times more than any published model has


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in numbers of features. n_kv_heads is 1 then, and head_dim is what the
    cache holds of a token: `rank` + rope_dim.

    rank    the latent that keys and values are made from
    plain   of a head's queries and keys, those that are not rotated
    value   a head's values
    q_rank  the latent that queries are made from, 0 where they are projected at once
    pairs   whether the file rotates adjacent features
    """

    rank: int
    plain: int
    value: int
    q_rank: int = 0
    pairs: bool = True


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """tinygrad's configuration and the fields it lacks: what families differ in. The defaults are LLaMA's.

    latent           multi-head latent attention
    delta, delta_layers  the gated delta rule, and the layers that have it instead of attention; the others have gated attention
    windows          one sliding window per layer, 0 for full attention
    window_rope      theta and scaling of the layers with a window, where they are not those of the others
    window_heads     key/value heads, and features of a head, of the layers with a window, where they are not those of the others
    shared_kv_layers  the last layers, which read the keys and values of the last layer of their kind before them
    shared_hidden_dim  of the MLPs of these, 0 for that of the others
    keys_as_values   whether layers without a window have no projection of values: these are the keys before norm and rotation
    value_norm       whether values are normed by head, without a weight
    layer_input_dim  features of what each layer has of every token in a table of its own, 0 for none
    no_rope          layers that do not rotate q and k
    query_scaling    (beta, length): q at position p is multiplied by 1 + beta log(1 + floor(p / length)); beta 0 for none
    pre_norms        whether attention and MLP read a norm of the residual stream
    post_norms       whether the outputs of attention and MLP are normed before they are added to it
    whole_qk_norm    whether the q/k norms are over all heads at once
    norm_offset      added to the weights of all norms of the file
    gelu             whether the MLP's gate has GELU (the tanh form) instead of SiLU
    attention_scale  of q k^T; 0 for head_dim^-0.5
    attention_cap    c of c tanh(score / c) before the softmax; logits_cap likewise for logits; 0 for none
    embedding_scale, residual_scale  of the embedding, and of what is added to the residual stream
    logits_divisor   of the logits
    router_sigmoid, router_bias, router_groups  how experts are chosen (`RoutingPolicy`); groups and how many of them are kept
    router_group_scores  by how many of its scores a group is
    biased_experts   whether the experts' products have biases
    gate_clamp       of the experts' gate, None for SiLU or GELU
    sinks            whether each head has a sink: one more score without a value
    experts_in_one   whether the file has gate and up of all experts in one tensor; experts_transposed: these and down as [X, I, O]
    experts_apart    whether a GGUF file has a tensor for each expert
    ignored          patterns of the file's tensors that the model does without
    draft_layers     layers after the last one in the file, which are for drafts and are not read
    """

    family: str = "llama"
    tied: bool = False
    latent: Latent | None = None
    delta: DeltaShape | None = None
    delta_layers: frozenset[int] = frozenset()
    scaling: RopeScaling = RopeScaling()
    windows: tuple[int, ...] = ()
    window_rope: tuple[float, RopeScaling] | None = None
    window_heads: tuple[int, int] | None = None
    shared_kv_layers: int = 0
    shared_hidden_dim: int = 0
    keys_as_values: bool = False
    value_norm: bool = False
    layer_input_dim: int = 0
    no_rope: frozenset[int] = frozenset()
    query_scaling: tuple[float, int] = (0.0, 1)
    output_bias: bool = False
    mlp_bias: bool = False
    dense_layers: frozenset[int] = frozenset()
    pre_norms: bool = True
    post_norms: bool = False
    whole_qk_norm: bool = False
    norm_offset: float = 0.0
    gelu: bool = False
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    router_sigmoid: bool = False
    router_bias: RouterBias = ""
    router_groups: tuple[int, int] = (1, 1)
    router_group_scores: int = 2
    biased_experts: bool = False
    gate_clamp: GateClamp | None = None
    sinks: bool = False
    experts_in_one: bool = False
    experts_transposed: bool = False
    experts_apart: bool = False
    ignored: tuple[str, ...] = ()
    draft_layers: int = 0
    prefix: str = ""  # of the file's tensor names, where checkpoints of one family differ

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_blocks - len(self.delta_layers)

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values of their own."""
        return self.attention_layers - self.shared_kv_layers

    def stores_keys(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return layer not in self.delta_layers and layer < self.num_blocks - self.shared_kv_layers

    @property
    def undivided(self) -> range:
        """The last layers, where they read keys and values of others, from the first that is read on: no process has a part of them."""
        readers = range(self.num_blocks - self.shared_kv_layers, self.num_blocks)
        return range(min(map(self.kv_source, readers), default=self.num_blocks), self.num_blocks)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: its own number, or the last one of its kind that has some."""
        first = self.num_blocks - self.shared_kv_layers
        if layer < first:
            return layer
        return next(other for other in reversed(range(first)) if bool(self.windows[other]) == bool(self.windows[layer]))

    def of_layer(self, layer: int) -> ModelConfig:
        """The same with the heads and the MLP of one layer."""
        changes: dict[str, Any] = {}
        if layer in self.dense_layers:
            changes |= dict(num_experts=0, num_experts_per_tok=0, hidden_dim=self.dense_hidden_dim)
        if self.window_heads is not None and self.windows[layer]:
            heads, width = self.window_heads
            changes |= dict(n_kv_heads=heads, head_dim=width, v_head_dim=width, rope_dim=width, qk_norm=width, keys_as_values=False)
        if self.shared_hidden_dim and self.kv_source(layer) != layer:
            changes |= dict(hidden_dim=self.shared_hidden_dim)
        return replace(self, **changes) if changes else self

    @property
    def ropes(self) -> list[tuple[int, float, RopeScaling]]:
        """Rotated features, theta and scaling of layers without and, where they are others, with a window."""
        first = [(self.rope_dim, self.rope_theta, self.scaling)]
        width = self.rope_dim if self.window_heads is None else self.window_heads[1]
        return first if self.window_rope is None else [*first, (width, *self.window_rope)]


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
    offset: float = 0.0  # added to a vector, in float32
    factor: float = 1.0  # that a vector is multiplied by, in float32
    logarithm: bool = False  # of a vector x below 0 the file has log(-x)
    share: float = 1.0  # of the matrix, that one row reads: a few of many experts
    stem: str = "matmul"  # the op whose kernels multiply with a matrix
    format: str | None = None  # of a matrix that has it whatever the file has, where kernels multiply with it


ROPE_KEYS = frozenset(
    ("rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor",
     "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "short_factor", "long_factor",
     "truncate", "llama_4_scaling_beta", "max_position_embeddings", "finetuned"),
)  # fmt: skip


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


def rope_fields(fields: Fields, kind: str | None = None) -> Fields:
    """`rope_parameters` (transformers 5) or `rope_scaling`; with `kind` its part for layers of this type, where it has one."""
    name = "rope_parameters" if fields.get("rope_parameters") not in (None, {}) else "rope_scaling"
    raw = fields.get(name, {})
    if kind is not None and isinstance(raw, Mapping) and kind in raw:
        name, raw = f"{name}.{kind}", {} if raw[kind] is None else raw[kind]
    if not isinstance(raw, Mapping):
        raise ModelError(f"{fields.where}: {name} must be an object, got {quoted(raw)}")
    return Fields(raw, where=f"{fields.where}, {name}")


def hf_rope(
    fields: Fields, max_context: int, default_theta: float = 10000.0, default_share: float = 1.0, kind: str | None = None
) -> tuple[float, float, RopeScaling]:
    """theta, the rotated share of head_dim and the scaling; from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    The defaults are the family's; `kind` is a type of layers that may have parameters of its own. Of proportional RoPE all features are
    rotated, those beyond the share by no angle.
    """
    rope = rope_fields(fields, kind)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta), above=1)
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", default_share), above=0, high=1)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    found = _scaling(fields, rope, "longrope" if scaling == "su" else scaling, max_context)
    return (theta, 1.0, replace(found, share=share)) if found.kind == "proportional" else (theta, share, found)


def _scaling(fields: Fields, rope: Fields, kind: str, max_context: int) -> RopeScaling:
    """The scaling of `rope`, one of SCALINGS; `fields` is the whole description."""
    if kind not in SCALINGS:
        raise ModelError(f"{fields.where}: rope scaling {quoted(kind)} is not supported; supported are {', '.join(SCALINGS)}")
    if unknown := sorted(rope.values.keys() - ROPE_KEYS):
        known = "the keys of " + ", ".join(SCALINGS)
        raise ModelError(f"{rope.where}: the key {quoted(unknown[0])} is not supported; supported are {known}")
    if kind == "default":
        return RopeScaling()
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
        truncate=rope.boolean("truncate", True),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
    )
    if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        low = f"low_freq_factor {scaling.low_freq_factor}"
        raise ModelError(f"{rope.where}: high_freq_factor must be above {low}, got {scaling.high_freq_factor}")
    return scaling


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


def hf_windows(fields: Fields, num_layers: int, default_on: bool, every: int = 0, default_window: int = 0) -> tuple[int, ...]:
    """One sliding window per layer, 0 where attention is full: without `layer_types` in each layer whose number, from 1, is a multiple
    of `every`.
    """
    window, used = fields.integer("sliding_window", default_window), fields.boolean("use_sliding_window", default_on)
    if not window or not used:
        return (0,) * num_layers
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not known or len(kinds) != num_layers:
            expected = f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers"
            raise ModelError(f"{fields.where}: {expected}, got {quoted(kinds)}")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if every:
        return alternating(window, num_layers, every)
    full = fields.integer("max_window_layers", 0)
    return tuple(window if layer >= full else 0 for layer in range(num_layers))


def hf_window_rope(fields: Fields, max_context: int, default_theta: float) -> tuple[float, RopeScaling]:
    """theta and scaling of layers with a window: of `rope_parameters.sliding_attention`, or the family's, never scaled."""
    parameters = fields.get("rope_parameters")
    if not isinstance(parameters, Mapping) or "sliding_attention" not in parameters:
        return default_theta, RopeScaling()
    theta, _, scaling = hf_rope(fields, max_context, default_theta, kind="sliding_attention")
    return theta, scaling


def gguf_windows(fields: Fields, num_layers: int, every: int) -> tuple[int, ...]:
    """As `hf_windows`, of GGUF metadata: the pattern is a number, a list with an entry a layer, or the family's."""
    window, pattern = fields.integer("attention.sliding_window", 0), fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(entry not in (0, 1) for entry in pattern):
            raise ModelError(f"{fields.where}: attention.sliding_window_pattern must hold true or false for each of {num_layers} layers")
        return tuple(window if entry else 0 for entry in pattern)
    return alternating(window, num_layers, fields.integer("attention.sliding_window_pattern", every, low=1))


def alternating(window: int, num_layers: int, every: int) -> tuple[int, ...]:
    """`window` in all layers but each whose number, counted from 1, is a multiple of `every`."""
    return tuple(window if (layer + 1) % every else 0 for layer in range(num_layers))


_MAX_TAPS, _MAX_HEADS, _MAX_DIM = 16, 1024, 1024  # of the gated delta rule: several times what published models have


def hf_delta(fields: Fields) -> dict[str, Any]:
    """The gated delta rule by config.json: `layer_types`, or else every layer has it but each `full_attention_interval`-th."""
    layers, kinds = fields.layers(), fields.get("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", 4, low=2)
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("linear_attention", "full_attention") for kind in kinds):
        expected = f"layer_types must name linear_attention or full_attention for each of {layers} layers"
        raise ModelError(f"{fields.where}: {expected}, got {quoted(kinds)}")
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    sizes = _delta_sizes(fields, dict(zip(keys, (16, 32, 128, 128, 4), strict=True)))
    key_heads, value_heads, key_dim, value_dim, taps = sizes
    shape = DeltaShape(key_heads, value_heads, key_dim, value_dim, taps)
    return _checked_delta(fields, shape, frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention"), layers)


def gguf_delta(source: Source, fields: Fields, layers: int, tiled: bool) -> dict[str, Any]:
    """The same by GGUF metadata; a layer with the tensor `ssm_a` has it."""
    keys = ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size", "ssm.conv_kernel")
    key_heads, value_heads, key_dim, values, taps = _delta_sizes(fields, dict.fromkeys(keys), _MAX_HEADS * _MAX_DIM)
    if values % value_heads:
        raise ModelError(f"{fields.where}: ssm.inner_size {values} cannot be divided among {value_heads} value heads")
    shape = DeltaShape(key_heads, value_heads, key_dim, values // value_heads, taps, tiled)
    return _checked_delta(fields, shape, frozenset(i for i in range(layers) if source.shape(f"blk.{i}.ssm_a") is not None), layers)


def _delta_sizes(fields: Fields, defaults: Mapping[str, int | None], most_values: int = _MAX_DIM) -> list[int]:
    """Key heads, value heads, features of a key, features of a value or of all, taps."""
    limits = (_MAX_HEADS, _MAX_HEADS, _MAX_DIM, most_values, _MAX_TAPS)
    return [
        fields.integer(key, default, low=1 + (limit == _MAX_TAPS), high=limit)
        for (key, default), limit in zip(defaults.items(), limits, strict=True)
    ]


def _checked_delta(fields: Fields, shape: DeltaShape, layers: frozenset[int], count: int) -> dict[str, Any]:
    if shape.value_heads % shape.key_heads:
        raise ModelError(f"{fields.where}: {shape.value_heads} value heads cannot be divided among {shape.key_heads} key heads")
    if not 0 < len(layers) < count:
        raise ModelError(f"{fields.where}: {len(layers)} of {count} layers have linear attention; expected some of both kinds")
    return dict(delta=shape, delta_layers=layers)
