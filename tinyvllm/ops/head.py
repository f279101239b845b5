"""The two ends of a model: rows of the embedding table, and logits with the most probable token of each row."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.operands import KernelTable, TensorWeight, Weight
from tinyvllm.backends.registry import select
from tinyvllm.ops.facts import product_facts
from tinyvllm.ops.linear import product
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement

Table = Tensor | KernelTable


def embed(table: Table, tokens: Tensor, rows: Tensor) -> Tensor:
    """Rows `tokens` [T] int32 of the table [V, E] as float32 [T, E], exactly; `rows` [1] int32 is how many of them count."""
    if isinstance(table, Tensor):
        return table[tokens].float().contiguous()
    placement = Placement.of(tokens.device)
    kernel = select("embed", placement, f"{table.O}x{table.I} {table.format}", product_facts(placement, table))
    return table.rows(tokens).contiguous() if kernel is None else kernel.backend.embed(kernel.variant, table, tokens, rows)


def norm_head(x: Tensor, norm: Norm, weight: Weight, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [N, V] of the rows `rows` [N] int32 of x [T, E], of which the first `count` [1] count.

    If a kernel computes it on the way, also the token of the largest logit, int32 [N]: the lowest of equals, -1 for a row that has none (a
    NaN, or nothing above minus infinity).
    """
    if not isinstance(weight, TensorWeight):
        placement = Placement.of(x.device)
        shape, facts = f"{weight.O}x{weight.I} {weight.format}", product_facts(placement, weight, norm)
        kernel = select("norm_head", placement, shape, facts)
        if kernel is not None:
            return kernel.backend.norm_head(kernel.variant, x, norm, weight, rows, count)
    return product(norm(x[rows]).contiguous(), weight), None
