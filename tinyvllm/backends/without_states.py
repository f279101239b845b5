"""The methods of a backend that has no kernels for layers with a recurrent state: its stems lack them, so the reference computes them."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.operands import DeltaWeights
from tinyvllm.batch import Batch, StateCache


class WithoutStates:
    """A base of backends on which recurrent states are computed by the reference."""

    def gated_delta(self, variant: str, y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
        raise NotImplementedError("kernels: the gated delta rule has kernels on the CPU only")
