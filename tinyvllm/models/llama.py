"""LLaMA and models of its shape: tinygrad's Transformer with a paged cache and our ops. Other families hold only their differences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from tinygrad import Tensor, nn
from tinygrad.llm.model import Transformer, TransformerBlock

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import uninitialized
from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig, Source, Transform, check_factors, check_heads, hf_rope, hf_windows, vocabulary
from tinyvllm.models.mixture import expert_products, gguf_expert_sources, gguf_experts, mixture, place_experts
from tinyvllm.models.projections import LayerWeights, ModelWeights, Product
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.ops.head import embed, norm_head, table_rows
from tinyvllm.ops.linear import gate_up_silu, linear
from tinyvllm.ops.lora import AdapterStack, lora_bias
from tinyvllm.ops.norm import Norm
from tinyvllm.ops.qkv import QKV, norm_qkv_rope_store
from tinyvllm.ops.rank_rows import after_attention
from tinyvllm.ops.rope import RopeScaling, query_factors, rope_table


def rms(norm: nn.RMSNorm) -> Norm:
    """tinygrad's norm as an op's argument."""
    assert norm.weight is not None
    return Norm("RMS", norm.weight, norm.eps)


@dataclass(frozen=True, eq=False)
class Rotations:
    """What a step's positions mean: `angles` [T, R] of layers without and, where they are others, with a window; the factors [T, 1, 1]
    of q, None where there are none.
    """

    angles: tuple[Tensor, ...]
    query_factors: Tensor | None


def bias_of(product: Product, stack: AdapterStack | None, x: Tensor, norm: Norm | None, batch: Batch) -> Tensor | None:
    """The bias of a product with the normed x [T, I]: that of each row, [T, O], where rows of the batch have adapters."""
    if batch.adapters is None or stack is None:
        return product.bias
    return lora_bias(x, norm, stack, product.bias, batch.adapters, batch.rows)


@dataclass(eq=False)
class Sinks:
    """The scores of the heads' sinks, float32 [H]."""

    weight: Tensor


class LlamaBlock(TransformerBlock):
    """One layer. Modules and their names are tinygrad's; the body runs a flat batch against the paged cache."""

    weights_type: ClassVar[type[LayerWeights]] = LayerWeights
    config: ModelConfig  # of the layer
    weights: LayerWeights  # set by the loader

    def __init__(self, config: ModelConfig, layer: int):
        config = config.of_layer(layer)
        super().__init__(config)
        self.window = config.windows[layer] if config.windows else 0
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.rope = None if layer in config.no_rope else int(self.window > 0 and config.window_rope is not None)
        self.cap, self.gelu, self.residual_scale = config.attention_cap, config.gelu, config.residual_scale
        self._place_norms(config)
        self.adapters: dict[str, AdapterStack] = {}  # by field of `LayerWeights`; set where an engine has adapters (runner/adapters.py)
        if config.sinks:
            self.attn_sinks = Sinks(Tensor.empty(config.n_heads))
        if config.num_experts:
            place_experts(self, config)
        if config.output_bias:
            self.attn_output.bias = Tensor.empty(config.dim)
        if config.mlp_bias:
            self.ffn_gate.bias, self.ffn_up.bias = Tensor.empty(config.hidden_dim), Tensor.empty(config.hidden_dim)
            self.ffn_down.bias = Tensor.empty(config.dim)

    def _place_norms(self, config: ModelConfig) -> None:
        """The norms that differ from LLaMA's, under GGUF's names."""
        if not config.pre_norms:
            del self.attn_norm, self.ffn_norm
        if config.post_norms:
            self.post_attention_norm, self.post_ffw_norm = (nn.RMSNorm(config.dim, config.norm_eps) for _ in range(2))
        if config.whole_qk_norm:
            widths = (heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads))
            self.attn_q_norm, self.attn_k_norm = (nn.RMSNorm(width, config.norm_eps) for width in widths)

    def forward_batch(self, x: Tensor, batch: Batch, attention: PagedAttention, cache: LayerCache, rotations: Rotations) -> Tensor:
        """x [T, E] float32; result [T, E] float32."""
        attended = self._attend(x, batch, attention, cache, rotations)
        return after_attention(self._after_attention, x, attended, batch, cache.ranks)

    def _after_attention(self, x: Tensor, attended: Tensor, batch: Batch) -> Tensor:
        """The rest of the layer for the rows x [T, E] of the residual stream, from what they attend to."""
        x = self._project(attended, "attn_output", batch, x, "post_attention_norm")
        if self.weights.router is not None:
            return mixture(
                x, self._norm("ffn_norm"), self._norm("post_ffw_norm"), self.config, self.weights, batch, self._bias, self.adapters
            )
        norm, gate_up = self._norm("ffn_norm"), self.weights.ffn_in
        ordered = gate_up.in_order(x)
        h = gate_up_silu(ordered, norm, gate_up.weight, batch.rows, self._bias("ffn_in", ordered, norm, batch), self.gelu).contiguous()
        return self._project(h, "ffn_down", batch, x, "post_ffw_norm")

    def _attend(self, x: Tensor, batch: Batch, attention: PagedAttention, cache: LayerCache, rotations: Rotations) -> Tensor:
        """The values that each row attends to, float32 [T, H * D]; x is not yet normed."""
        angles = None if self.rope is None else rotations.angles[self.rope]
        norm, ordered = self._norm("attn_norm"), self.weights.qkv.in_order(x)
        q, cache = norm_qkv_rope_store(ordered, norm, self._qkv(self._bias("qkv", ordered, norm, batch)), angles, cache, batch)
        q = q if rotations.query_factors is None else (q * rotations.query_factors).contiguous()
        sinks = self.attn_sinks.weight if self.config.sinks else None
        return attention(q, cache, self.scale, self.window, self.cap, sinks)

    def _project(self, x: Tensor, field: str, batch: Batch, residual: Tensor, norm: str) -> Tensor:
        """The residual [T, E] plus x times the product's weight and its bias, normed if the layer has this norm, and scaled."""
        product: Product = getattr(self.weights, field)
        x, after = product.in_order(x), self._norm(norm)
        bias = self._bias(field, x, None, batch)
        return linear(x, product.weight, batch.rows, bias, residual, norm=after, scale=self.residual_scale).contiguous()

    def _bias(self, field: str, x: Tensor, norm: Norm | None, batch: Batch) -> Tensor | None:
        return bias_of(getattr(self.weights, field), self.adapters.get(field), x, norm, batch)

    def _norm(self, name: str) -> Norm | None:
        norm: nn.RMSNorm | None = getattr(self, name, None)
        return None if norm is None else rms(norm)

    def _qkv(self, bias: Tensor | None) -> QKV:
        qkv = QKV(self.weights.qkv.weight, bias)
        if self.config.qk_norm:
            qkv = replace(qkv, q_norm=self.attn_q_norm.weight, k_norm=self.attn_k_norm.weight, qk_eps=self.config.norm_eps)
        return qkv

    def products(self) -> dict[str, tuple[str, ...]]:
        """The projections of each field of `LayerWeights`."""
        mlp: dict[str, tuple[str, ...]] = {"ffn_in": ("ffn_gate", "ffn_up"), "ffn_down": ("ffn_down",)}
        if self.config.num_experts:
            mlp = expert_products(self.config)
        return {"qkv": ("attn_q", "attn_k", "attn_v"), "attn_output": ("attn_output",), **mlp}

    def adapted(self, field: str) -> int:
        """Of how many matrices a product's adapters are: of all experts, or all heads, where a row has some of them, else of one; 0 where
        no adapter may change the product.
        """
        if field == "router":
            return 0
        experts = self.config.num_experts if field in ("ffn_in", "ffn_down") else 0
        return experts * (not self.config.post_norms) if experts else 1

    def input_order(self, field: str) -> np.ndarray | None:
        """Of a product's inputs, their numbers in Hugging Face's checkpoint, int [I]; None where they are the same."""
        return None

    def take_heads(self, config: ModelConfig) -> None:
        """Compute with the heads of this configuration, those of a rank."""

    def unread(self) -> tuple[str, ...]:
        """Projections that other layers have and this one does without, though files may hold them."""
        return ()

    def input_norms(self) -> dict[str, nn.RMSNorm]:
        """The norms that are read in front of one product alone, by its field."""
        names = {"qkv": "attn_norm", **({} if self.config.num_experts else {"ffn_in": "ffn_norm"})}
        return {field: getattr(self, name) for field, name in names.items() if hasattr(self, name)}


class Llama(Transformer):
    """A causal language model over a flat batch. A loader places the tensors under tinygrad's names and sets `weights`."""

    block_type: ClassVar[type[LlamaBlock]] = LlamaBlock
    weights: ModelWeights

    def __init__(self, config: ModelConfig):
        self.config = config
        self.adapters: dict[str, AdapterStack] = {}  # of products in front of the layers, as of a layer's
        with uninitialized():
            self.blk: list[LlamaBlock] = [self._block(config, layer) for layer in range(config.num_blocks)]  # type: ignore[assignment]
            self.token_embd = nn.Embedding(config.vocab_size, config.dim)
            self.output_norm = nn.RMSNorm(config.dim, config.norm_eps)
            if not config.tied:
                self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def _block(self, config: ModelConfig, layer: int) -> LlamaBlock:
        return self.block_type(config, layer)

    def constants(self, max_len: int, context: int) -> dict[str, np.ndarray]:
        """Arrays that `forward_batch` takes after the caches, for sequences of up to `max_len` tokens in an engine of `context`."""
        c = self.config
        columns = [rope_table(dim, theta, max_len, scaling, context) for dim, theta, scaling in c.ropes]
        beta, length = c.query_scaling
        if beta and max_len > length:
            columns.append(query_factors(beta, length, max_len))
        return {"rope": np.concatenate(columns, axis=1)}

    def forward_batch(self, batch: Batch, caches: list[LayerCache], rope: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [N, V] of the rows that the batch samples from, and the tokens of their maxima where a kernel computes them."""
        return self.logits(self.states(batch, caches, rope)[-1], batch)

    def logits(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What `forward_batch` returns, from the output x [T, E] of the last layer; x itself in a stage of a pipeline without a head."""
        c, head = self.config, self.weights.head
        if head is None:
            return x, None
        return norm_head(x, self.final_norm, head, batch.samples, batch.sample_count, c.logits_divisor, c.logits_cap)

    def states(self, batch: Batch, caches: list[LayerCache], rope: Tensor) -> list[Tensor]:
        """The residual stream, float32 [T, E]: the embedding or what has arrived, then the output of each layer, before `final_norm`."""
        x = batch.arrived if batch.arrived is not None else self._embedded(batch)
        states = [x]
        rotations = self.context(x, table_rows(rope, batch.positions, batch.rows), batch)
        block_size = next((cache.S for cache in caches if isinstance(cache, LayerCache)), 1)
        attentions = [PagedAttention(each, block_size) for each in (batch, *batch.others)]
        for block, cache in zip(self.blk, caches, strict=True):
            x = block.forward_batch(x, batch.of(cache), attentions[cache.group], cache, rotations)
            states.append(x)
        return states

    def _embedded(self, batch: Batch) -> Tensor:
        assert self.weights.table is not None
        return embed(self.weights.table, batch.tokens, batch.rows, self.config.embedding_scale)

    def context(self, x: Tensor, rows: Tensor, batch: Batch) -> Rotations:
        """What all layers need of a step: x [T, E] is the embedding, `rows` those of `constants` of the step's positions."""
        return self._rotations(rows)

    def products(self) -> dict[str, tuple[str, ...]]:
        """The projections of each product of `ModelWeights` in front of the layers."""
        return {}

    def adapted(self, field: str) -> int:
        """As of a layer."""
        return 1

    def tables(self) -> dict[str, str]:
        """The embedding tables of `ModelWeights` in addition to the tokens'."""
        return {}

    def in_every_stage(self) -> tuple[str, ...]:
        """The modules in front of the layers that each stage of a pipeline has, and not the first one alone."""
        return ()

    def _rotations(self, rows: Tensor) -> Rotations:
        """From the rows of `constants` of a step's positions."""
        widths = [dim for dim, _, _ in self.config.ropes]
        ends = list(itertools.accumulate(widths))
        angles = tuple(rows[:, end - width : end].contiguous() for width, end in zip(widths, ends, strict=True))
        return Rotations(angles, rows[:, -1:].reshape(-1, 1, 1).contiguous() if int(rows.shape[1]) > ends[-1] else None)

    @property
    def final_norm(self) -> Norm:
        return rms(self.output_norm)


HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """blk.3.attn_q.bias -> model.layers.3.self_attn.q_proj.bias; `own` are parts that the family calls otherwise."""
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{own.get(part) or HF_NAMES[part]}.{kind}"


def halves_from_pairs(heads: int, rope_dim: int) -> Transform:
    """Rows of a q or k projection whose rotary pairs are adjacent (GGUF's llama, ERNIE) to the layout of two halves."""

    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        (w,) = arrays
        rows = w.reshape(heads, w.shape[0] // heads, *w.shape[1:])
        pairs = rows[:, :rope_dim].reshape(heads, rope_dim // 2, 2, *w.shape[1:]).swapaxes(1, 2)
        return np.concatenate([pairs.reshape(heads, rope_dim, *w.shape[1:]), rows[:, rope_dim:]], axis=1).reshape(w.shape)

    return transform


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """The file tensors that the model tensor `name` comes from, and the transform."""
    if kind == "safetensors":
        return (hf_name(name),), None
    return gguf_expert_sources(config, name) or ((name,), unpair(config, name))


def rows_of(start: int, end: int) -> Transform:
    """Rows of a matrix that holds several projections."""

    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0][start:end]

    return transform


def half_of_gate_up(config: ModelConfig, part: str) -> Transform:
    """Gate or up from the one matrix of both."""
    return rows_of(0, config.hidden_dim) if part == "ffn_gate" else rows_of(config.hidden_dim, 2 * config.hidden_dim)


def unpair(config: ModelConfig, name: str) -> Transform | None:
    part = name.split(".")[-2]
    if part == "attn_q":
        return halves_from_pairs(config.n_heads, config.rope_dim)
    return halves_from_pairs(config.n_kv_heads, config.rope_dim) if part == "attn_k" else None


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return hf_config(fields, family="llama", windows=(0,) * fields.layers())


def mistral_from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    return hf_config(fields, family="llama", windows=hf_windows(fields, fields.layers(), default_on=True))


@dataclass(frozen=True)
class Defaults:
    """What keys of config.json mean that it does not have, where transformers' default for the family is not LLaMA's; `rope` is the type
    of layers whose rotary parameters are the model's.
    """

    theta: float = 10000.0
    share: float = 1.0
    eps: float = 1e-6
    tied: bool = False
    bias: bool = False
    head_dim: int = 0
    rope: str | None = None


_LLAMA = Defaults()


def hf_config(fields: Fields, defaults: Defaults = _LLAMA, **differences: Any) -> ModelConfig:
    """A LLaMA-shaped config.json; `differences` are the ModelConfig fields that a family sets itself."""
    _check_activation(fields, bool(differences.get("gelu")))
    dim, heads = fields.integer("hidden_size", low=1), fields.integer("num_attention_heads", low=1)
    head_dim = fields.integer("head_dim", defaults.head_dim or dim // heads, low=1)
    max_context = fields.integer("max_position_embeddings", 2048, low=2)
    theta, share, scaling = hf_rope(fields, max_context, defaults.theta, defaults.share, defaults.rope)
    attention_bias = fields.boolean("attention_bias", defaults.bias)
    values: dict[str, Any] = dict(
        num_blocks=fields.layers(),
        dim=dim,
        hidden_dim=fields.integer("intermediate_size", differences.get("hidden_dim"), low=1),
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", heads, low=1),
        norm_eps=fields.number("rms_norm_eps", defaults.eps),
        vocab_size=fields.integer("vocab_size", low=1),
        head_dim=head_dim,
        v_head_dim=head_dim,
        rope_theta=theta,
        rope_dim=int(head_dim * share),
        max_context=max_context,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias"),
        tied=fields.boolean("tie_word_embeddings", defaults.tied),
        scaling=scaling,
    )
    return check_factors(fields, check_heads(fields, ModelConfig(**(values | differences))))


def _check_activation(fields: Fields, gelu: bool) -> None:
    """ModelError for a gate with another activation than the family's."""
    known = ("gelu_pytorch_tanh",) if gelu else ("silu", "swish")
    key = "hidden_activation" if fields.get("hidden_activation") is not None else "hidden_act"
    if fields.get(key, known[0]) not in known:
        raise ModelError(f"{fields.where}: {key} {quoted(fields.get(key))} is not supported; expected {known[0]!r}")


def from_gguf(source: Source) -> ModelConfig:
    """Also of a Mixtral, which is a llama with experts there."""
    fields = Fields(source.config, prefix="llama.", where="GGUF metadata")
    return gguf_config(source, family="llama", **gguf_experts(source, fields, renormalize=True))


def gguf_config(source: Source, **differences: Any) -> ModelConfig:
    """A LLaMA-shaped GGUF; keys are those of the GGUF specification under the architecture's own prefix."""
    architecture = str(source.config["general.architecture"])
    fields = Fields(source.config, prefix=f"{architecture}.", where="GGUF metadata")
    dim, heads = fields.integer("embedding_length", low=1), fields.integer("attention.head_count", low=1)
    head_dim, layers = fields.integer("attention.key_length", dim // heads, low=1), fields.layers("block_count")
    window = fields.integer("attention.sliding_window", 0)
    values: dict[str, Any] = dict(
        num_blocks=layers,
        dim=dim,
        hidden_dim=differences["hidden_dim"] if "hidden_dim" in differences else fields.integer("feed_forward_length", 0),
        n_heads=heads,
        n_kv_heads=differences["n_kv_heads"] if "n_kv_heads" in differences else fields.integer("attention.head_count_kv", heads, low=1),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        vocab_size=vocabulary(source, fields),
        head_dim=head_dim,
        v_head_dim=head_dim,
        rope_theta=fields.number("rope.freq_base", 10000.0, above=1),
        rope_dim=fields.integer("rope.dimension_count", head_dim),
        max_context=fields.integer("context_length", low=2),
        qkv_bias=source.shape("blk.0.attn_q.bias") is not None,
        output_bias=source.shape("blk.0.attn_output.bias") is not None,
        mlp_bias=source.shape("blk.0.ffn_up.bias") is not None,
        tied=source.shape("output.weight") is None,
        scaling=gguf_scaling(source, fields),
        windows=(window,) * layers,
    )
    return check_factors(fields, check_heads(fields, ModelConfig(**(values | differences))))


def gguf_scaling(source: Source, fields: Fields) -> RopeScaling:
    """Linear and YaRN from metadata; Llama 3's and LongRoPE from the tensors of factors that converters write."""
    trained = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"), low=2)
    if source.shape("rope_freqs.weight") is not None:
        factors = tuple(float(f) for f in source.array("rope_freqs.weight").ravel())
        return RopeScaling("longrope", 1.0, trained, attention_factor=1.0, short_factor=factors, long_factor=factors)
    if source.shape("rope_factors_long.weight") is not None:
        long, short = (tuple(float(f) for f in source.array(f"rope_factors_{n}.weight").ravel()) for n in ("long", "short"))
        factor = fields.integer("context_length") / trained
        attention = None if fields.get("rope.scaling.attn_factor") is None else fields.number("rope.scaling.attn_factor", above=0)
        return RopeScaling("longrope", factor, trained, attention_factor=attention, short_factor=short, long_factor=long)
    kind = fields.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"GGUF metadata: rope scaling {quoted(kind)} is not supported without its tensor of factors")
    if kind == "none":
        return RopeScaling()
    all_dim = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    return RopeScaling(
        kind,
        fields.number("rope.scaling.factor", 1.0, above=0),
        trained,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
        mscale=1.0 if all_dim else 0.0,
        mscale_all_dim=all_dim,
    )
