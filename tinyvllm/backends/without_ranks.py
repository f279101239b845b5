"""The methods of a backend whose devices are not divided among processes: the configuration refuses several ranks there."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.operands import NormWeights, Routing
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.placement import RankGroup
from tinyvllm.quant.slices import RowShare

_WHY = "kernels: several ranks are of the CPU only"


class WithoutRanks:
    """A base of backends without tensor and context parallelism."""

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
