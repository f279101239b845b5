"""The methods of a backend whose devices do not share a model: the configuration refuses ranks there."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.operands import NormWeights, Routing
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.quant.slices import RowShare

_WHY = "kernels: this device does not share a model"


class WithoutRanks:
    """A base of backends without tensor and context parallelism."""

    def rank_environments(self, ranks: int, share: bool) -> list[dict[str, str]]:
        raise NotImplementedError(_WHY)

    def rank_group(self, placement: Placement, rank: int, world_size: int, memory: np.ndarray, place: int, logits: int) -> RankGroup:
        raise NotImplementedError(_WHY)

    def all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, rows: Tensor, bias: Tensor | None, residual: Tensor | None,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        raise NotImplementedError(_WHY)

    def experts_all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, routing: Routing, rows: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        raise NotImplementedError(_WHY)

    def gather_logits(self, variant: str, part: Tensor, share: RowShare, count: Tensor) -> Tensor:
        raise NotImplementedError(_WHY)

    def attention_ranks(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        raise NotImplementedError(_WHY)

    def own_rows(self, variant: str, x: Tensor, group: RankGroup, rows: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(_WHY)

    def gather_rows(self, variant: str, part: Tensor, T: int, group: RankGroup, rows: Tensor) -> Tensor:
        raise NotImplementedError(_WHY)
