"""Launch plans of the Metal kernels of a mixture of experts, as plan.py has those of the others."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.backends import policies
from tinyvllm.backends.by_expert import Pairs
from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.metal import plan
from tinyvllm.backends.operands import GateClamp, RoutingPolicy
from tinyvllm.backends.shapes import Product
from tinyvllm.integers import ceil_div, round_up
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.layouts import row_bytes

ROUTED_ROWS = 4  # rows of a SIMD group of norm_route


@dataclass(frozen=True)
class Lists(Pairs):
    """Sizes of what list_experts.metal writes."""

    @property
    def task(self) -> int:
        """Pairs of a task at most, each of which costs as if they were as many: twice what an expert has on average."""
        each = min(self.T, 2 * ceil_div(self.count, self.X))
        return next((rows for rows in (1, 2, 4, 8) if each <= rows), plan.FEW)

    @property
    def tasks(self) -> int:
        return self.tasks_of(self.task)


def norm_route(variant: str, T: int, E: int, policy: RoutingPolicy, eps: str | None) -> Kernel:
    """`eps` is the norm's, None if there is none."""
    logits, each = policy.experts + policy.gated, 1 if T <= plan.FEW else 4
    return Kernel(
        "norm_route", "metal", variant,
        (("E", E), ("X", policy.experts), ("NORM", int(eps is not None)), ("EPS", eps or "0.0f"), ("EACH", each),
         ("SHARED_GATE", int(policy.gated))),
        1, 3 + (eps is not None) + policy.gated, 2 * T * E * logits, 4 * (logits * E + T * (E + logits)),
        (ceil_div(logits, 8 * each), ceil_div(T, ROUTED_ROWS), 1), 256,
    )  # fmt: skip


def choose_experts(variant: str, T: int, policy: RoutingPolicy) -> Kernel:
    defines: dict[str, Constant] = {"X": policy.experts, "C": policy.chosen, "RENORMALIZE": int(policy.renormalize)}
    return Kernel(
        "choose_experts", "metal", variant, tuple((defines | policies.routing(policy)).items()), 2 + policy.gated, 2 + (policy.bias != ""),
        T * policy.experts * policy.chosen, 4 * T * (policy.experts + 2 * policy.chosen), (T, 1, 1), 32,
    )  # fmt: skip


def list_experts(variant: str, lists: Lists) -> Kernel:
    threads = max(256, round_up(lists.X, 32))
    defines = ("X", lists.X), ("C", lists.C), ("PIECE", lists.task), ("THREADS", threads)
    return Kernel("list_experts", "metal", variant, defines, 2, 2, 0, 12 * lists.count, (1, 1, 1), threads)


def experts_gate_up(
    variant: str, format: str, lists: Lists, E: int, F: int, eps: str, bias: bool = False, half: str = "BOTH", gelu: bool = False,
    clamp: GateClamp | None = None,
) -> Kernel:  # fmt: skip
    """norm_gate_up_silu of tasks; `half` as there."""
    kernel = plan.norm_gate_up_silu(variant, format, lists.task, E, F, eps, bias, half=half)
    return _by_expert(kernel, lists, (1 + (half == "BOTH")) * F, E, format, {"SHARE": lists.C, **policies.gate(gelu, clamp)})


def experts_matvec(variant: str, p: Product, lists: Lists) -> Kernel:
    """matvec of tasks, whose x has a row for each pair."""
    return _by_expert(plan.matvec(variant, replace(p, T=lists.task)), lists, p.O, p.I, p.format, {})


def _by_expert(kernel: Kernel, lists: Lists, O: int, I: int, format: str, more: dict[str, Constant]) -> Kernel:
    return replace(
        kernel, ins=kernel.ins + 1, grid=(kernel.grid[0], lists.tasks, 1), flops=2 * lists.count * O * I,
        bytes=lists.used * O * row_bytes(format, I) + 4 * lists.count * (I + O),
        defines=(*kernel.defines, ("EXPERTS", lists.X), *more.items()),
    )  # fmt: skip


def experts_sum(variant: str, lists: Lists, E: int, residual: bool) -> Kernel:
    T, C = lists.T, lists.C
    return Kernel(
        "experts_sum", "metal", variant, (("E", E), ("C", C), ("RESIDUAL", int(residual))), 1, 3 + residual, 2 * T * C * E,
        4 * T * E * (C + 1 + residual), (T, ceil_div(E, 1024), 1), 256,
    )  # fmt: skip
