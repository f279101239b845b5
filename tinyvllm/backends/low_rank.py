"""Low-rank adapters on GPUs: what a row's adapter adds to a product, in two launches that both kinds of GPU have.

`lora_shrink` multiplies x by A, `lora_bias` that by B. One launch cannot do both: its blocks of threads cannot wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad import Tensor

from tinyvllm.backends.buffers import empty, present
from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.operands import AdapterStack, NormWeights
from tinyvllm.backends.shapes import AdapterProduct
from tinyvllm.integers import ceil_div

Launch = Callable[[Kernel, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]

FEW = 8  # rows up to which each is a unit of work: they may all have other adapters
NEIGHBOURS = 4  # rows of a unit beyond that: those of a prompt have one adapter


def plan(backend: str, variant: str, p: AdapterProduct) -> tuple[Kernel, Kernel]:
    """The two kernels. No bit of a result depends on ROWS."""
    rows, normed = 1 if p.T <= FEW else NEIGHBOURS, p.eps is not None
    units, sizes = ceil_div(p.T, rows), dict[str, Constant](R=p.R, PARTS=len(p.starts), ROWS=rows)
    shrink: dict[str, Constant] = {"E": p.I, **sizes, "NORM": int(normed), "EPS": p.eps or "0.0f"}
    expand: dict[str, Constant] = {"O": p.O, **sizes, "BIAS": int(p.bias), **p.borders}
    return (
        Kernel(
            "lora_shrink", backend, variant, tuple(shrink.items()), 1, 5 + normed, 2 * p.T * p.hidden * p.I,
            4 * (p.hidden * p.I + p.T * (p.I + p.hidden)), (units, ceil_div(p.hidden, 8), 1), 256,
        ),
        Kernel(
            "lora_bias", backend, variant, tuple(expand.items()), 1, 5 + p.bias, 2 * p.T * p.R * p.O,
            4 * (p.R * p.O + p.T * (p.hidden + p.O)), (units, ceil_div(p.O, 512), 1), 128,
        ),
    )  # fmt: skip


def lora_bias(
    launch: Launch, backend: str, variant: str, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None,
    adapters: Tensor, rows: Tensor, sum_of_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The method of `Backend`, by a backend's `launch`. `sum_of_ranks` adds what A makes of the columns that each rank has."""
    p = AdapterProduct.of(x, norm, stack, bias)
    shrink, expand = plan(backend, variant, p)
    ins = [x, *present(None if norm is None else norm.weight), stack.a, stack.ranks, adapters, rows]
    (hidden,) = launch(shrink, [empty(x, p.T, p.hidden)], ins)
    if sum_of_ranks is not None:
        hidden = sum_of_ranks(hidden)
    return launch(expand, [empty(x, p.T, p.O)], [hidden, stack.b, stack.ranks, *present(bias), adapters, rows])[0]
