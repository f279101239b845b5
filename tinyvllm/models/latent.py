"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1), for prompts and decodes: a row's bits do
not depend on where it came from.

Of a token the cache holds the normed latent c that keys and values of all heads are made from, and one rotated key r. A head's key is
[W_k c, r] and its value W_v c, so its score with a query [a, b] is [W_k^T a, b] . [c, r], and its output W_v times the weighted sum of the
latents: attention with one key of rank + rope_dim features for all heads, whose first features are the value.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from tinygrad import Tensor, dtypes, nn

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.models.config import Latent, ModelConfig, Transform
from tinyvllm.models.llama import Llama, LlamaBlock, Rotations, rms
from tinyvllm.models.mixture import experts_in_rows
from tinyvllm.models.projections import LatentWeights, LayerWeights, Product
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.ops.heads import head_products
from tinyvllm.ops.linear import linear, products
from tinyvllm.ops.lora import pair_biases
from tinyvllm.ops.qkv import append_latents
from tinyvllm.ops.rope import apply_rope

_EPS = 1e-6  # of the norms of latents, whatever that of the others is


class LatentBlock(LlamaBlock):
    """One layer; names are GGUF's."""

    weights_type: ClassVar[type[LayerWeights]] = LatentWeights
    weights: LatentWeights

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.latent = c = _latent(config)
        E, H, R = config.dim, config.n_heads, config.rope_dim
        del self.attn_q, self.attn_k, self.attn_v
        queries = H * (c.plain + R)
        if c.q_rank:
            self.attn_q_a, self.attn_q_b = nn.Linear(E, c.q_rank, bias=False), nn.Linear(c.q_rank, queries, bias=False)
            self.attn_q_a_norm = nn.RMSNorm(c.q_rank, _EPS)
        else:
            self.attn_q = nn.Linear(E, queries, bias=False)
        self.attn_kv_a_mqa = nn.Linear(E, c.rank + R, bias=False)
        self.attn_kv_a_norm = nn.RMSNorm(c.rank, _EPS)
        self.attn_k_b = nn.Linear(c.plain, H * c.rank, bias=False)
        self.attn_v_b = nn.Linear(c.rank, H * c.value, bias=False)
        self.attn_output = nn.Linear(H * c.value, E, bias=False)

    def _attend(self, x: Tensor, batch: Batch, attention: PagedAttention, cache: LayerCache, rotations: Rotations) -> Tensor:
        """As in LLaMA, with values of `Latent.value` features."""
        c, w, (angles, *_) = self.latent, self.weights, rotations.angles
        T, H = int(x.shape[0]), w.k_b.weight.O // c.rank  # of a rank its heads
        plain = H * c.plain
        x = rms(self.attn_norm)(w.qkv.in_order(x)).contiguous()
        y = products(x, w.qkv.weight, batch.rows, self._bias("qkv", x, None, batch), by_kernels=True)
        shared = c.rank + self.config.rope_dim
        q, kv = y[:, :-shared], y[:, -shared:]
        if w.q_b is not None:
            q = rms(self.attn_q_a_norm)(w.q_b.in_order(q.contiguous())).contiguous()
            q = linear(q, w.q_b.weight, batch.rows, self._bias("q_b", q, None, batch))
        normed, key = rms(self.attn_kv_a_norm)(kv[:, : c.rank].contiguous()), kv[:, c.rank :].reshape(T, 1, -1).contiguous()
        cache = append_latents(normed.reshape(T, 1, c.rank).cat(apply_rope(key, angles), dim=2).contiguous(), cache, batch)
        absorbed = self._of_heads("k_b", q[:, :plain].reshape(T, H, c.plain), batch)
        rotated = apply_rope(q[:, plain:].reshape(T, H, -1).contiguous(), angles)
        attended = attention(absorbed.cat(rotated, dim=2).contiguous(), cache, self.scale)
        return self._of_heads("v_b", attended.reshape(T, H, c.rank), batch).reshape(T, -1)

    def _of_heads(self, field: str, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H, I] times each head's matrix of a product, plus what rows' adapters add: float32 [T, H, O]."""
        product: Product = getattr(self.weights, field)
        y, stack = head_products(x, product.weight, batch.rows), self.adapters.get(field)
        if batch.adapters is None or stack is None:
            return y
        T, H = (int(d) for d in x.shape[:2])
        heads = Tensor.arange(H, dtype=dtypes.int32, device=x.device).reshape(1, H).expand(T, H)
        return (y + pair_biases(x, None, stack, heads, batch.adapters, batch.rows, H)).contiguous()

    def products(self) -> dict[str, tuple[str, ...]]:
        """The projections of each field of `LatentWeights`."""
        q: dict[str, tuple[str, ...]] = {"qkv": ("attn_q", "attn_kv_a_mqa")}
        if self.latent.q_rank:
            q = {"qkv": ("attn_q_a", "attn_kv_a_mqa"), "q_b": ("attn_q_b",)}
        return super().products() | q | {"k_b": ("attn_k_b",), "v_b": ("attn_v_b",)}

    def adapted(self, field: str) -> int:
        return self.config.n_heads if field in ("k_b", "v_b") else super().adapted(field)

    def input_norms(self) -> dict[str, nn.RMSNorm]:
        return super().input_norms() | ({"q_b": self.attn_q_a_norm} if self.latent.q_rank else {})


class LatentModel(Llama):
    """A model whose layers have latent attention."""

    block_type = LatentBlock


# --- where files have the matrices


def gguf_latent_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None] | None:
    """Of a tensor of latent attention; None for others. Older files have the matrices of k_b and v_b in one, as Hugging Face's have."""
    part = name.split(".")[-2]
    if part not in ("attn_k_b", "attn_v_b"):
        return ((name,), transform) if (transform := _rows_in_order(config, part)) is not None else None
    if config.prefix:
        return (name.replace(part, config.prefix),), _half_of_kv_b(config, part)
    return (name,), experts_in_rows


def hf_latent_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None] | None:
    """As `gguf_latent_sources`."""
    _, layer, part, suffix = (*name.split("."), "", "")[:4]
    names = {"attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_layernorm", "attn_q_b": "q_b_proj", "attn_kv_a_mqa": "kv_a_proj_with_mqa"}
    names |= {"attn_kv_a_norm": "kv_a_layernorm", "attn_q": "q_proj"} | dict.fromkeys(("attn_k_b", "attn_v_b"), "kv_b_proj")
    if part not in names:
        return None
    source = (f"model.layers.{layer}.self_attn.{names[part]}.{suffix}",)
    return source, _half_of_kv_b(config, part) if part in ("attn_k_b", "attn_v_b") else _rows_in_order(config, part)


def _latent(config: ModelConfig) -> Latent:
    assert config.latent is not None, "a family with latent attention sets it"
    return config.latent


def _rows_in_order(config: ModelConfig, part: str) -> Transform | None:
    """Of projections with rotated features: first what is not rotated of all heads, then the rest, in halves."""
    c, R = _latent(config), config.rope_dim
    heads, plain = {"attn_kv_a_mqa": (1, c.rank)}.get(part, (config.n_heads, c.plain))
    if part not in ("attn_q", "attn_q_b", "attn_kv_a_mqa"):
        return None

    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        rest = arrays[0].shape[1:]
        rows = arrays[0].reshape(heads, plain + R, *rest)
        rotated = rows[:, plain:].reshape(heads, R // 2, 2, *rest).swapaxes(1, 2) if c.pairs else rows[:, plain:]
        return np.concatenate([rows[:, :plain].reshape(-1, *rest), rotated.reshape(-1, *rest)])

    return transform


def _half_of_kv_b(config: ModelConfig, part: str) -> Transform:
    """The matrices of all heads for keys, transposed, or those for values, from the matrices [plain + value, rank]."""
    c, H = _latent(config), config.n_heads

    def keys(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(H, c.plain + c.value, c.rank)[:, : c.plain].swapaxes(1, 2).reshape(H * c.rank, c.plain)

    def values(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(H, c.plain + c.value, -1)[:, c.plain :].reshape(H * c.value, -1)

    return keys if part == "attn_k_b" else values
