"""What a backend is: all that ops, the registry and the runner know of one kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from tinygrad import Tensor

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
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import RowSource
from tinyvllm.quant.slices import RowShare


class Backend(Protocol):
    """Hand-written kernels of one kind of device: which variants there are, which shapes they support, and one method an op.

    name            as in messages and folders: "cpu", "cuda", "metal"
    layout          how its kernels read the weights of products
    stems           the ops that it has kernels for
    variant_names   every variant that it has on any machine
    reads_few_otherwise  whether the decodes of a few sequences that share no blocks have another kernel of attention

    The method of an op launches the kernels of `variant` (a name from `variants`) and returns their results; the caller has checked that
    `unsupported` has no objection. What an op computes, and the shapes of its arguments, is in tinyvllm/ops.
    """

    name: str
    layout: Layout
    reads_few_otherwise: bool

    @property
    def stems(self) -> frozenset[str]: ...

    @property
    def variant_names(self) -> tuple[str, ...]: ...

    def open(self, placement: Placement) -> None:
        """Open the device in tinygrad and install the backend's graph and copies; raises what tinygrad raises if it cannot be opened."""

    def variants(self, placement: Placement, stem: str | None = None) -> dict[str, str | None]:
        """Kernel variants at a placement, best first, each with what this machine lacks for it, or None.

        With `stem`, also those that only this op has.
        """
        ...

    def identity(self, placement: Placement) -> str:
        """Device, driver and compiler in words: what decides whether a kernel of one text computes the same as before."""
        ...

    def compile_ahead(self, kernels: Sequence[Kernel], placement: Placement) -> None:
        """Start to compile in the background; the launch waits for what it needs, and raises what its compiler said."""

    def bits_of(self, variant: str) -> str | None:
        """Another variant that computes few rows for this one, and whose bits this one promises to have: the self-test compares them. None
        if there is none.
        """
        ...

    def unsupported(self, stem: str, facts: ShapeFacts) -> str | None:
        """Why the op's kernels cannot run a shape, or None if they can."""

    def free_memory(self, placement: Placement) -> int | None:
        """Bytes that may be allocated on the device; None if it uses the host's memory."""

    def read_bandwidth(self, placement: Placement, seconds: float, nbytes: int) -> float | None:
        """Bytes per second that a kernel reads from the device's memory, the best pass over `nbytes` within `seconds`.

        None if the host's bandwidth is used for the device.
        """

    def rank_group(self, placement: Placement, rank: int, world_size: int, memory: np.ndarray, place: int, logits: int) -> RankGroup:
        """Rank `rank` among `world_size`, which meet in `memory`, uint8: memory of the host that all of them have mapped, whole pages. It
        has room for `place` float32 of each rank, twice, and after them for `logits`. Errors of the driver.
        """
        ...

    def rank_environments(self, ranks: int, share: bool) -> list[dict[str, str]]:
        """What the environment of each rank's process has, so that it finds the device that is its own as the first. ArgumentError where
        there are fewer devices than ranks, unless they `share` them.
        """
        ...

    def embed(self, variant: str, table: KernelTable, tokens: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor: ...

    def norm_qkv_rope_store(
        self, variant: str, x: Tensor, norm: NormWeights, qkv: QKV, weight: KernelWeight, angles: Tensor | None, cache: LayerCache,
        batch: Batch,
    ) -> tuple[Tensor, LayerCache]: ...  # fmt: skip

    def append_kv(self, variant: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache: ...

    def attention_decode(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, H * D], of which the rows of the decodes are written. Blocks that `batch.shared_prefix_lens` names are read once."""
        ...

    def attention_prefill(
        self, variant: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch,
        cap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`out` [T, H * D], or a new tensor, with the rows of the chunks written."""
        ...

    def attention_ranks(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, H * D] of all rows, over a cache whose `ranks` divide contexts."""
        ...

    def matmul(
        self, variant: str, x: Tensor, weight: KernelWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor: ...  # fmt: skip

    def lora_bias(
        self, variant: str, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None, adapters: Tensor, rows: Tensor
    ) -> Tensor: ...

    def gated_delta(self, variant: str, y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor: ...

    def all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, rows: Tensor, bias: Tensor | None, residual: Tensor | None,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """[T, O]: the sum of all ranks' parts [T, O] in the tree of quant/slices.py, and then what `matmul` does with its sums."""
        ...

    def gather_logits(self, variant: str, part: Tensor, share: RowShare, count: Tensor) -> Tensor:
        """[N, V]: the logits of all ranks, each of which has some columns; undefined but in rank 0."""
        ...

    def own_rows(self, variant: str, x: Tensor, group: RankGroup, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of x [T, N] that a rank computes alone, [ceil(T / ranks), N], and how many of them count, [1] int32."""
        ...

    def gather_rows(self, variant: str, part: Tensor, T: int, group: RankGroup, rows: Tensor) -> Tensor:
        """[T, N]: the rows of all ranks in their order."""
        ...

    def gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, rows: Tensor, bias: Tensor | None, gelu: bool = False
    ) -> Tensor: ...

    def norm_route(
        self, variant: str, x: Tensor, norm: NormWeights | None, router: KernelWeight, rows: Tensor, policy: RoutingPolicy,
        bias: Tensor | None = None,
    ) -> Routing: ...  # fmt: skip

    def experts_gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int,
        gelu: bool = False, bias: Tensor | None = None, clamp: GateClamp | None = None,
    ) -> Tensor:  # fmt: skip
        """[T * C, F]: of each pair of a row and one of its experts."""
        ...

    def experts_down(
        self, variant: str, h: Tensor, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, E]; of a rank's columns the outputs of each pair, [T * C, E], without shares."""
        ...

    def experts_all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, routing: Routing, rows: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """[T, E]: the sum over a row's experts of share * (all ranks' parts [T * C, E] + bias [X E]), plus residual."""
        ...

    def list_heads(self, variant: str, T: int, H: int, rows: Tensor) -> Routing:
        """The routing of `experts_down` for T H rows of which row t H + h has head h alone, with a share of 1; the first `rows` T count."""
        ...

    def norm_head(
        self, variant: str, x: Tensor, norm: NormWeights, weight: KernelWeight, rows: Tensor, count: Tensor,
        divisor: float = 1.0, cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def advance(self, variant: str, batch: Batch, sampled: Tensor, history: History, block_size: int) -> None: ...

    def copy_blocks(self, variant: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor: ...

    def sample(self, variant: str, logits: Tensor, draw: DrawInputs) -> Tensor: ...

    def pack_tiles(self, variant: str, placement: Placement, rows: RowSource, format: str, I: int) -> Tensor:
        """The matrix [O, I] in tiles of `format`, realized, uint8 [panel_bytes]: its rows are uploaded as they are and packed there.

        Rows in another float format are converted on the way, to nearest; FloatingPointError if a finite number is beyond `format`.
        On return the rows have been read; the device may still be packing.
        """
        ...
