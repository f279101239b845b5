"""Gemma 4, its differences from LLaMA in addition to Gemma 3's: no scale of attention; other heads in layers without a window, whose values
may be their keys; norms of values; last layers that read the keys and values of others; an input of every layer's own, from a table of all
layers and a projection of the embedding; a scale of each layer's output; experts next to a dense MLP (google/gemma-4, transformers 5.23).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from tinygrad import Tensor, nn

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models import llama
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform, gguf_windows, hf_window_rope, hf_windows
from tinyvllm.models.delta import Vector
from tinyvllm.models.llama import Llama, LlamaBlock, Rotations, bias_of, rms
from tinyvllm.models.mixture import gguf_expert_sources, gguf_experts, joined_experts, routing_policy
from tinyvllm.models.projections import LayerInputWeights, LayerWeights
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.ops.experts import experts_down, experts_gate_up_silu, norm_route
from tinyvllm.ops.head import embed
from tinyvllm.ops.linear import add_output, gate_up_silu, linear
from tinyvllm.ops.norm import rms_norm
from tinyvllm.ops.qkv import QKV
from tinyvllm.ops.rope import RopeScaling

_EVERY = 6  # layers, one of which sees all keys
_WINDOW_THETA, _THETA, _SHARE = 10_000.0, 1_000_000.0, 0.25  # with a window and without, where a share of the features rotates
_HEAD_DIM, _GLOBAL_HEAD_DIM = 256, 512


@dataclass(frozen=True, eq=False)
class StepContext(Rotations):
    """Also `inputs` [T, L, P] float32, what each layer has of each token; None for a model without."""

    inputs: Tensor | None = None


class Gemma4Block(LlamaBlock):
    """One layer; names are GGUF's."""

    weights_type: ClassVar[type[LayerWeights]] = LayerInputWeights
    weights: LayerInputWeights

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        c, dim, eps = self.config, config.dim, config.norm_eps
        self.layer, self.reads_others = layer, config.kv_source(layer) != layer
        self.layer_output_scale = Vector(Tensor.empty(1))
        if self.reads_others:
            del self.attn_k, self.attn_k_norm
        if self.reads_others or c.keys_as_values:
            del self.attn_v
        if c.layer_input_dim:
            self.inp_gate, self.proj = nn.Linear(dim, c.layer_input_dim, bias=False), nn.Linear(c.layer_input_dim, dim, bias=False)
            self.post_norm = nn.RMSNorm(dim, eps)
        if c.num_experts:
            self.ffn_gate_inp_norm, self.ffn_down_exps_scale = nn.RMSNorm(dim, eps), Vector(Tensor.empty(c.num_experts))
            self.pre_ffw_norm_2, self.post_ffw_norm_1, self.post_ffw_norm_2 = (nn.RMSNorm(dim, eps) for _ in range(3))

    def forward_batch(self, x: Tensor, batch: Batch, attention: PagedAttention, cache: LayerCache, rotations: Rotations) -> Tensor:
        """As in LLaMA."""
        x = super().forward_batch(x, batch, attention, cache, rotations)
        inputs = rotations.inputs if isinstance(rotations, StepContext) else None
        gate, proj = self.weights.input_gate, self.weights.input_proj
        if inputs is not None and gate is not None and proj is not None:
            ordered = gate.in_order(x)
            h = linear(ordered, gate.weight, batch.rows, self._bias("input_gate", ordered, None, batch), gelu=True)
            x = self._project((h * inputs[:, self.layer]).contiguous(), "input_proj", batch, x, "post_norm")
        return (x * self.layer_output_scale.weight).contiguous()

    def _after_attention(self, x: Tensor, attended: Tensor, batch: Batch) -> Tensor:
        """As in LLaMA; the outputs of the dense MLP and of the experts are normed each, and then their sum."""
        w = self.weights
        if w.router is None or w.shared_in is None or w.shared_down is None:
            return super()._after_attention(x, attended, batch)
        c, rows = self.config, batch.rows
        x = self._project(attended, "attn_output", batch, x, "post_attention_norm")
        ordered, norm = w.shared_in.in_order(x), self._norm("ffn_norm")
        h = gate_up_silu(ordered, norm, w.shared_in.weight, rows, self._bias("shared_in", ordered, norm, batch), c.gelu).contiguous()
        h, norm = w.shared_down.in_order(h), self._norm("post_ffw_norm_1")
        dense = linear(h, w.shared_down.weight, rows, self._bias("shared_down", h, None, batch), norm=norm).contiguous()
        routing = norm_route(x, rms(self.ffn_gate_inp_norm), w.router.weight, rows, routing_policy(c))
        scales = self.ffn_down_exps_scale.weight[routing.chosen]
        routing = replace(routing, shares=(routing.shares * scales).contiguous())
        h = experts_gate_up_silu(x, self._norm("pre_ffw_norm_2"), w.ffn_in.weight, routing, rows, c.num_experts, c.gelu).contiguous()
        both = experts_down(h, w.ffn_down.weight, routing, rows, c.num_experts, dense, self._norm("post_ffw_norm_2"))
        return add_output(x, both, self._norm("post_ffw_norm"), 1.0).contiguous()

    def _qkv(self, bias: Tensor | None) -> QKV:
        parts = 1 if self.reads_others else 2 if self.config.keys_as_values else 3
        k_norm = None if self.reads_others else self.attn_k_norm.weight
        return QKV(self.weights.qkv.weight, bias, self.attn_q_norm.weight, k_norm, self.config.norm_eps, parts, value_norm=True)

    def products(self) -> dict[str, tuple[str, ...]]:
        """The projections of each field of `LayerInputWeights`."""
        own = {"qkv": tuple(name for name in ("attn_q", "attn_k", "attn_v") if hasattr(self, name))}
        own |= {"input_gate": ("inp_gate",), "input_proj": ("proj",)} if self.config.layer_input_dim else {}
        return super().products() | own

    def unread(self) -> tuple[str, ...]:
        return ("attn_k", "attn_v") if self.reads_others else ()

    def input_norms(self) -> dict[str, nn.RMSNorm]:
        """Also that of the dense MLP next to experts."""
        return super().input_norms() | ({"shared_in": self.ffn_norm} if self.config.num_experts else {})


class Gemma4(Llama):
    """A model of these layers."""

    block_type = Gemma4Block

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        if width := config.num_blocks * config.layer_input_dim:
            self.per_layer_token_embd = nn.Embedding(config.vocab_size, width)
            self.per_layer_model_proj = nn.Linear(config.dim, width, bias=False)
            self.per_layer_proj_norm = nn.RMSNorm(config.layer_input_dim, config.norm_eps)

    def products(self) -> dict[str, tuple[str, ...]]:
        return {"input_proj": ("per_layer_model_proj",)} if self.config.layer_input_dim else {}

    def tables(self) -> dict[str, str]:
        return {"input_table": "per_layer_token_embd"} if self.config.layer_input_dim else {}

    def in_every_stage(self) -> tuple[str, ...]:
        """What inputs of layers are made from: they do not travel with the residual stream."""
        inputs = ("token_embd", "per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm")
        return inputs if self.config.layer_input_dim else ()

    def context(self, x: Tensor, rows: Tensor, batch: Batch) -> Rotations:
        """With the layers' own inputs: 2^-1/2 times the sum of a row of the table, times P^1/2, and a norm of a projection of x E^-1/2.
        In a stage of a pipeline, too, they come from the embedding and not from the stream that arrives.
        """
        rotations, w, c = self._rotations(rows), self.weights, self.config
        if w.input_table is None or w.input_proj is None:
            return StepContext(rotations.angles, rotations.query_factors)
        x = x if batch.arrived is None else self._embedded(batch)
        shape = int(x.shape[0]), c.num_blocks, c.layer_input_dim
        stored = embed(w.input_table, batch.tokens, batch.rows, c.layer_input_dim**0.5).reshape(shape)
        ordered = w.input_proj.in_order(x)
        bias = bias_of(w.input_proj, self.adapters.get("input_proj"), ordered, None, batch)
        made = linear(ordered, w.input_proj.weight, batch.rows, bias, scale=c.dim**-0.5).contiguous().reshape(shape)
        made = rms_norm(made, self.per_layer_proj_norm.weight, self.per_layer_proj_norm.eps)
        return StepContext(rotations.angles, rotations.query_factors, ((made + stored) * 2**-0.5).contiguous())


# --- what descriptions say


class _Description(Fields):
    """config.json, with the rotations that transformers fills in."""

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        if key != "rope_parameters" or value is not None:
            return value
        full = {"rope_type": "proportional", "partial_rotary_factor": _SHARE, "rope_theta": _THETA}
        return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": _WINDOW_THETA}}


def from_hf(source: Source) -> ModelConfig:
    """Also of the language model of Gemma4Unified, which has neither experts nor inputs of layers."""
    fields = _Description(source.config)
    _check_hf(fields)
    layers, max_context = fields.layers(), fields.integer("max_position_embeddings", 131_072, low=2)
    windows = (*hf_windows(fields, layers, default_on=True, every=_EVERY, default_window=512)[:-1], 0)  # the last layer never has one
    full, windowed = _hf_heads(fields, windows)
    shared, wide = _shared_layers(fields, "num_kv_shared_layers", windows), fields.boolean("use_double_wide_mlp")
    unified = source.config.get("model_type") == "gemma4_unified_text"
    differences = _differences(fields, full, windowed) | _hf_experts(fields)
    return llama.hf_config(
        fields,
        llama.Defaults(theta=_THETA, tied=True, head_dim=full[1], rope="full_attention"),
        windows=windows,
        window_rope=hf_window_rope(fields, max_context, _WINDOW_THETA),
        shared_kv_layers=shared,
        shared_hidden_dim=2 * fields.integer("intermediate_size", low=1) if wide else 0,
        keys_as_values=fields.boolean("attention_k_eq_v"),
        layer_input_dim=fields.integer("hidden_size_per_layer_input", 0 if unified else 256),
        embedding_scale=fields.integer("hidden_size", low=1) ** 0.5,
        ignored=_of_readers("model.layers.{}.self_attn.{}", ("k_proj", "v_proj", "k_norm", "v_norm"), layers, shared),
        **differences,
    )


def _check_hf(fields: Fields) -> None:
    """ModelError for what no published model has, and what is not computed here."""
    known = {"use_bidirectional_attention": (None, False, "vision"), "use_sliding_window": (None, True)}  # "vision" is of images alone
    if fields.get("hidden_size_per_layer_input") != 0:
        known["vocab_size_per_layer_input"] = (None, fields.get("vocab_size"))
    for key, values in known.items():
        if fields.get(key) not in values:
            listed = ", ".join(quoted(value) for value in values[1:])
            raise ModelError(f"{fields.where}: {key} = {quoted(fields.get(key))} is not supported; supported are {listed}")
    fields.integer("sliding_window", 512, low=1)
    parameters = fields.get("rope_parameters")
    for kind in ("full_attention", "sliding_attention"):
        rope = parameters.get(kind) if isinstance(parameters, dict) else None
        if not isinstance(rope, dict) or rope.get("rope_type") not in ("default", "linear", "proportional"):
            expected = "an object with a rope_type of default, linear or proportional"
            raise ModelError(f"{fields.where}: rope_parameters.{kind} must be {expected}, got {quoted(rope)}")
        if rope["rope_type"] != "proportional" and rope.get("partial_rotary_factor") not in (None, 1):
            raise ModelError(
                f"{fields.where}: rope_parameters.{kind}: partial_rotary_factor is supported with rope_type proportional alone"
            )


def _hf_heads(fields: Fields, windows: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Key/value heads and features of a head in layers without a window, and in those with one."""
    heads, width = fields.integer("num_key_value_heads", 4, low=1), fields.integer("head_dim", _HEAD_DIM, low=1)
    changes = fields.get("per_layer_config")
    if changes is None:
        own = fields.integer("num_global_key_value_heads", heads, low=1) if fields.boolean("attention_k_eq_v") else heads
        return (own, fields.integer("global_head_dim", _GLOBAL_HEAD_DIM, low=1)), (heads, width)
    found: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    try:
        by_layer = {int(layer): dict(change) for layer, change in changes.items()}
    except (AttributeError, TypeError, ValueError):
        raise ModelError(f"{fields.where}: per_layer_config must be an object of objects by layer, got {quoted(changes)}") from None
    for layer, window in enumerate(windows):
        one = Fields(by_layer.pop(layer, {}), where=f"{fields.where}, per_layer_config of layer {layer}")
        if unknown := sorted(one.values.keys() - {"head_dim", "num_key_value_heads"}):
            raise ModelError(f"{one.where}: the key {quoted(unknown[0])} is not supported; supported are head_dim, num_key_value_heads")
        found[window > 0].add((one.integer("num_key_value_heads", heads, low=1), one.integer("head_dim", width, low=1)))
    if by_layer or any(len(kind) > 1 for kind in found.values()):
        raise ModelError(f"{fields.where}: per_layer_config must have the same heads for all layers of a kind; got {quoted(changes)}")
    return found[False].pop(), next(iter(found[True]), (heads, width))


def _hf_experts(fields: Fields) -> dict[str, Any]:
    count = fields.integer("num_experts", 0, high=MAX_EXPERTS)
    if not fields.boolean("enable_moe_block"):
        return {}
    return dict(
        num_experts=count,
        num_experts_per_tok=fields.integer("top_k_experts", low=1, high=count),
        norm_topk_prob=True,
        hidden_dim=fields.integer("moe_intermediate_size", low=1),
        shared_expert_dim=fields.integer("intermediate_size", low=1),
        shared_expert_gate=False,
    )


def _differences(fields: Fields, full: tuple[int, int], windowed: tuple[int, int]) -> dict[str, Any]:
    """What both kinds of files say in the same words."""
    (heads, width), query_heads = full, "num_attention_heads" if fields.prefix == "" else "attention.head_count"
    if fields.integer(query_heads, low=1) % windowed[0] or windowed[1] % 2:
        raise ModelError(
            f"{fields.where}: heads of layers with a window: {windowed[0]} of {windowed[1]} features do not fit the query heads"
        )
    return dict(
        family="gemma4",
        n_kv_heads=heads,
        head_dim=width,
        v_head_dim=width,
        rope_dim=width,
        qk_norm=width,
        window_heads=windowed,
        value_norm=True,
        attention_scale=1.0,
        logits_cap=0.0 if fields.get("final_logit_softcapping") is None else fields.number("final_logit_softcapping"),
        post_norms=True,
        gelu=True,
    )


def _shared_layers(fields: Fields, key: str, windows: tuple[int, ...]) -> int:
    """The last layers, without keys and values. ModelError if no layer of their kind has some."""
    shared = fields.integer(key, 0, high=len(windows) - 1)
    first = len(windows) - shared
    if not {window > 0 for window in windows[first:]} <= {window > 0 for window in windows[:first]}:
        raise ModelError(f"{fields.where}: {key} = {shared}: no layer of the same kind before them has the keys and values of all of them")
    return shared


def _of_readers(pattern: str, parts: tuple[str, ...], layers: int, shared: int) -> tuple[str, ...]:
    """Patterns of tensors that files may have of layers that read the keys and values of others."""
    return tuple(pattern.format(layer, part) + ".*" for layer in range(layers - shared, layers) for part in parts)


def from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="gemma4.", where="GGUF metadata")
    layers = fields.layers("block_count")
    windows = gguf_windows(fields, layers, _EVERY)
    shared = _shared_layers(fields, "attention.shared_kv_layers", windows)
    full, windowed = _gguf_heads(fields, windows)
    mlps = _per_layer(fields, "feed_forward_length", layers)
    hidden, wide = mlps[0], mlps[-1]
    if set(mlps[: layers - shared]) != {hidden} or (shared and set(mlps[layers - shared :]) != {wide}):
        raise ModelError(f"{fields.where}: feed_forward_length must be one number, and another for layers without keys, got {quoted(mlps)}")
    first = next((layer for layer, window in enumerate(windows) if not window), 0)
    experts = gguf_experts(source, fields, renormalize=True)
    if experts:
        experts |= dict(shared_expert_dim=hidden, shared_expert_gate=False)
    differences = dict(hidden_dim=hidden) | _differences(fields, full, windowed) | experts
    return llama.gguf_config(
        source,
        windows=windows,
        window_rope=(fields.number("rope.freq_base_swa", _WINDOW_THETA, above=1), RopeScaling()),
        rope_theta=fields.number("rope.freq_base", _THETA, above=1),
        shared_kv_layers=shared,
        shared_hidden_dim=wide if wide != hidden else 0,
        keys_as_values=source.shape(f"blk.{first}.attn_v.weight") is None,
        layer_input_dim=fields.integer("embedding_length_per_layer_input", 0),
        embedding_scale=fields.integer("embedding_length", low=1) ** 0.5,
        ignored=_of_readers("blk.{}.{}", ("attn_k", "attn_v", "attn_k_norm"), layers, shared),
        **differences,
    )


def _gguf_heads(fields: Fields, windows: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """As `_hf_heads`."""
    width, own = fields.integer("attention.key_length", low=1), fields.integer("attention.key_length_swa", low=1)
    same = {"attention.value_length": width, "attention.value_length_swa": own}
    same |= {"rope.dimension_count": width, "rope.dimension_count_swa": own}
    for key, expected in same.items():
        if fields.integer(key, expected) != expected:
            raise ModelError(f"{fields.where}: {key} must be the key's length {expected}, got {fields.integer(key)}")
    counts = _per_layer(fields, "attention.head_count_kv", len(windows))
    found = {kind: {count for count, window in zip(counts, windows, strict=True) if (window > 0) == kind} for kind in (False, True)}
    if any(len(kind) > 1 for kind in found.values()):
        raise ModelError(f"{fields.where}: attention.head_count_kv must be the same in all layers of a kind, got {quoted(counts)}")
    return (next(iter(found[False]), counts[0]), width), (next(iter(found[True]), counts[0]), own)


def _per_layer(fields: Fields, key: str, layers: int) -> tuple[int, ...]:
    """A number for each layer; ModelError for none, and for a list of another length."""
    if not isinstance(fields.get(key), list):
        return (fields.integer(key, low=1),) * layers
    numbers = fields.integers(key)
    if len(numbers) != layers or min(numbers) < 1:
        raise ModelError(f"{fields.where}: {key} must hold a number of 1 or more for each of {layers} layers, got {quoted(list(numbers))}")
    return numbers


# --- where files have the tensors

_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    **{f"ffn_{part}_shexp": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_WHOLE = {"layer_output_scale": "layer_scalar", "ffn_gate_inp_norm": "router.scale", "ffn_down_exps_scale": "router.per_expert_scale"}


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    return _gguf_sources(config, name) if kind == "gguf" else _hf_sources(config, name)


def _hf_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None]:
    *path, part, suffix = name.split(".")
    if part in _TOP:
        return (f"{_TOP[part]}.{suffix}",), None
    layer = f"model.layers.{path[-1]}" if path else ""
    if part in _WHOLE:
        return (f"{layer}.{_WHOLE[part]}",), None
    if part.endswith("_exps"):
        return joined_experts(config, f"{layer}.experts", part)
    return (llama.hf_name(name, _NAMES),), None


def _gguf_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None]:
    for ours, theirs in (("_inp_norm.weight", "_inp.scale"), ("_exps_scale.weight", "_exps.scale"), ("_shexp.", ".")):
        if ours in name:
            return (name.replace(ours, theirs),), None
    return gguf_expert_sources(config, name) or ((name,), None)
