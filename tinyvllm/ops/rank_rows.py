"""Rows of a prompt that ranks divide among them: each computes its own, and all get the results."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.base import Backend
from tinyvllm.backends.registry import backend_for, usable_variants
from tinyvllm.batch import Batch
from tinyvllm.placement import Placement, RankGroup


def divides_rows(batch: Batch, group: RankGroup | None) -> bool:
    """Whether each rank computes some of the rows: of a step with prompts. Decodes take as long as their weights are read, for one row or
    for all.
    """
    return group is not None and batch.num_chunks > 0


def own_rows(x: Tensor, rows: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
    """The rows of x [T, N] float32 that are this rank's, [ceil(T / ranks), N], of which a count [1] int32 counts. `rows` [1] int32 is how
    many rows of x count. N is a multiple of 16.
    """
    backend, variant = _kernels(x)
    return backend.own_rows(variant, x, group, rows)


def gather_rows(part: Tensor, T: int, rows: Tensor, group: RankGroup) -> Tensor:
    """The rows of all ranks, [T, N] float32, of which each has its own; undefined after the first `rows` [1] int32."""
    backend, variant = _kernels(part)
    return backend.gather_rows(variant, part, T, group, rows)


def _kernels(x: Tensor) -> tuple[Backend, str]:
    placement = Placement.of(x.device)
    backend = backend_for(placement)
    assert backend is not None, "ranks are of the CPU"
    return backend, usable_variants(placement)[0]
