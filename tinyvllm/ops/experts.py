"""A mixture of experts: which experts a row has, and their gated feed-forward layers (Shazeer et al., 2017, arXiv:1701.06538).

The weights of all X experts are one matrix, one expert's rows after the other's: gate of all [X F, E] and then up of all, and down of all
[X E, F]. Each of a row's C experts has the products of `gate_up_silu` and `linear` with its matrices, with x rounded as they round it. A
row's result is summed over its experts in the order of their shares, the largest first, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor, dtypes

from tinyvllm.backends.operands import GateClamp, RouterBias, Routing, RoutingPolicy, TensorWeight, Weight
from tinyvllm.backends.registry import select
from tinyvllm.errors import KernelError
from tinyvllm.ops.facts import product_facts
from tinyvllm.ops.linear import add_output, matrices_with_rounding, product, rounded
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Activations
from tinyvllm.quant.layouts import PackedWeight
from tinyvllm.quant.slices import ColumnShare

__all__ = ["GateClamp", "RouterBias", "Routing", "RoutingPolicy", "experts_down", "experts_gate_up_silu", "norm_route"]


def norm_route(x: Tensor, norm: Norm | None, router: Weight, rows: Tensor, policy: RoutingPolicy, bias: Tensor | None = None) -> Routing:
    """The experts of each row of the normalised x [T, E]: those with the largest logits, which are products with `router` [X, E], the
    lower number of equals; the policy may have `bias` [X]. `rows` [1] int32 is how many rows count. Shares of a row with a NaN are NaN.
    """
    if not isinstance(router, TensorWeight):
        placement, shape = Placement.of(x.device), f"{policy.chosen} of {router.O}x{router.I} {router.format}"
        kernel = select("norm_route", placement, shape, replace(product_facts(placement, router, norm), experts=policy.experts))
        if kernel is not None:
            return kernel.backend.norm_route(kernel.variant, x, norm, router, rows, policy, bias)
    logits = product(x if norm is None else norm(x).contiguous(), router).contiguous()
    gates = logits[:, policy.experts :].sigmoid().contiguous() if policy.gated else None
    logits = logits[:, : policy.experts].contiguous() if policy.gated else logits
    if policy.bias == "logits" and bias is not None:
        logits = (logits + bias).contiguous()
    choose = _by_scores if policy.by_scores else _by_logits
    shares, chosen = choose(logits, policy, bias)
    return Routing((shares if policy.scale == 1.0 else shares * policy.scale).contiguous(), chosen, None, gates)


def _by_logits(logits: Tensor, policy: RoutingPolicy, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    chosen = _largest(logits, policy.chosen).contiguous()
    if policy.renormalize:
        return logits.gather(1, chosen).softmax(1), chosen
    return logits.softmax(1).gather(1, chosen), chosen


def _by_scores(logits: Tensor, policy: RoutingPolicy, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """With shares of the scores, which the bias changes for the choice alone."""
    scores = (logits.sigmoid() if policy.sigmoid else logits.softmax(1)).contiguous()
    numbers = (scores + bias).contiguous() if policy.bias == "choice" and bias is not None else scores
    if policy.groups > 1:
        numbers = _of_best_groups(numbers, policy).contiguous()
    chosen = _largest(numbers, policy.chosen).contiguous()
    shares = scores.gather(1, chosen)
    return shares / (shares.sum(1, keepdim=True) + 1e-20) if policy.renormalize else shares, chosen


def _of_best_groups(numbers: Tensor, policy: RoutingPolicy) -> Tensor:
    """Those of the groups whose largest add up to the most; the others are -infinity."""
    by_group = numbers.reshape(-1, policy.experts // policy.groups)
    totals = by_group.gather(1, _largest(by_group, policy.group_scores)).sum(1).reshape(-1, policy.groups).contiguous()
    kept = _largest(totals, policy.kept_groups)  # [T, kept]
    group_of = Tensor.arange(policy.experts, device=numbers.device) // (policy.experts // policy.groups)
    return (kept.unsqueeze(2) == group_of.reshape(1, 1, -1)).max(1).where(numbers, -float("inf"))


def _largest(logits: Tensor, count: int) -> Tensor:
    """The places of the `count` largest numbers of each row, int32 [T, count], the largest first and of equals the first."""
    X = int(logits.shape[1])
    places = Tensor.arange(X, device=logits.device)
    own, other = logits.unsqueeze(2), logits.unsqueeze(1)
    ahead = (other > own) | ((other == own) & (places.unsqueeze(0) < places.unsqueeze(1)))
    ranks = ahead.sum(2).unsqueeze(1)  # [T, 1, X]: how many are before
    wanted = Tensor.arange(count, device=logits.device).reshape(1, count, 1)
    return (ranks == wanted).where(places, 0).max(2).cast(dtypes.int32)


def experts_gate_up_silu(
    x: Tensor,
    norm: Norm | None,
    weight: Weight,
    routing: Routing,
    rows: Tensor,
    experts: int,
    gelu: bool = False,
    bias: Tensor | None = None,
    clamp: GateClamp | None = None,
) -> Tensor:
    """silu(gate) * up of the normalised x [T, E] with each of a row's experts, float32 [T * C, F]: pair t C + c is row t with its c-th.

    weight [2 X F, E], bias [2 X F], or [T * C, 2 F] of each pair; with `gelu` gelu(gate) * up; with `clamp` as it says.
    """
    F, of_pairs = weight.O // 2 // experts, bias is not None and len(bias.shape) == 2
    if not isinstance(weight, TensorWeight):
        placement, facts = Placement.of(x.device), product_facts(Placement.of(x.device), weight, norm, outputs=F)
        facts = replace(facts, gelu=gelu, experts=experts, ungrouped=routing.groups is None, pair_bias=of_pairs)
        policies = f"{' gelu' * gelu}{' clamped' * (clamp is not None)}{' biases of pairs' * of_pairs}"
        kernel = select("experts_gate_up_silu", placement, f"{experts} times {weight.I}->{F} {weight.format}{policies}", facts)
        if kernel is not None:
            return kernel.backend.experts_gate_up_silu(kernel.variant, x, norm, weight, routing, rows, experts, gelu, bias, clamp)
    x = (x if norm is None else norm(x).contiguous()).unsqueeze(1)
    gate, up = (_products(x, *matrix, routing.chosen) for matrix in _stacks(weight, experts, 2))
    if bias is not None and of_pairs:
        both = bias.reshape(*routing.chosen.shape, 2, F)
        gate, up = gate + both[:, :, 0], up + both[:, :, 1]
    elif bias is not None:
        own = bias.reshape(2, experts, F)
        gate, up = gate + own[0][routing.chosen], up + own[1][routing.chosen]
    if clamp is not None:
        return _clamped(gate, up, clamp).reshape(-1, F)
    return ((gate.gelu() if gelu else gate.silu()) * up).reshape(-1, F)


def _clamped(gate: Tensor, up: Tensor, clamp: GateClamp) -> Tensor:
    gate, up = gate.minimum(clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * (gate * clamp.alpha).sigmoid() * (up + 1.0)


def experts_down(
    h: Tensor,
    weight: Weight,
    routing: Routing,
    rows: Tensor,
    experts: int,
    residual: Tensor,
    norm: Norm | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """residual [T, E] + scale * norm(the sum over a row's experts of share * (h . weight^T + bias)), float32 [T, E].

    h [T * C, F] as `experts_gate_up_silu` returns it; weight [X E, F]; bias [X E].
    """
    if norm is not None or scale != 1.0:
        return add_output(residual, _weighted(h, weight, routing, rows, experts, None, bias), norm, scale)
    return _weighted(h, weight, routing, rows, experts, residual, bias)


def _weighted(
    h: Tensor, weight: Weight, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None, bias: Tensor | None
) -> Tensor:
    if isinstance(weight, PackedWeight) and isinstance(weight.share, ColumnShare):
        return _reduced(h, weight, weight.share, routing, rows, experts, residual, bias)
    if not isinstance(weight, TensorWeight):
        placement, E = Placement.of(h.device), weight.O // experts
        facts = replace(product_facts(placement, weight, outputs=E), experts=experts, ungrouped=routing.groups is None)
        kernel = select("experts_down", placement, f"{experts} times {E}x{weight.I} {weight.format}", facts)
        if kernel is not None:
            return kernel.backend.experts_down(kernel.variant, h, weight, routing, rows, experts, residual, bias)
    T, C = (int(d) for d in routing.chosen.shape)
    (matrix,) = _stacks(weight, experts, 1)
    outputs = _products(h.reshape(T, C, -1), *matrix, routing.chosen)
    outputs = outputs if bias is None else outputs + bias.reshape(experts, -1)[routing.chosen]
    y = (outputs * routing.shares.unsqueeze(2)).sum(1)
    return y if residual is None else y + residual


def _reduced(
    h: Tensor, weight: PackedWeight, share: ColumnShare, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """`_weighted` of all ranks, each of which has some of the columns of h and of the weight."""
    placement, E = Placement.of(h.device), weight.O // experts
    facts = replace(product_facts(placement, weight, outputs=E), ungrouped=routing.groups is None)
    kernel = select("experts_down", placement, f"{experts} times {E}x{share.columns} {weight.format} of a rank", facts)
    if kernel is None:
        raise KernelError("tensor parallelism: no kernel adds the parts of a divided product; leave TINYVLLM_KERNELS out")
    part = kernel.backend.experts_down(kernel.variant, h, weight, routing, rows, experts, None)
    return kernel.backend.experts_all_reduce(kernel.variant, part, share.group, routing, rows, residual, bias)


def _stacks(weight: Weight, experts: int, count: int) -> list[tuple[Activations, Tensor]]:
    """The `count` matrices of each expert, float32 [X, O, I], and how x is rounded for them."""
    rows = weight.O // count
    found = []
    for activations, matrix in matrices_with_rounding(weight):
        for start in range(0, int(matrix.shape[0]), rows):
            found.append((activations, matrix[start : start + rows].reshape(experts, rows // experts, weight.I)))
    return found


def _products(x: Tensor, activations: Activations, matrices: Tensor, chosen: Tensor) -> Tensor:
    """x [T, C or 1, I] times the chosen matrices [X, O, I], transposed: float32 [T, C, O]."""
    x = rounded(x.float().reshape(-1, int(x.shape[2])), activations).reshape(*x.shape)
    return (x.unsqueeze(2) @ matrices[chosen].transpose(2, 3)).contiguous().squeeze(2)
