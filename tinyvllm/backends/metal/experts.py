"""Calls of the Metal kernels of a mixture of experts.

Pairs of a row and one of its experts are listed by expert and cut into tasks of up to sixteen, which the kernels for few rows multiply:
one row and thousands take the same way, with the same bits.
"""

from __future__ import annotations

import functools

from tinygrad import Tensor

from tinyvllm.backends.buffers import constant, empty, integers, present
from tinyvllm.backends.by_expert import list_heads, sizes_of
from tinyvllm.backends.metal import expert_plan
from tinyvllm.backends.metal.launch import launch
from tinyvllm.backends.metal.parts import each_bias, halves, tensors_of
from tinyvllm.backends.metal.unusable import WithUnusable, of_op
from tinyvllm.backends.operands import GateClamp, KernelWeight, NormWeights, Routing, RoutingPolicy, stored
from tinyvllm.backends.shapes import Product


class ExpertKernels(WithUnusable):
    """The methods of `MetalBackend` for experts. The weights of all experts are one matrix, one expert's rows after the other's."""

    @of_op("norm_route")
    def norm_route(
        self, variant: str, x: Tensor, norm: NormWeights | None, router: KernelWeight, rows: Tensor, policy: RoutingPolicy,
        bias: Tensor | None = None,
    ) -> Routing:  # fmt: skip
        (T, E), C = (int(d) for d in x.shape), policy.chosen
        kernel = expert_plan.norm_route(variant, T, E, policy, None if norm is None else constant(norm.eps))
        ins = [x, *present(None if norm is None else norm.weight), *tensors_of(stored(router)), rows]
        logits = launch(kernel, [empty(x, T, policy.experts + policy.gated)], ins)[0]
        gates = [empty(x, T, 1)] if policy.gated else []
        ins = [logits, *present(bias if policy.bias else None), rows]
        shares, chosen, *gates = launch(
            expert_plan.choose_experts(variant, T, policy), [empty(x, T, C), integers(x, T, C), *gates], ins
        )  # fmt: skip
        return Routing(shares, chosen, _listed(variant, chosen, rows, policy.experts), gates[0] if gates else None)

    @of_op("experts_gate_up_silu")
    def experts_gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int,
        gelu: bool = False, bias: Tensor | None = None, clamp: GateClamp | None = None,
    ) -> Tensor:  # fmt: skip
        assert norm is not None, "limits.py"
        weight, lists = stored(weight), expert_plan.Lists(*sizes_of(routing.chosen, experts))
        E, F = weight.I, weight.O // 2 // experts
        out, groups = empty(x, lists.count, F), routing.groups or _listed(variant, routing.chosen, rows, experts)
        for half, part, own in halves(weight, each_bias(bias, weight)):
            kernel = expert_plan.experts_gate_up(
                variant, part.format, lists, E, F, constant(norm.eps), bias is not None, half, gelu, clamp
            )  # fmt: skip
            out = launch(kernel, [out], [x, norm.weight, *tensors_of(part), *own, *groups])[0]
        return out

    @of_op("experts_down")
    def experts_down(
        self, variant: str, h: Tensor, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        weight, lists = stored(weight), expert_plan.Lists(*sizes_of(routing.chosen, experts))
        product = Product(weight.format, lists.task, weight.O // experts, weight.I, bias=bias is not None)
        groups = routing.groups or _listed(variant, routing.chosen, rows, experts)
        ins = [h, *tensors_of(weight), *present(bias), *groups]
        outputs = launch(expert_plan.experts_matvec(variant, product, lists), [empty(h, lists.count, product.O)], ins)[0]
        kernel = expert_plan.experts_sum(variant, lists, product.O, residual is not None)
        return launch(kernel, [empty(h, lists.T, product.O)], [outputs, routing.shares, *present(residual), rows])[0]

    def list_heads(self, variant: str, T: int, H: int, rows: Tensor) -> Routing:
        return list_heads(T, H, rows, functools.partial(_listed, variant))


def _listed(variant: str, chosen: Tensor, rows: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The pairs by expert: `order` and `tasks` of list_experts.metal."""
    lists = expert_plan.Lists(*sizes_of(chosen, experts))
    outs = [integers(chosen, lists.count), integers(chosen, 1 + 3 * lists.tasks)]
    order, tasks = launch(expert_plan.list_experts(variant, lists), outs, [chosen, rows])
    return order, tasks
