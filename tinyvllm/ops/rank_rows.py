"""Rows of a prompt that ranks divide among them: each computes its own, and all get the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tinygrad import Tensor

from tinyvllm.backends.registry import first_variant
from tinyvllm.batch import Batch
from tinyvllm.placement import Placement, RankGroup


def after_attention(
    layer: Callable[[Tensor, Tensor, Batch], Tensor], x: Tensor, attended: Tensor, batch: Batch, group: RankGroup | None
) -> Tensor:
    """layer(x, attended, batch), float32 [T, N], for the rows x [T, N] of the residual stream and what they attend to, [T, M]: the rest of
    a layer, each of whose rows is computed alone.

    Of a step with prompts each rank computes its own rows, by a batch that counts these. Decodes take as long as their weights are read,
    for one row or for all. N and M are multiples of 16.
    """
    if group is None or batch.num_chunks == 0:
        return layer(x, attended, batch)
    kernel = first_variant(Placement.of(x.device))
    backend, variant = kernel.backend, kernel.variant
    (x_own, count), (attended_own, _) = (backend.own_rows(variant, each.contiguous(), group, batch.rows) for each in (x, attended))
    y = layer(x_own, attended_own, replace(batch, rows=count))
    return backend.gather_rows(variant, y, int(x.shape[0]), group, batch.rows)
