"""The methods of a backend that has no kernels for low-rank adapters: its stems lack them, so the reference computes them."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.operands import AdapterStack, NormWeights


class WithoutAdapters:
    """A base of backends on which adapters are computed by the reference."""

    def lora_bias(
        self, variant: str, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None, adapters: Tensor, rows: Tensor
    ) -> Tensor:
        raise NotImplementedError("kernels: adapters have kernels on the CPU only")
