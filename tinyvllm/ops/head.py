"""The two ends of a model: rows of the embedding table, and logits with the most probable token of each row."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinyvllm.ops.kernel import Kernel
from tinyvllm.ops.launch import launch
from tinyvllm.ops.linear import Weight, constant, empty, prepared_bytes, product, refused_width, scratch
from tinyvllm.ops.norm import Norm
from tinyvllm.ops.registry import pick
from tinyvllm.ops.weight import PackedWeight, RowWeight, panel_bytes, row_bytes

Table = Tensor | RowWeight | PackedWeight


def embed(table: Table, tokens: Tensor, rows: Tensor) -> Tensor:
    """Rows `tokens` [T] int32 of the table [V, E] as float32 [T, E], exactly; `rows` [1] int32 says how many of them count."""
    if isinstance(table, Tensor):
        return table[tokens].float().contiguous()
    row = pick("embed", str(tokens.device), f"{table.O}x{table.I} {table.format}", refused_width(table.I))
    if row is None:
        return table.rows(tokens).contiguous()
    T, E = int(tokens.shape[0]), table.I
    panels, work = int(isinstance(table, PackedWeight)), T * (row_bytes(table.format, E) + 4 * E)
    kernel = Kernel.cpu("embed", row, 1, 3, bytes=work, E=E, V=table.O, WEIGHT=table.format, PANELS=panels)
    return launch(kernel, [empty(tokens, T, E)], [table.tensor, tokens, rows])[0]


def norm_head(x: Tensor, norm: Norm, weight: Weight, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [N, V] of the rows `rows` [N] int32 of x [T, E], of which the first `count` [1] count.

    With them, where a kernel computes it on the way, the token of the largest logit, int32 [N]: the lowest of equals, -1 for a row that
    has none (a NaN, or nothing above minus infinity).
    """
    if isinstance(weight, PackedWeight):
        picked = pick("norm_head", str(x.device), f"{weight.O}x{weight.I} {weight.format}", refused_width(weight.I))
        if picked is not None:
            return _norm_head(picked, x, norm, weight, rows, count)
    return product(norm(x[rows]).contiguous(), weight), None


def _norm_head(row: str, x: Tensor, norm: Norm, weight: PackedWeight, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    N, V, E = int(rows.shape[0]), weight.O, weight.I
    ins = [x, norm.weight, *([norm.bias] if norm.bias is not None else []), weight.tensor, rows, count]
    kernel = Kernel.cpu(
        "norm_head", row, 3, len(ins), 2 * N * V * E, panel_bytes(weight.format, V, E) + 4 * N * (V + E),
        E=E, V=V, WEIGHT=weight.format, NORM=norm.kind, EPS=constant(norm.eps),
    )  # fmt: skip
    best = Tensor.empty(N, dtype=dtypes.int32, device=x.device)
    logits, best, _ = launch(kernel, [empty(x, N, V), best, scratch(x, prepared_bytes(weight.format, N, E))], ins)
    return logits, best
