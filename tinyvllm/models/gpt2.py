"""GPT-2: learned positions, LayerNorm with bias, one matrix for q, k and v, a GELU perceptron. A model of its own, with the same ops."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor, nn

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import uninitialized
from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.models.config import ModelConfig, Source, Transform, vocabulary
from tinyvllm.models.projections import LayerWeights, ModelWeights
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.ops.head import embed, norm_head
from tinyvllm.ops.linear import linear
from tinyvllm.ops.norm import Norm
from tinyvllm.ops.qkv import QKV, norm_qkv_rope_store
from tinyvllm.ops.rank_rows import after_attention


def layer(norm: nn.LayerNorm) -> Norm:
    """tinygrad's norm as an op's argument."""
    assert norm.weight is not None
    return Norm("LAYER", norm.weight, norm.eps, norm.bias)


class GPT2Block:
    """One layer; names follow GGUF's, with separate q, k and v."""

    weights_type = LayerWeights
    weights: LayerWeights  # set by the loader

    def __init__(self, config: ModelConfig):
        E, F = config.dim, config.hidden_dim
        self.config = config
        self.attn_norm, self.ffn_norm = nn.LayerNorm(E, config.norm_eps), nn.LayerNorm(E, config.norm_eps)
        self.attn_q, self.attn_k, self.attn_v, self.attn_output = (nn.Linear(E, E) for _ in range(4))
        self.ffn_up, self.ffn_down = nn.Linear(E, F), nn.Linear(F, E)

    def forward_batch(self, x: Tensor, batch: Batch, attention: PagedAttention, cache: LayerCache) -> Tensor:
        """x [T, E] float32; result [T, E] float32."""
        weights = self.weights
        qkv = QKV(weights.qkv.weight, weights.qkv.bias)
        queries, cache = norm_qkv_rope_store(x, layer(self.attn_norm), qkv, None, cache, batch)
        attended = attention(queries, cache, self.config.head_dim**-0.5)
        return after_attention(self._after_attention, x, attended, batch, cache.ranks)

    def _after_attention(self, x: Tensor, attended: Tensor, batch: Batch) -> Tensor:
        """The rest of the layer for the rows x [T, E] of the residual stream, from what they attend to."""
        weights = self.weights
        x = linear(attended, weights.attn_output.weight, batch.rows, weights.attn_output.bias, residual=x).contiguous()
        h = layer(self.ffn_norm)(x).contiguous()
        h = linear(h, weights.ffn_in.weight, batch.rows, weights.ffn_in.bias, gelu=True).contiguous()
        return linear(h, weights.ffn_down.weight, batch.rows, weights.ffn_down.bias, residual=x).contiguous()

    def products(self) -> dict[str, tuple[str, ...]]:
        """The projections of each field of `LayerWeights`."""
        return {
            "qkv": ("attn_q", "attn_k", "attn_v"),
            "attn_output": ("attn_output",),
            "ffn_in": ("ffn_up",),
            "ffn_down": ("ffn_down",),
        }


class GPT2:
    """Radford et al., 2019. The interface of `llama.Llama`."""

    weights: ModelWeights  # set by the loader

    def __init__(self, config: ModelConfig):
        self.config = config
        with uninitialized():
            self.blk = [GPT2Block(config) for _ in range(config.num_blocks)]
            self.token_embd = nn.Embedding(config.vocab_size, config.dim)
            self.position_embd = nn.Embedding(config.max_context, config.dim)
            self.output_norm = nn.LayerNorm(config.dim, config.norm_eps)
            if not config.tied:
                self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def products(self) -> dict[str, tuple[str, ...]]:
        return {}

    def tables(self) -> dict[str, str]:
        return {}

    def in_every_stage(self) -> tuple[str, ...]:
        return ()

    def constants(self, max_len: int, context: int) -> dict[str, np.ndarray]:
        return {}

    def forward_batch(self, batch: Batch, caches: list[LayerCache]) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [N, V] of the rows that the batch samples from, and the tokens of their maxima where a kernel computes them."""
        return self.logits(self.states(batch, caches)[-1], batch)

    def logits(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What `forward_batch` returns, from the output x [T, E] of the last layer; x itself in a stage of a pipeline without a head."""
        head = self.weights.head
        return (x, None) if head is None else norm_head(x, self.final_norm, head, batch.samples, batch.sample_count)

    def states(self, batch: Batch, caches: list[LayerCache]) -> list[Tensor]:
        """The residual stream, float32 [T, E]: the embedding or what has arrived, then the output of each layer, before `final_norm`."""
        x = batch.arrived if batch.arrived is not None else self._embedded(batch)
        attention = PagedAttention(batch, caches[0].S)
        states = [x]
        for block, cache in zip(self.blk, caches, strict=True):
            x = block.forward_batch(x, batch, attention, cache)
            states.append(x)
        return states

    def _embedded(self, batch: Batch) -> Tensor:
        assert self.weights.table is not None
        positions = self.position_embd.weight[batch.positions].float()
        return (embed(self.weights.table, batch.tokens, batch.rows) + positions).contiguous()

    @property
    def final_norm(self) -> Norm:
        return layer(self.output_norm)


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    if fields.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ModelError(
            f"config.json: activation_function {quoted(fields.get('activation_function'))} is not supported; expected 'gelu_new'"
        )
    for key, expected in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        if fields.boolean(key, expected) != expected:
            raise ModelError(f"config.json: {key} = {not expected} is not supported for GPT-2")
    if fields.get("quantization_config") is not None:  # its matrices are stored with inputs first: a square one would be taken transposed
        raise ModelError("config.json: quantization_config is not supported for GPT-2; use the unquantized model or a GGUF file")
    E = fields.integer("n_embd", low=1)
    return _config(
        fields,
        layers=fields.layers("n_layer"),
        E=E,
        F=fields.integer("n_inner", 4 * E, low=1),
        heads=fields.integer("n_head", low=1),
        eps=fields.number("layer_norm_epsilon", 1e-5),
        V=fields.integer("vocab_size", low=1),
        context=fields.integer("n_positions", 1024, low=2),
        tied=fields.boolean("tie_word_embeddings", True),
        prefix="transformer." if source.shape("transformer.wte.weight") else "",
    )


def from_gguf(source: Source) -> ModelConfig:
    fields = Fields(source.config, prefix="gpt2.", where="GGUF metadata")
    return _config(
        fields,
        layers=fields.layers("block_count"),
        E=fields.integer("embedding_length", low=1),
        F=fields.integer("feed_forward_length", low=1),
        heads=fields.integer("attention.head_count", low=1),
        eps=fields.number("attention.layer_norm_epsilon", 1e-5),
        V=vocabulary(source, fields),
        context=fields.integer("context_length", low=2),
        tied=source.shape("output.weight") is None,
    )


def _config(
    fields: Fields, layers: int, E: int, F: int, heads: int, eps: float, V: int, context: int, tied: bool, prefix: str = ""
) -> ModelConfig:
    if E % heads:
        names = ("attention.head_count", "embedding_length") if fields.prefix else ("n_head", "n_embd")
        raise ModelError(f"{fields.where}: {names[0]} {heads} must divide {names[1]} {E}")
    D = E // heads
    return ModelConfig(
        num_blocks=layers, dim=E, hidden_dim=F, n_heads=heads, n_kv_heads=heads, norm_eps=eps, vocab_size=V, head_dim=D, v_head_dim=D,
        rope_theta=0.0, rope_dim=0, max_context=context, qkv_bias=True, output_bias=True, mlp_bias=True, family="gpt2", tied=tied,
        prefix=prefix,
    )  # fmt: skip


_HF_NAMES = {
    "token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "attn_norm": "ln_1", "ffn_norm": "ln_2",
    "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_CONV1D = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


def sources(config: ModelConfig, kind: str, name: str) -> tuple[tuple[str, ...], Transform | None]:
    """Hugging Face keeps the projections as Conv1D [in, out]; both keep q, k and v in one."""
    *prefix, part, suffix = name.split(".")
    third = ("attn_q", "attn_k", "attn_v").index(part) if part in ("attn_q", "attn_k", "attn_v") else None
    if kind == "gguf":
        if third is None:
            return (name,), None
        return (".".join([*prefix, "attn_qkv", suffix]),), _part(third, config.dim, transposed=False)
    if name == "output.weight":
        return ("lm_head.weight",), None
    block = f"h.{prefix[1]}." if prefix else ""
    source = f"{config.prefix}{block}{'attn.c_attn' if third is not None else _HF_NAMES[part]}.{suffix}"
    transposed = suffix == "weight" and part in _CONV1D
    return (source,), _part(third, config.dim, transposed) if transposed or third is not None else None


def _part(third: int | None, E: int, transposed: bool) -> Transform:
    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        w = arrays[0].T if transposed else arrays[0]
        return w if third is None else w[third * E : (third + 1) * E]

    return transform
