"""What families with a mixture of experts share: the modules of a layer, how it is computed, and where files have its tensors.

The experts' matrices of a layer are one matrix, one expert's rows after the other's. An expert that all rows share is a dense gated layer
next to them, with or without a gate of its own, which is one more row of the router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tinygrad import Tensor, nn

from tinyvllm.batch import Batch
from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields
from tinyvllm.models.config import MAX_EXPERTS, ModelConfig, Source, Transform
from tinyvllm.models.projections import LayerWeights, Product
from tinyvllm.ops.experts import Routing, RoutingPolicy, experts_down, experts_gate_up_silu, norm_route
from tinyvllm.ops.linear import gate_up_silu, linear
from tinyvllm.ops.lora import AdapterStack, pair_biases
from tinyvllm.ops.norm import Norm

_SIGMOID = 2  # of GGUF's expert_gating_func; 0 is the family's own, 1 and 3 softmax before and after the choice


def place_experts(block: Any, config: ModelConfig) -> None:
    """The modules of a layer's experts, in place of tinygrad's, whose matrices have three dimensions."""
    hidden, biased = config.num_experts * config.hidden_dim, config.biased_experts
    block.ffn_gate_exps, block.ffn_up_exps = (nn.Linear(config.dim, hidden, bias=biased) for _ in range(2))
    block.ffn_down_exps = nn.Linear(config.hidden_dim, config.num_experts * config.dim, bias=biased)
    if config.router_bias:
        block.ffn_gate_inp.bias = Tensor.empty(config.num_experts)
    if is_gated(config):
        block.ffn_gate_inp_shexp = nn.Linear(config.dim, 1, bias=False)


def is_gated(config: ModelConfig) -> bool:
    """Whether a layer has a gate for its shared expert."""
    return config.shared_expert_dim > 0 and config.shared_expert_gate


def expert_products(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The projections of each field of `LayerWeights` that a layer of experts has."""
    shared = {"shared_in": ("ffn_gate_shexp", "ffn_up_shexp"), "shared_down": ("ffn_down_shexp",)} if config.shared_expert_dim else {}
    router = ("ffn_gate_inp", *(("ffn_gate_inp_shexp",) if is_gated(config) else ()))
    return {"router": router, "ffn_in": ("ffn_gate_exps", "ffn_up_exps"), "ffn_down": ("ffn_down_exps",)} | shared


def routing_policy(config: ModelConfig) -> RoutingPolicy:
    """How a layer of experts chooses."""
    c = config
    return RoutingPolicy(
        c.num_experts,
        c.num_experts_per_tok,
        c.norm_topk_prob,
        c.router_sigmoid,
        c.router_bias,
        *c.router_groups,
        scale=c.routed_scaling_factor,
        gated=is_gated(c),
        group_scores=c.router_group_scores,
    )


Biases = Callable[[str, Tensor, Norm | None, Batch], Tensor | None]  # of a product, by its field, its input and the norm in front


def mixture(
    x: Tensor, norm: Norm | None, after: Norm | None, config: ModelConfig, weights: LayerWeights, batch: Batch, biases: Biases,
    stacks: Mapping[str, AdapterStack],
) -> Tensor:  # fmt: skip
    """The residual x [T, E] plus what the experts of each row make of norm(x), normed by `after`; `biases` are those of the shared one, and
    `stacks` has the adapters of the others.
    """
    c, router = config, weights.router
    assert router is not None and (after is None or weights.shared_in is None)
    routing = norm_route(x, norm, router.weight, batch.rows, routing_policy(c), router.bias)
    first, down = weights.ffn_in, weights.ffn_down
    bias = _pair_bias(x, norm, first.bias, stacks.get("ffn_in"), routing, batch, c)
    h = experts_gate_up_silu(x, norm, first.weight, routing, batch.rows, c.num_experts, c.gelu, bias, c.gate_clamp).contiguous()
    residual = x
    if weights.shared_in is not None and weights.shared_down is not None:
        residual = _shared(x, norm, weights.shared_in, weights.shared_down, routing.gates, batch, c, biases)
    residual = _with_adapters(residual, h, stacks.get("ffn_down"), routing, batch, c)
    return experts_down(h, down.weight, routing, batch.rows, c.num_experts, residual, after, c.residual_scale, down.bias).contiguous()


def _pair_bias(
    x: Tensor, norm: Norm | None, bias: Tensor | None, stack: AdapterStack | None, routing: Routing, batch: Batch, config: ModelConfig
) -> Tensor | None:
    """The bias of gate and up: `bias` [2 X F], or that of each pair, [T C, 2 F], where rows of the batch have adapters."""
    if batch.adapters is None or stack is None:
        return bias
    X = config.num_experts
    added = pair_biases(x, norm, stack, routing.chosen, batch.adapters, batch.rows, X)
    if bias is not None:
        added = added + bias.reshape(2, X, -1)[:, routing.chosen].permute(1, 2, 0, 3).reshape(added.shape)
    return added.reshape(-1, int(added.shape[2])).contiguous()


def _with_adapters(residual: Tensor, h: Tensor, stack: AdapterStack | None, routing: Routing, batch: Batch, config: ModelConfig) -> Tensor:
    """The residual [T, E] plus what adapters add to down of h [T C, F], times the shares, in their order whatever the batch is."""
    if batch.adapters is None or stack is None:
        return residual
    T, C = (int(d) for d in routing.chosen.shape)
    added = pair_biases(h.reshape(T, C, -1), None, stack, routing.chosen, batch.adapters, batch.rows, config.num_experts)
    total = added[:, 0] * routing.shares[:, :1]
    for c in range(1, C):
        total = total + added[:, c] * routing.shares[:, c : c + 1]
    return (batch.adapters.reshape(T, 1) > 0).where(residual + total * config.residual_scale, residual).contiguous()


def _shared(
    x: Tensor, norm: Norm | None, first: Product, down: Product, gates: Tensor | None, batch: Batch, config: ModelConfig, biases: Biases
) -> Tensor:
    """The residual x plus the shared expert's output, times its gate. The gate multiplies what the last product reads, a row each."""
    h = gate_up_silu(x, norm, first.weight, batch.rows, biases("shared_in", x, norm, batch), config.gelu)
    h = down.in_order((h if gates is None else h * gates).contiguous())
    return linear(h, down.weight, batch.rows, biases("shared_down", h, None, batch), x, scale=config.residual_scale).contiguous()


# --- where files have the tensors


def hf_expert_sources(
    config: ModelConfig, name: str, shared: str = "shared_experts", bias: str = "gate.e_score_correction_bias"
) -> tuple[tuple[str, ...], Transform | None] | None:
    """Of the mixture in `mlp` whose experts have tensors of their own; None for a tensor of anything else."""
    _, layer, part, suffix, *_ = (*name.split("."), "", "")
    mlp, projection = f"model.layers.{layer}.mlp", f"{part.removeprefix('ffn_').split('_')[0]}_proj.weight"
    if part == "ffn_gate_inp":
        return ((f"{mlp}.gate.weight",), None) if suffix == "weight" else ((f"{mlp}.{bias}",), flat)
    if part == "ffn_gate_inp_shexp":
        return (f"{mlp}.shared_expert_gate.weight",), None
    if part.endswith("_shexp"):
        return (f"{mlp}.{shared}.{projection}",), None
    if part.endswith("_exps") and config.experts_in_one:
        return joined_experts(config, f"{mlp}.experts", part)
    if part.endswith("_exps"):
        return tuple(f"{mlp}.experts.{e}.{projection}" for e in range(config.num_experts)), np.concatenate
    return None


def gguf_expert_sources(config: ModelConfig, name: str) -> tuple[tuple[str, ...], Transform | None] | None:
    """As `hf_expert_sources`, of GGUF files, which have the experts of a layer in one tensor; with gate and up in another one in some."""
    *prefix, part, suffix = name.split(".")
    if part == "ffn_gate_inp" and suffix == "bias" and config.router_bias == "choice":
        return (".".join([*prefix, "exp_probs_b", suffix]),), None
    if part == "ffn_gate_inp_shexp":
        return (name,), one_row
    if not part.endswith("_exps"):
        return None
    if config.experts_apart:  # files of 2023 and early 2024
        return tuple(".".join([*prefix, part.removesuffix("_exps"), str(e), suffix]) for e in range(config.num_experts)), np.concatenate
    if config.experts_in_one and part != "ffn_down_exps":
        start = config.hidden_dim * (part == "ffn_up_exps")
        half = part_of_biases if suffix == "bias" else part_of_experts
        return (".".join([*prefix, "ffn_gate_up_exps", suffix]),), half(config.num_experts, start, start + config.hidden_dim)
    return (name,), flat if suffix == "bias" else experts_in_rows


def joined_experts(config: ModelConfig, experts: str, part: str) -> tuple[tuple[str, ...], Transform | None]:
    """Of a file that has gate and up of all experts in one tensor [X, 2 F, E] and down in another [X, E, F], or these transposed."""
    if part == "ffn_down_exps":
        return (f"{experts}.down_proj",), _turned(experts_in_rows) if config.experts_transposed else experts_in_rows
    start = 0 if part == "ffn_gate_exps" else config.hidden_dim
    half = part_of_experts(config.num_experts, start, start + config.hidden_dim)
    return (f"{experts}.gate_up_proj",), _turned(half) if config.experts_transposed else half


def _turned(transform: Transform) -> Transform:
    """The same of matrices [X, I, O]."""

    def turned(arrays: list[np.ndarray]) -> np.ndarray:
        return transform([arrays[0].swapaxes(1, 2)])

    return turned


def experts_in_rows(arrays: list[np.ndarray]) -> np.ndarray:
    """The matrices [X, O, I] of all experts as one matrix [X * O, I]."""
    return arrays[0].reshape(-1, arrays[0].shape[-1])


def one_row(arrays: list[np.ndarray]) -> np.ndarray:
    """A vector as a matrix."""
    return arrays[0].reshape(1, -1)


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    """All numbers as a vector."""
    return arrays[0].reshape(-1)


def part_of_experts(experts: int, start: int, end: int) -> Transform:
    """Rows `start` to `end` - 1 of each expert's matrix [O, I], as one matrix, from [X, O, I]."""

    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        columns = arrays[0].shape[-1]
        return arrays[0].reshape(experts, -1, columns)[:, start:end].reshape(-1, columns)

    return transform


def part_of_biases(experts: int, start: int, end: int) -> Transform:
    """Numbers `start` to `end` - 1 of each expert's biases, as a vector, from [X, O]."""

    def transform(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(experts, -1)[:, start:end].reshape(-1)

    return transform


# --- what descriptions and files say of a mixture


def with_joined_experts(config: ModelConfig, source: Source) -> ModelConfig:
    """With how a safetensors file has the experts of a layer: a tensor for each matrix, or two in all, as transformers computes with them.

    In those of Qwen3-VL with experts matrices are [I, O]. Of the two shapes at least one tells, as 2 F and F are not both E.
    """
    if not config.num_experts:
        return config
    first = next((layer for layer in range(config.num_blocks) if layer not in config.dense_layers), 0)
    for module in ("mlp", "block_sparse_moe"):  # the latter is Granite's
        joined, down = (source.shape(f"model.layers.{first}.{module}.experts.{part}_proj") for part in ("gate_up", "down"))
        if joined is not None:
            turned = joined[1:] == (config.dim, 2 * config.hidden_dim) and (down or ())[1:] == (config.hidden_dim, config.dim)
            return replace(config, experts_in_one=True, experts_transposed=turned or config.experts_transposed)
    return config


def gguf_experts(source: Source, fields: Fields, renormalize: bool, sigmoid: bool = False) -> dict[str, Any]:
    """The mixture of a GGUF file, nothing where it has none; layers without a router are dense. The defaults are the family's."""
    count = fields.integer("expert_count", 0, high=MAX_EXPERTS)
    if not count:
        return {}
    layers, width = fields.layers("block_count"), fields.integer("feed_forward_length", 0)
    dense = frozenset(i for i in range(layers) if source.shape(f"blk.{i}.ffn_gate_inp.weight") is None)
    first = next((i for i in range(layers) if i not in dense), 0)
    own = fields.integer("expert_feed_forward_length", width, low=1)
    shared, gate = (source.shape(f"blk.{first}.{part}.weight") for part in ("ffn_up_shexp", "ffn_gate_inp_shexp"))
    counted = own * fields.integer("expert_shared_count", 0, high=MAX_EXPERTS)  # also where the tensors are missing: that is an error
    gating = fields.integer("expert_gating_func", 0, high=3)
    groups = fields.integer("expert_group_count", 0) or 1
    values: dict[str, Any] = dict(
        num_experts=count,
        num_experts_per_tok=fields.integer("expert_used_count", low=1, high=count),
        norm_topk_prob=fields.boolean("expert_weights_norm", renormalize),
        hidden_dim=own,
        dense_hidden_dim=width,
        dense_layers=dense,
        shared_expert_dim=fields.integer("expert_shared_feed_forward_length", 0) or (shared[0] if shared else counted),
        shared_expert_gate=gate is not None,
        router_sigmoid=sigmoid if gating == 0 else gating == _SIGMOID,
        router_bias=_router_bias(source, first),
        experts_in_one=source.shape(f"blk.{first}.ffn_gate_up_exps.weight") is not None,
        experts_apart=source.shape(f"blk.{first}.ffn_gate.0.weight") is not None,
        router_groups=(groups, (fields.integer("expert_group_used_count", 0) or 1) if groups > 1 else 1),
        routed_scaling_factor=fields.number("expert_weights_scale", 0.0) or 1.0,
    )
    return _checked(fields, values)


def _router_bias(source: Source, layer: int) -> str:
    if source.shape(f"blk.{layer}.exp_probs_b.bias") is not None:
        return "choice"
    return "logits" if source.shape(f"blk.{layer}.ffn_gate_inp.bias") is not None else ""


def hf_sigmoid_experts(fields: Fields, renormalize: bool, first_dense: int) -> dict[str, Any]:
    """Experts with the keys of DeepSeek-V3 (arXiv:2412.19437): sigmoids, a bias for the choice, groups, and experts that all share."""
    count = fields.integer("n_routed_experts", low=1, high=MAX_EXPERTS)
    width, groups = fields.integer("moe_intermediate_size", low=1), fields.integer("n_group", 1, low=1)
    values: dict[str, Any] = dict(
        num_experts=count,
        num_experts_per_tok=fields.integer("num_experts_per_tok", low=1, high=count),
        norm_topk_prob=fields.boolean("norm_topk_prob", renormalize),
        hidden_dim=width,
        dense_hidden_dim=fields.integer("intermediate_size", low=1),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", first_dense))),
        shared_expert_dim=width * fields.integer("n_shared_experts", 0, high=MAX_EXPERTS),
        shared_expert_gate=False,
        router_sigmoid=True,
        router_bias="choice",
        router_groups=(groups, fields.integer("topk_group", 1, low=1, high=groups) if groups > 1 else 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0, above=0),
    )
    return _checked(fields, values)


def _checked(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """ModelError for groups from which no choice can be made."""
    (groups, kept), count, used = values["router_groups"], values["num_experts"], values["num_experts_per_tok"]
    if groups > 1 and (count % groups or count // groups < 2 or not used <= kept * (count // groups) <= count):
        raise ModelError(f"{fields.where}: {used} of {count} experts cannot be chosen from {kept} of {groups} groups of at least 2 experts")
    return values
