"""The two ends of a model: rows of the embedding table, and logits with the most probable token of each row."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.base import calls_of
from tinyvllm.backends.registry import select
from tinyvllm.ops.linear import TensorWeight, Weight, product
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import PackedWeight, RowWeight

Table = Tensor | RowWeight | PackedWeight


def embed(table: Table, tokens: Tensor, rows: Tensor) -> Tensor:
    """Rows `tokens` [T] int32 of the table [V, E] as float32 [T, E], exactly; `rows` [1] int32 says how many of them count."""
    if isinstance(table, Tensor):
        return table[tokens].float().contiguous()
    calls = calls_of(str(tokens.device))
    row = select("embed", Placement.of(tokens.device), f"{table.O}x{table.I} {table.format}", calls.refuses_table(table))
    return table.rows(tokens).contiguous() if row is None else calls.embed(row, table, tokens, rows)


def norm_head(x: Tensor, norm: Norm, weight: Weight, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [N, V] of the rows `rows` [N] int32 of x [T, E], of which the first `count` [1] count.

    With them, where a kernel computes it on the way, the token of the largest logit, int32 [N]: the lowest of equals, -1 for a row that
    has none (a NaN, or nothing above minus infinity).
    """
    if not isinstance(weight, TensorWeight):
        calls = calls_of(str(x.device))
        row = select("norm_head", Placement.of(x.device), f"{weight.O}x{weight.I} {weight.format}", calls.refuses_head(weight, norm))
        if row is not None:
            return calls.norm_head(row, x, norm, weight, rows, count)
    return product(norm(x[rows]).contiguous(), weight), None
