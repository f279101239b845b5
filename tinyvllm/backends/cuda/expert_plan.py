"""Launch plans of the CUDA kernels of a mixture of experts, as plan.py has those of the others."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.backends import policies
from tinyvllm.backends.by_expert import Pairs
from tinyvllm.backends.cuda import plan
from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.operands import GateClamp, RoutingPolicy
from tinyvllm.backends.shapes import Product
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.layouts import panel_bytes

GROUP = 8  # places of a group
ROUTED_ROWS = 4  # rows that a thread block of norm_route chooses for


@dataclass(frozen=True)
class Lists(Pairs):
    """Sizes of what list_experts.cu writes."""

    @property
    def places(self) -> int:
        """Places of all experts at most, a multiple of GROUP."""
        return (self.count + (GROUP - 1) * self.used) // GROUP * GROUP

    @property
    def task(self) -> int:
        """Places of a task at most: about what an expert has."""
        each = ceil_div(self.count, self.X)
        return next((places for places in (16, 32, 64) if each <= places), 128)

    @property
    def tasks(self) -> int:
        return self.tasks_of(self.task)


def norm_route(variant: str, T: int, E: int, policy: RoutingPolicy, eps: str | None) -> tuple[Kernel, int, int]:
    """The kernel, float32 numbers of its scratch, and counters (zeros); `eps` is the norm's, None if there is none."""
    logits, tiles = policy.experts + policy.gated, ceil_div(T, ROUTED_ROWS)
    each = 1 if T <= plan.FEW else 4  # few rows are bound by reading the router, which more warps do faster
    ins = 3 + (eps is not None) + policy.gated + (policy.bias != "")
    kernel = Kernel.cuda(
        "norm_route", variant, 4 + policy.gated, ins, (ceil_div(logits, 8 * each), tiles, 1), 256, 0,
        2 * T * E * logits, 4 * (logits * E + T * (E + logits + 2 * policy.chosen)),
        E=E, X=policy.experts, C=policy.chosen, NORM=int(eps is not None), EPS=eps or "0.0f", EACH=each,
        RENORMALIZE=int(policy.renormalize), **policies.routing(policy),
    )  # fmt: skip
    return kernel, T * logits, tiles


def list_experts(variant: str, lists: Lists) -> Kernel:
    threads = 256 if lists.X <= 256 else 512 if lists.X <= 512 else 1024
    return Kernel.cuda(
        "list_experts", variant, 2, 2, (1, 1, 1), threads, bytes=4 * (2 * lists.count + lists.places),
        X=lists.X, C=lists.C, TASK=lists.task // GROUP,
    )  # fmt: skip


def gathered(variant: str, format: str, lists: Lists, I: int, eps: str | None = None, share: int = 1) -> Kernel:
    """The rows of x of every place, rounded for a product; `share` pairs have one row."""
    kernel = plan.quantize_input(variant, format, lists.places, I, eps, gather=True)
    return kernel if share == 1 else replace(kernel, defines=(*kernel.defines, ("SHARE", share)))


def experts_matmul(
    variant: str, p: Product, lists: Lists, gpu: plan.GPU, gelu: bool = False, clamp: GateClamp | None = None
) -> Kernel:  # fmt: skip
    """The product of prepared places with the matrices of their experts, each as `p` says; with `silu` the gate is gelu's or clamped."""
    cut = plan.cut_of_experts(p.rows, lists.places, lists.task, p.I, p.format, p.silu, gpu)
    kernel, _, _ = plan.matmul(variant, replace(p, T=lists.places), gpu, (cut, 1))
    tiles = lists.tasks * (lists.task // cut.tile_t)
    more: dict[str, Constant] = {"EXPERTS": lists.X, "TASK": lists.task // GROUP} | policies.gate(gelu, clamp)
    return replace(
        kernel, ins=kernel.ins + 1, grid=(ceil_div(p.rows, cut.tile_o) * tiles, 1, 1), defines=(*kernel.defines, *more.items()),
        flops=2 * lists.count * p.rows * p.I,
        bytes=panel_bytes(p.format, lists.used * p.rows, p.I) + plan.prepared_bytes(p.format, lists.places, p.I) + 4 * lists.count * p.O,
    )  # fmt: skip


def experts_sum(variant: str, lists: Lists, E: int, residual: bool, bias: bool = False) -> Kernel:
    """The sum of each row's pairs; with `bias` that of each pair's expert is added before its share."""
    T, C = lists.T, lists.C
    return Kernel.cuda(
        "experts_sum", variant, 1, 3 + residual + 2 * bias, (T, ceil_div(E, 1024), 1), 256, 0, 2 * T * C * E,
        4 * T * E * (C * (1 + bias) + 1 + residual), E=E, C=C, RESIDUAL=int(residual), **policies.bias(bias),
    )  # fmt: skip
