"""EAGLE heads: one decoder layer that guesses token by token, reading the target's hidden states and then its own.

Published layouts, E the heads' width, E_t the target's, V the vocabulary:

EAGLE-1 and 2 (Li et al. 2024, arXiv:2401.15077 and 2406.16858): x = fc(concat(embedding, state)) with fc [E, 2 E_t], after the target's
final norm; then a LLaMA layer `layers.0.*`, as a rule without its first norm; the target's head, without a norm, on what comes out.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840): the residual stream after three layers, g = fc(concat of them) with fc [E, 3 E_t]; then a layer
`midlayer.*` (`layers.0.*` in the speculators' files) whose q, k and v read concat(input_layernorm(embedding), hidden_norm(g)), 2 E numbers;
`norm`, and `lm_head` [V', E] of a vocabulary of its own: token i is the target's i + d2t[i]. Variants by config.json: norm_before_residual
(the residual stream is the normalized g), norm_before_fc (`input_norm` over what fc reads), fc_norm (`fc_norm.{i}`, one for each state),
norm_output (the layer's own state is read back after `norm`).

Entry p of the heads' cache is of the target's state of token p with token p + 1, at position p.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig, WeightRecipe, hf_windows
from tinyvllm.models.llama import hf_config
from tinyvllm.models.projections import Product
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.ops.head import Table, embed, norm_head
from tinyvllm.ops.linear import Weight, gate_up_silu, linear, products
from tinyvllm.ops.norm import Norm, rms_norm
from tinyvllm.ops.qkv import append_kv
from tinyvllm.ops.rope import apply_rope
from tinyvllm.runner.runner import Runner
from tinyvllm.speculate.head_files import SPEAKER, HeadFile, Target, expect_equal, head_dtype, head_recipe, load_head_products
from tinyvllm.speculate.protocol import FINAL

MAX_AUX_LAYERS = 16  # states of one token that EAGLE-3 reads; published heads have three
_LLAMA_KEYS = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
    "max_window_layers", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "original_max_position_embeddings", "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
)  # fmt: skip
_EAGLE3_KEYS = (
    "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "eagle_config",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "num_aux_hidden_states",
)  # fmt: skip
_WRAPPER_KEYS = ("transformer_layer_config", "speculators_config", "speculators_model_type", "embed_requires_grad")
_PRODUCTS = {
    "fc": ("fc",), "qkv": ("q_proj", "k_proj", "v_proj"), "attn_output": ("o_proj",), "ffn_in": ("gate_proj", "up_proj"),
    "ffn_down": ("down_proj",),
}  # fmt: skip


@dataclass(frozen=True)
class EagleConfig:
    """What the heads compute. `layer` is the decoder layer's shape, `aux_layers` the target's states that fc reads; () for EAGLE-1.

    `mtp_layers`: the heads are the model's own MTP layer (mtp.py), and read the residual stream after that many layers; 0 for others.
    """

    layer: ModelConfig
    aux_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    first_norm: bool = True  # whether the layer has `input_layernorm`
    mtp_layers: int = 0

    @property
    def is_eagle3(self) -> bool:
        return bool(self.aux_layers)

    @property
    def method(self) -> str:
        return "mtp" if self.mtp_layers else "eagle3" if self.is_eagle3 else "eagle"

    @property
    def has_last_norm(self) -> bool:
        """Whether a norm is between the layer and the vocabulary head."""
        return self.is_eagle3 or self.mtp_layers > 0

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self.aux_layers or ((self.mtp_layers,) if self.mtp_layers else (FINAL,))


# ---- config.json


def read_eagle(file: HeadFile, target: Target) -> EagleConfig:
    """The configuration of EAGLE-1/2 heads. ModelError for one that is not of this target or not understood."""
    fields = file.fields
    file.require_keys((*_LLAMA_KEYS, "bias"))
    layer = _layer_config(file, fields)
    for key, got, wanted in (("hidden_size", layer.dim, target.hidden_size), ("vocab_size", layer.vocab_size, target.vocab_size)):
        expect_equal(key, got, wanted, "the target")
    if fields.boolean("bias", file.shape("fc.bias") is not None) != (file.shape("fc.bias") is not None):
        raise ModelError(f"{SPEAKER}: {fields.where} says bias {quoted(fields.get('bias'))}, but the tensor 'fc.bias' says otherwise")
    return EagleConfig(layer, draft_vocab_size=target.vocab_size, first_norm=file.shape("layers.0.input_layernorm.weight") is not None)


def read_eagle3(file: HeadFile, target: Target) -> EagleConfig:
    """The configuration of EAGLE-3 heads, in their own layout or the speculators'. ModelError as `read_eagle`."""
    fields, layer_fields = file.fields, _unwrap(file)
    own = _EAGLE3_KEYS if layer_fields is not fields else (*_EAGLE3_KEYS, *_LLAMA_KEYS)
    file.require_keys((*own, *_WRAPPER_KEYS, "tie_word_embeddings"))
    if layer_fields is not fields:
        file.require_keys(_LLAMA_KEYS, layer_fields)
    if fields.boolean("tie_word_embeddings"):
        raise ModelError(f"{SPEAKER}: {fields.where}: tie_word_embeddings is not supported for EAGLE-3 heads; export their lm_head")
    layer = _layer_config(file, layer_fields)
    expect_equal("vocab_size", layer.vocab_size, target.vocab_size, "the target")
    expect_equal("target_hidden_size", fields.integer("target_hidden_size", target.hidden_size), target.hidden_size, "the target")
    nested = fields.get("eagle_config", {})
    if not isinstance(nested, Mapping):
        raise ModelError(f"{SPEAKER}: {fields.where}: eagle_config must be an object, got {quoted(nested)}")
    nested_fields = Fields(nested, where=f"{fields.where}, eagle_config")
    file.require_keys(_EAGLE3_KEYS, nested_fields)
    merged = Fields({**nested, **{k: v for k, v in fields.values.items() if v is not None}}, where=fields.where)
    if not merged.boolean("use_aux_hidden_state", True):
        raise ModelError(f"{SPEAKER}: {fields.where}: use_aux_hidden_state false is not supported; EAGLE-3 heads read the target's layers")
    config = EagleConfig(
        layer,
        _aux_layers(merged, target),
        merged.integer("draft_vocab_size", layer.vocab_size, low=1, high=target.vocab_size),
        merged.boolean("norm_before_residual"),
        merged.boolean("norm_before_fc"),
        merged.boolean("fc_norm"),
        merged.boolean("norm_output"),
    )
    if config.norm_before_fc and config.fc_norm:
        raise ModelError(f"{SPEAKER}: {fields.where}: norm_before_fc and fc_norm exclude each other")
    return config


def _unwrap(file: HeadFile) -> Fields:
    """The fields of the decoder layer: in the speculators' files they are an object of their own."""
    fields = file.fields
    kind = fields.get("speculators_model_type")
    if kind is None:
        return fields
    if kind != "eagle3":
        raise ModelError(f"{SPEAKER}: {fields.where}: speculators_model_type {quoted(kind)} is not supported; supported is 'eagle3'")
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ModelError(f"{SPEAKER}: {fields.where}: transformer_layer_config must be an object, got {quoted(layer)}")
    return Fields(layer, where=f"{fields.where}, transformer_layer_config")


def _aux_layers(fields: Fields, target: Target) -> tuple[int, ...]:
    n = target.num_layers
    layers = fields.integers("eagle_aux_hidden_state_layer_ids") or (2, n // 2, n - 3)
    if len(layers) > MAX_AUX_LAYERS or not all(0 <= layer <= n for layer in layers):
        raise ModelError(
            f"{SPEAKER}: {fields.where}: eagle_aux_hidden_state_layer_ids must be 1 to {MAX_AUX_LAYERS} numbers from 0 to the target's {n} "
            f"layers, got {quoted(list(layers))}"
        )
    expect_equal("num_aux_hidden_states", fields.integer("num_aux_hidden_states", len(layers)), len(layers), "the list of layers")
    return layers


def _layer_config(file: HeadFile, fields: Fields) -> ModelConfig:
    if fields.layers() != 1:
        raise ModelError(f"{SPEAKER}: {fields.where}: num_hidden_layers {fields.layers()} is not supported; EAGLE heads have 1 layer")
    described = fields.get("layer_types") is not None
    if not described and fields.get("sliding_window") is not None and "use_sliding_window" not in fields.values:
        raise ModelError(f"{SPEAKER}: {fields.where}: sliding_window {quoted(fields.get('sliding_window'))} needs layer_types to say where")
    config = hf_config(fields, family="llama", windows=hf_windows(fields, 1, default_on=described))
    q_norm = file.shape(f"{layer_prefix(file)}self_attn.q_norm.weight")
    return replace(config, qk_norm=0 if q_norm is None else config.head_dim)


def layer_prefix(file: HeadFile) -> str:
    return "midlayer." if any(name.startswith("midlayer.") for name in file.tensors) else "layers.0."


# ---- tensors


def eagle_recipes(file: HeadFile, config: EagleConfig, target: Target) -> list[WeightRecipe]:
    """The recipe of every tensor that the heads load. ModelError for one that is missing, has a wrong shape, or is unknown."""
    c, E = config.layer, config.layer.dim
    wide, fan_in = (2 * E, len(config.aux_layers) * target.hidden_size) if config.is_eagle3 else (E, 2 * E)
    H, K, D, F = c.n_heads, c.n_kv_heads, c.head_dim, c.hidden_dim
    layer, attention = layer_prefix(file), layer_prefix(file) + "self_attn."
    matrices = {
        "fc": ("fc", E, fan_in), "q_proj": (attention + "q_proj", H * D, wide), "k_proj": (attention + "k_proj", K * D, wide),
        "v_proj": (attention + "v_proj", K * D, wide), "o_proj": (attention + "o_proj", E, H * D),
        "gate_proj": (layer + "mlp.gate_proj", F, E), "up_proj": (layer + "mlp.up_proj", F, E),
        "down_proj": (layer + "mlp.down_proj", E, F),
    }  # fmt: skip
    vectors = {"post_norm": (layer + "post_attention_layernorm", E)}
    if config.first_norm:
        vectors["input_norm"] = (layer + "input_layernorm", E)
    if config.has_last_norm:
        vectors |= {"hidden_norm": (layer + "hidden_norm", E), "norm": ("norm", E)}
    if config.mtp_layers:
        vectors["token_norm"] = (layer + "token_norm", E)
    if config.norm_before_fc:
        vectors["fc_input_norm"] = ("input_norm", fan_in)
    if config.fc_norm:
        vectors |= {f"fc_norm_{i}": (f"fc_norm.{i}", target.hidden_size) for i in range(len(config.aux_layers))}
    if c.qk_norm:
        vectors |= {"q_norm": (attention + "q_norm", D), "k_norm": (attention + "k_norm", D)}
    if config.is_eagle3 or file.shape("lm_head.weight") is not None:
        matrices["lm_head"] = ("lm_head", config.draft_vocab_size, E)
    if file.shape("embed_tokens.weight") is not None or target.hidden_size != E:
        matrices["embed_tokens"] = ("embed_tokens", target.vocab_size, E)
    recipes = [head_recipe(file, f"{name}.weight", (O, I), f"{source}.weight") for name, (source, O, I) in matrices.items()]
    ends = ("lm_head", "embed_tokens")
    biased = [
        (name, source, O) for name, (source, O, _) in matrices.items() if name not in ends and file.shape(f"{source}.bias") is not None
    ]
    recipes += [head_recipe(file, f"{name}.bias", (O,), f"{source}.bias") for name, source, O in biased]
    recipes += [head_recipe(file, f"{name}.weight", (size,), f"{source}.weight") for name, (source, size) in vectors.items()]
    file.require_used((source for recipe in recipes for source in recipe.sources), ("d2t", "t2d", "*.rotary_emb.inv_freq"))
    return recipes


def draft_tokens(file: HeadFile, config: EagleConfig, target: Target) -> np.ndarray | None:
    """int64 [V']: the target's token of each token of the draft vocabulary; None where they are the same."""
    if file.shape("d2t") is None:
        if config.draft_vocab_size != target.vocab_size:
            raise ModelError(f"{SPEAKER}: {file.checkpoint.path} has draft_vocab_size {config.draft_vocab_size} and no tensor 'd2t'")
        return None
    offsets = file.integers("d2t")
    tokens: np.ndarray = offsets + np.arange(len(offsets))
    expect_equal("d2t of length", len(tokens), config.draft_vocab_size, "config.json as draft_vocab_size")
    if not ((tokens >= 0) & (tokens < target.vocab_size)).all():
        raise ModelError(
            f"{SPEAKER}: 'd2t' in {file.checkpoint.path} names tokens outside of the target's vocabulary of {target.vocab_size}"
        )
    return tokens


# ---- the computation


@dataclass(frozen=True, eq=False)
class EagleHeads:
    """Loaded heads. `tensors` are those outside of products, `table` the embedding, `head` the vocabulary head."""

    config: EagleConfig
    products: Mapping[str, Product]
    tensors: SimpleNamespace
    table: Table
    head: Weight
    tokens: np.ndarray | None  # of the draft vocabulary
    dtype: DType  # of keys and values

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self.config.state_layers

    @property
    def shape(self) -> ModelConfig:
        """The shape of the layer."""
        return self.config.layer

    def combine(self, states: Tensor, count: Tensor) -> Tensor:
        """What the layer reads of the target's states float32 [T, n E_t], the first `count` [1] counting: [T, E]; EAGLE-1: the states."""
        c = self.config
        if not c.is_eagle3:
            return states
        if c.norm_before_fc:
            states = self._norm("fc_input_norm", states)
        if c.fc_norm:
            width = int(states.shape[1]) // len(c.aux_layers)
            parts = [self._norm(f"fc_norm_{i}", states[:, i * width : (i + 1) * width]) for i in range(len(c.aux_layers))]
            states = parts[0].cat(*parts[1:], dim=1)
        return self._multiply("fc", states.contiguous(), count)

    def layer(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: LayerCache, angles: Tensor) -> Tensor:
        """The state float32 [T, E] after the layer, of tokens int32 [T] and `hidden` [T, E]: of `combine`, or what `feed` makes of a state.

        Writes keys and values at the batch's slots; angles [T, R].
        """
        c = self.config.layer
        x = embed(self.table, tokens, batch.rows)
        if self.config.is_eagle3:
            normalized = self._norm("hidden_norm", hidden).contiguous()
            residual = normalized if self.config.norm_before_residual else hidden
            read = self._norm("input_norm", x).cat(normalized, dim=1).contiguous()
        else:
            if self.config.mtp_layers:
                read = self._norm("hidden_norm", hidden).cat(self._norm("token_norm", x), dim=1)
            else:
                read = x.cat(hidden, dim=1)
            residual = self._multiply("fc", read.contiguous(), batch.rows)
            read = self._norm("input_norm", residual).contiguous() if self.config.first_norm else residual
        q, cache = self._append(read, batch, cache, angles)
        attended = PagedAttention(batch, cache.S)(q, cache, c.head_dim**-0.5, c.windows[0])
        x = self._multiply("attn_output", attended, batch.rows, residual.contiguous())
        gate_up = self.products["ffn_in"]
        norm = Norm("RMS", self.tensors.post_norm.weight, c.norm_eps)
        h = gate_up_silu(x, norm, gate_up.weight, batch.rows, gate_up.bias).contiguous()
        return self._multiply("ffn_down", h, batch.rows, x)

    def feed(self, state: Tensor) -> Tensor:
        """What the layer reads of its own state [T, E] at the next token."""
        return self._norm("norm", state).contiguous() if self.config.norm_output else state

    def logits(self, states: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [N, V'] of rows [N] int32 of states [T, E], the first `count` [1] counting; and their maxima as `norm_head`."""
        if self.config.has_last_norm:
            return norm_head(states, Norm("RMS", self.tensors.norm.weight, self.config.layer.norm_eps), self.head, rows, count)
        return linear(states[rows].contiguous(), self.head, count).contiguous(), None

    def _append(self, x: Tensor, batch: Batch, cache: LayerCache, angles: Tensor) -> tuple[Tensor, LayerCache]:
        """Queries [T, H, D] of x, and the cache with its keys and values."""
        c, T = self.config.layer, int(x.shape[0])
        qkv = self.products["qkv"]  # on Metal three matrices, each by its kernel
        y = products(qkv.in_order(x), qkv.weight, batch.rows, qkv.bias, by_kernels=True).reshape(T, -1, c.head_dim)
        q, k, v = y[:, : c.n_heads], y[:, c.n_heads : c.n_heads + c.n_kv_heads], y[:, c.n_heads + c.n_kv_heads :]
        if c.qk_norm:
            q, k = (rms_norm(part, getattr(self.tensors, name).weight, c.norm_eps) for part, name in ((q, "q_norm"), (k, "k_norm")))
        q, k = apply_rope(q, angles).contiguous(), apply_rope(k, angles).contiguous()
        return q, append_kv(k, v.contiguous(), cache, batch)

    def _multiply(self, name: str, x: Tensor, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        product = self.products[name]
        return linear(product.in_order(x), product.weight, rows, product.bias, residual=residual).contiguous()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, getattr(self.tensors, name).weight, self.config.layer.norm_eps)


def load_eagle(file: HeadFile, runner: Runner, config: EagleConfig, format: str | None = None) -> EagleHeads:
    """The heads by the products of the runner's device, in a format as `load_head_products`. What the file lacks, embedding or vocabulary
    head, is the target's own.
    """
    target = Target.of(runner.config)
    recipes, tokens = eagle_recipes(file, config, target), draft_tokens(file, config, target)
    names = {recipe.name for recipe in recipes}
    own_head = "lm_head.weight" in names
    products = _PRODUCTS | ({"head": ("lm_head",)} if own_head else {})
    loaded, tensors = load_head_products(file, runner, products, recipes, format)
    weights = runner.model.weights
    table = tensors.embed_tokens.weight if "embed_tokens.weight" in names else weights.table
    return EagleHeads(config, loaded, tensors, table, loaded["head"].weight if own_head else weights.head, tokens, head_dtype(file))
