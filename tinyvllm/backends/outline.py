"""In place of a backend while a model only shows which kernels it selects: every result is an empty tensor of its shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.buffers import empty, integers
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import (
    QKV,
    AdapterStack,
    DeltaWeights,
    DrawInputs,
    GateClamp,
    History,
    KernelTable,
    KernelWeight,
    NormWeights,
    Routing,
    RoutingPolicy,
)
from tinyvllm.batch import Batch, LayerCache, StateCache
from tinyvllm.integers import ceil_div
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import PackedWeight, RowSource
from tinyvllm.quant.slices import RowShare


class Outline:
    """A `Backend` (base.py) that launches nothing."""

    name = "outline"
    layout = Layout.ROWS
    reads_few_otherwise = False
    stems: frozenset[str] = frozenset()
    variant_names: tuple[str, ...] = ()

    def open(self, placement: Placement) -> None:
        pass

    def identity(self, placement: Placement) -> str:
        return self.name

    def compile_ahead(self, kernels: Sequence[Kernel], placement: Placement) -> None:
        pass

    def variants(self, placement: Placement, stem: str | None = None) -> dict[str, str | None]:
        return {}

    def bits_of(self, variant: str) -> str | None:
        return None

    def unsupported(self, stem: str, facts: ShapeFacts) -> str | None:
        return None

    def free_memory(self, placement: Placement) -> int | None:
        return None

    def read_bandwidth(self, placement: Placement, seconds: float, nbytes: int) -> float | None:
        return None

    def rank_environments(self, ranks: int, share: bool) -> list[dict[str, str]]:
        return [{}] * ranks

    def rank_group(self, placement: Placement, rank: int, world_size: int, memory: np.ndarray, place: int, logits: int) -> RankGroup:
        return RankGroup(rank, world_size, None, place, logits)

    def embed(self, variant: str, table: KernelTable, tokens: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
        return empty(tokens, int(tokens.shape[0]), table.I)

    def norm_qkv_rope_store(
        self, variant: str, x: Tensor, norm: NormWeights, qkv: QKV, weight: KernelWeight, angles: Tensor | None, cache: LayerCache,
        batch: Batch,
    ) -> tuple[Tensor, LayerCache]:  # fmt: skip
        return empty(x, int(x.shape[0]), weight.O // cache.D - 2 * cache.K, cache.D), cache

    def append_kv(self, variant: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
        return cache

    def attention_decode(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return empty(q, int(q.shape[0]), int(q.shape[1]) * cache.value_dim)

    def attention_prefill(
        self, variant: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch,
        cap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return empty(q, int(q.shape[0]), int(q.shape[1]) * cache.value_dim)

    def matmul(
        self, variant: str, x: Tensor, weight: KernelWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        return empty(x, int(x.shape[0]), weight.O)

    def lora_bias(
        self, variant: str, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None, adapters: Tensor, rows: Tensor
    ) -> Tensor:
        return empty(x, int(x.shape[0]), int(stack.b.shape[2]))

    def gated_delta(self, variant: str, y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
        return empty(y, int(y.shape[0]), weights.shape.values)

    def attention_ranks(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return empty(q, int(q.shape[0]), int(q.shape[1]) * cache.value_dim)

    def own_rows(self, variant: str, x: Tensor, group: RankGroup, rows: Tensor) -> tuple[Tensor, Tensor]:
        return empty(x, ceil_div(int(x.shape[0]), group.world_size), int(x.shape[1])), integers(x, 1)

    def gather_rows(self, variant: str, part: Tensor, T: int, group: RankGroup, rows: Tensor) -> Tensor:
        return empty(part, T, int(part.shape[1]))

    def all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, rows: Tensor, bias: Tensor | None, residual: Tensor | None,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        return empty(part, *(int(d) for d in part.shape))

    def gather_logits(self, variant: str, part: Tensor, share: RowShare, count: Tensor) -> Tensor:
        return empty(part, int(part.shape[0]), share.all_rows)

    def gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, rows: Tensor, bias: Tensor | None, gelu: bool = False
    ) -> Tensor:
        return empty(x, int(x.shape[0]), weight.O // 2)

    def norm_route(
        self, variant: str, x: Tensor, norm: NormWeights | None, router: KernelWeight, rows: Tensor, policy: RoutingPolicy,
        bias: Tensor | None = None,
    ) -> Routing:  # fmt: skip
        T, C = int(x.shape[0]), policy.chosen
        gates = empty(x, T, 1) if policy.gated else None
        return Routing(empty(x, T, C), integers(x, T, C), (integers(x, T * C), integers(x, 1)), gates)

    def experts_gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int,
        gelu: bool = False, bias: Tensor | None = None, clamp: GateClamp | None = None,
    ) -> Tensor:  # fmt: skip
        return empty(x, int(routing.chosen.numel()), weight.O // 2 // experts)

    def experts_down(
        self, variant: str, h: Tensor, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        divided = isinstance(weight, PackedWeight) and weight.share is not None
        return empty(h, int(routing.chosen.numel() if divided else routing.chosen.shape[0]), weight.O // experts)

    def experts_all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, routing: Routing, rows: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return empty(part, int(routing.chosen.shape[0]), int(part.shape[1]))

    def list_heads(self, variant: str, T: int, H: int, rows: Tensor) -> Routing:
        return Routing(empty(rows, T * H, 1), integers(rows, T * H, 1), (integers(rows, T * H), integers(rows, 1)))

    def norm_head(
        self, variant: str, x: Tensor, norm: NormWeights, weight: KernelWeight, rows: Tensor, count: Tensor,
        divisor: float = 1.0, cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return empty(x, int(rows.shape[0]), weight.O), integers(x, int(rows.shape[0]))

    def advance(self, variant: str, batch: Batch, sampled: Tensor, history: History, block_size: int) -> None:
        pass

    def copy_blocks(self, variant: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
        return pool

    def sample(self, variant: str, logits: Tensor, draw: DrawInputs) -> Tensor:
        return integers(logits, int(logits.shape[0]))

    def pack_tiles(self, variant: str, placement: Placement, rows: RowSource, format: str, I: int) -> Tensor:
        raise NotImplementedError("kernels: packing does not belong to a step")
