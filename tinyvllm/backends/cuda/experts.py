"""Calls of the CUDA kernels of a mixture of experts.

Pairs of a row and one of its experts are listed by expert, each expert's in whole groups of eight places; x of every place is prepared as
for any product of many rows, and matmul.cu multiplies it by the matrices of the place's expert. One row and thousands take the same way.
"""

from __future__ import annotations

import functools

from tinygrad import Tensor

from tinyvllm.backends.buffers import constant, empty, integers, present, scratch
from tinyvllm.backends.by_expert import list_heads, sizes_of
from tinyvllm.backends.cuda import expert_plan, plan
from tinyvllm.backends.cuda.driver import counters, gpu_at
from tinyvllm.backends.cuda.launch import launch
from tinyvllm.backends.operands import GateClamp, KernelWeight, NormWeights, Routing, RoutingPolicy, packed, stored
from tinyvllm.backends.shapes import Product
from tinyvllm.quant.layouts import PackedWeight


class ExpertKernels:
    """The methods of `CudaBackend` for experts. The weights of all experts are one matrix, one expert's rows after the other's."""

    def norm_route(
        self, variant: str, x: Tensor, norm: NormWeights | None, router: KernelWeight, rows: Tensor, policy: RoutingPolicy,
        bias: Tensor | None = None,
    ) -> Routing:  # fmt: skip
        (T, E), C, weights = (int(d) for d in x.shape), policy.chosen, [part.tensor for part in stored(router).parts]
        kernel, logits, count = expert_plan.norm_route(variant, T, E, policy, None if norm is None else constant(norm.eps))
        gates = [empty(x, T, 1)] if policy.gated else []
        outs = [empty(x, T, C), integers(x, T, C), *gates, empty(x, logits), counters(x, count)]
        ins = [x, *present(None if norm is None else norm.weight), *weights, *present(bias if policy.bias else None), rows]
        shares, chosen, *others = launch(kernel, outs, ins)
        return Routing(shares, chosen, _listed(variant, chosen, rows, policy.experts), others[0] if gates else None)

    def experts_gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int,
        gelu: bool = False, bias: Tensor | None = None, clamp: GateClamp | None = None,
    ) -> Tensor:  # fmt: skip
        weight, lists = packed(weight), expert_plan.Lists(*sizes_of(routing.chosen, experts))
        product = Product(weight.format, lists.places, weight.O // 2 // experts, weight.I, bias=bias is not None, silu=True)
        kernel = expert_plan.experts_matmul(variant, product, lists, gpu_at(x), gelu, clamp)
        groups = routing.groups or _listed(variant, routing.chosen, rows, experts)
        prepared = _prepared(variant, x, weight, lists, groups, norm, lists.C)
        return launch(kernel, [empty(x, lists.count, product.O)], [prepared, weight.tensor, *present(bias), *groups])[0]

    def experts_down(
        self, variant: str, h: Tensor, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        weight, lists = packed(weight), expert_plan.Lists(*sizes_of(routing.chosen, experts))
        product = Product(weight.format, lists.places, weight.O // experts, weight.I, bias=bias is not None)
        kernel = expert_plan.experts_matmul(variant, product, lists, gpu_at(h))
        groups = routing.groups or _listed(variant, routing.chosen, rows, experts)
        prepared = _prepared(variant, h, weight, lists, groups)
        outputs = launch(kernel, [empty(h, lists.count, product.O)], [prepared, weight.tensor, *present(bias), *groups])[0]
        if weight.share is not None:
            return outputs
        kernel = expert_plan.experts_sum(variant, lists, product.O, residual is not None)
        return launch(kernel, [empty(h, lists.T, product.O)], [outputs, routing.shares, *present(residual), rows])[0]

    def list_heads(self, variant: str, T: int, H: int, rows: Tensor) -> Routing:
        return list_heads(T, H, rows, functools.partial(_listed, variant))


def _listed(variant: str, chosen: Tensor, rows: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The pairs by expert: `order` and `tasks` of list_experts.cu."""
    lists = expert_plan.Lists(*sizes_of(chosen, experts))
    outs = [integers(chosen, lists.places), integers(chosen, 2 + 3 * lists.tasks)]
    order, tasks = launch(expert_plan.list_experts(variant, lists), outs, [chosen, rows])
    return order, tasks


def _prepared(
    variant: str, x: Tensor, weight: PackedWeight, lists: expert_plan.Lists, groups: tuple[Tensor, Tensor],
    norm: NormWeights | None = None, share: int = 1,
) -> Tensor:  # fmt: skip
    """x of each place, normed and rounded for a product with `weight`; a row of x for `share` pairs."""
    order, tasks = groups
    kernel = expert_plan.gathered(variant, weight.format, lists, weight.I, None if norm is None else constant(norm.eps), share)
    out = scratch(x, plan.prepared_bytes(weight.format, lists.places, weight.I))
    return launch(kernel, [out], [x, *present(None if norm is None else norm.weight), order, tasks])[0]
