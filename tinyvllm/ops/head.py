"""The two ends of a model: rows of the embedding table, and logits with the most probable token of each row."""

from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor, dtypes

from tinyvllm.backends.operands import KernelTable, TensorWeight, Weight, matrices_of
from tinyvllm.backends.registry import select
from tinyvllm.ops.facts import product_facts
from tinyvllm.ops.linear import product
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import PackedWeight, RowWeight
from tinyvllm.quant.slices import RowShare

Table = Tensor | KernelTable
WIDTH = 32  # columns that kernels read rows by; a narrower table is offered to none, or a variant that is asked for would be an error


def embed(table: Table, tokens: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """Rows `tokens` [T] int32 of the table [V, E] as float32 [T, E], exactly, times `scale`; `rows` [1] int32 is how many of them count."""
    if isinstance(table, Tensor):
        return _scaled(table[tokens].float(), scale).contiguous()
    placement, shape = Placement.of(tokens.device), f"{table.O}x{table.I} {table.format}{' scaled' * (scale != 1.0)}"
    kernel = select("embed", placement, shape, replace(product_facts(placement, table), scaled=scale != 1.0))
    if kernel is not None:
        return kernel.backend.embed(kernel.variant, table, tokens, rows, scale)
    return _scaled(table.rows(tokens) if scale == 1.0 else embed(table, tokens, rows), scale).contiguous()


def table_rows(table: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Rows `ids` [T] int32 of a realized float32 table [V, E] by the embedding's kernel; the first `rows` [1] int32 count."""
    V, E = (int(n) for n in table.shape)
    if E % WIDTH:
        return table[ids].contiguous()
    placement, weight = Placement.of(ids.device), RowWeight(table, "F32", V, E)
    kernel = select("embed", placement, f"{V}x{E} F32", product_facts(placement, weight))
    return table[ids].contiguous() if kernel is None else kernel.backend.embed(kernel.variant, weight, ids, rows)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def norm_head(
    x: Tensor, norm: Norm, weight: Weight, rows: Tensor, count: Tensor, divisor: float = 1.0, cap: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [N, V] of the rows `rows` [N] int32 of x [T, E], of which the first `count` [1] count: the products divided by
    `divisor`, and with a `cap` above 0 cap * tanh(logit / cap) of them (Gemma 2, arXiv:2408.00118).

    If a kernel computes it on the way, also the token of the largest logit, int32 [N]: the lowest of equals, -1 for a row that has none (a
    NaN, or nothing above minus infinity).
    """
    if not isinstance(weight, TensorWeight):
        placement = Placement.of(x.device)
        changed = divisor != 1.0 or cap != 0.0
        shape, facts = f"{weight.O}x{weight.I} {weight.format}{' scaled or capped' * changed}", product_facts(placement, weight, norm)
        kernel = select("norm_head", placement, shape, replace(facts, scaled=divisor != 1.0, cap=cap != 0.0))
        if kernel is not None:
            logits, best = kernel.backend.norm_head(kernel.variant, x, norm, weight, rows, count, divisor, cap)
            if isinstance(weight, PackedWeight) and isinstance(weight.share, RowShare):
                return kernel.backend.gather_logits(kernel.variant, logits, weight.share, count), None
            return logits, best
        if changed:  # two logits may become equal: the largest is looked for afterwards
            return _finished(norm_head(x, norm, weight, rows, count)[0], divisor, cap).contiguous(), None
    return _finished(product(norm(x[rows]).contiguous(), weight), divisor, cap), None


def norm_products(x: Tensor, norm: Norm, weight: Weight, rows: Tensor) -> Tensor:
    """norm(x) times weight [O, I], float32 [T, O], of the first `rows` [1] int32 rows of x [T, I]: each matrix by the kernel of
    `norm_head`, whose norm has one order of sums whatever the other rows are.
    """
    if isinstance(weight, TensorWeight):
        return product(norm(x).contiguous(), weight)
    every = Tensor.arange(int(x.shape[0]), dtype=dtypes.int32, device=x.device).contiguous()
    parts = [norm_head(x, norm, part, every, rows)[0] for part in matrices_of(weight)]
    return (parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:], dim=1)).contiguous()


def _finished(logits: Tensor, divisor: float, cap: float) -> Tensor:
    logits = logits if divisor == 1.0 else logits / divisor
    return logits if cap == 0.0 else (logits / cap).tanh() * cap
