"""The gated delta rule on GPUs, in two launches that both kinds of GPU have.

`gated_delta` goes through the rows of each sequence with a part of a state in registers, `delta_norm` norms what its thread blocks have
computed of a head together, and replaces the rows that the first launch reads of the states. With drafts the first says how many accepted
ones each state lacked, since the second replaces the number of tokens from which that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad import Tensor

from tinyvllm.backends.buffers import constant, empty, integers
from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.operands import DeltaShape, DeltaWeights
from tinyvllm.batch import Batch, StateCache
from tinyvllm.integers import ceil_div

Launch = Callable[[Kernel, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]

MAX_KEY_DIM = 256  # features of a key head: a lane has a quarter of them in registers


def plan(backend: str, variant: str, s: DeltaShape, T: int, B: int, eps: str, drafts: int = 0) -> tuple[Kernel, Kernel]:
    """The two kernels for T rows of B sequences, of which slots keep up to `drafts` drafts. CUDA's text depends on neither T nor B."""
    warps = 4 if s.value_dim % 32 == 0 else 2  # of eight columns each
    sizes: dict[str, Constant] = dict(
        KH=s.key_heads, VH=s.value_heads, DK=s.key_dim, DV=s.value_dim, TAPS=s.taps, TILED=int(s.tiled), DRAFTS=drafts
    )
    held, groups = s.value_heads * s.key_dim * s.value_dim, ceil_div(s.value_heads, 8)
    rule, norm = sizes | {"WARPS": warps}, sizes | {"EPS": eps}
    metal: dict[str, Constant] = {} if backend == "cuda" else {"T": T, "GROUPS": groups}
    return (
        Kernel(
            "gated_delta", backend, variant, tuple(rule.items()), 2 + bool(drafts), 9, 8 * T * held,
            4 * (2 * B * held + T * (s.channels + s.values)), (s.value_dim // (8 * warps), s.value_heads, B), 32 * warps,
        ),
        Kernel(
            "delta_norm", backend, variant, tuple((norm | metal).items()), 2, 7 + bool(drafts), 8 * T * s.values,
            4 * (3 * T * s.values + 2 * B * (s.state - held)), (T + B, groups, 1), 256, integers=() if metal else (T,),
        ),
    )  # fmt: skip


def gated_delta(launch: Launch, backend: str, variant: str, y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
    """The method of `Backend`, by a backend's `launch`."""
    assert batch.states is not None
    s, T, B = weights.shape, int(y.shape[0]), int(batch.states.shape[0])
    rule, norm = plan(backend, variant, s, T, B, constant(weights.eps), cache.drafts)
    rows = [batch.states, batch.positions, batch.query_starts, batch.decodes, batch.chunks]
    counts = [integers(y, B)] if cache.drafts else []
    ins = [y, weights.taps, weights.decay, weights.shift, *rows]
    out, states, *taken = launch(rule, [empty(y, T, s.values), cache.states, *counts], ins)
    return launch(norm, [out, states], [y, weights.norm, *taken, *rows])[0]
