"""Calls of the CPU kernels of layers with a recurrent state."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.buffers import constant, empty
from tinyvllm.backends.cpu.launch import launch
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.operands import DeltaWeights
from tinyvllm.batch import Batch, StateCache


class StateKernels:
    """The methods of `CpuBackend` for recurrent states."""

    def gated_delta(self, variant: str, y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
        assert batch.states is not None
        s, T, B = weights.shape, int(y.shape[0]), int(batch.states.shape[0])
        ins = [y, weights.taps, weights.decay, weights.shift, weights.norm, batch.states, batch.positions, batch.query_starts]
        kernel = Kernel.cpu(
            "gated_delta", variant, 3, len(ins) + 2, 8 * T * s.value_heads * s.key_dim * s.value_dim,
            4 * (2 * B * s.state + T * (s.width + s.values)), DRAFTS=cache.drafts,
            KH=s.key_heads, VH=s.value_heads, DK=s.key_dim, DV=s.value_dim, TAPS=s.taps, TILED=int(s.tiled), EPS=constant(weights.eps),
        )  # fmt: skip
        scratch = empty(y, T, s.channels + 2 * s.value_heads + s.key_heads)
        return launch(kernel, [empty(y, T, s.values), scratch, cache.states], [*ins, batch.decodes, batch.chunks])[0]
