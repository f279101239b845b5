"""The methods of a backend that has no kernels for mixtures of experts: its stems lack them, so the reference computes them."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.operands import GateClamp, KernelWeight, NormWeights, Routing, RoutingPolicy

_WHY = "kernels: experts have kernels on the CPU and on CUDA only"


class WithoutExperts:
    """A base of backends on which experts are computed by the reference."""

    def norm_route(
        self, variant: str, x: Tensor, norm: NormWeights | None, router: KernelWeight, rows: Tensor, policy: RoutingPolicy,
        bias: Tensor | None = None,
    ) -> Routing:  # fmt: skip
        raise NotImplementedError(_WHY)

    def experts_gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int,
        gelu: bool = False, bias: Tensor | None = None, clamp: GateClamp | None = None,
    ) -> Tensor:  # fmt: skip
        raise NotImplementedError(_WHY)

    def experts_down(
        self, variant: str, h: Tensor, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        raise NotImplementedError(_WHY)

    def list_heads(self, variant: str, T: int, H: int, rows: Tensor) -> Routing:
        raise NotImplementedError(_WHY)
