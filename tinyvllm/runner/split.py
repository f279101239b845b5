"""Which part of each tensor a rank has: heads, slices of the MLP, rows of the head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tinyvllm.config import EngineConfig
from tinyvllm.distributed.memory import Layout, SharedMemory
from tinyvllm.errors import ModelError
from tinyvllm.models.config import ModelConfig
from tinyvllm.placement import RankGroup
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.slices import ALL_SLICES, BLOCK, ColumnShare, RowShare, slice_columns, slice_unit
from tinyvllm.runner.prepare import power_bucket
from tinyvllm.weights.memory import place_bytes

PANEL = 16
_GATES = frozenset(f"ffn_{half}{kind}" for half in ("gate", "up") for kind in ("", "_exps", "_shexp"))  # whose rows are divided in slices
_SUMMED = frozenset(("attn_output", *(f"ffn_down{kind}" for kind in ("", "_exps", "_shexp"))))  # whose columns are divided
ATTENTION_PLACE = 1 << 20  # 4 MiB: more would leave the caches between two ranks


def rank_group(memory: SharedMemory, rank: int) -> RankGroup:
    layout = memory.layout
    place = place_bytes(memory.group(layout.stage(rank)), "CPU")
    return RankGroup(rank % layout.world_size, layout.world_size, place, layout.place, layout.logits)


def shared_layout(config: EngineConfig, model: ModelConfig) -> Layout:
    """Room for the largest step; pages take memory once they are written."""
    tensor, context, stages = config.tensor_parallel_size, config.context_parallel_size, config.pipeline_parallel_size
    rows = max_rows(config)
    width = -(-(config.max_model_len or model.max_context) // config.block_size)
    place, logits = (max(rows, model.num_experts_per_tok) * model.dim, rows * model.vocab_size) if tensor > 1 else (0, 0)
    if context > 1:
        place = max(_attention_place(model, width, rows), -(-rows // context) * model.dim)
    return Layout(tensor * context, stages, place, logits, rows * model.dim if stages > 1 else 0, rows * (width + 8) + 1024)


def _attention_place(model: ModelConfig, width: int, rows: int) -> int:
    """float32 of the results of a rank's partitions for as many of `rows` rows as fit ATTENTION_PLACE, but at least for one.

    A table is `width` blocks, in each of which a rank has one partition (kernels/cpu/attention_ranks.c).
    """
    value_dim = model.latent.rank if model.latent else model.head_dim
    one = width * model.n_heads * (value_dim + 2)
    return -(-one * max(1, min(rows, ATTENTION_PLACE // one)) // PANEL) * PANEL


def max_rows(config: EngineConfig) -> int:
    """Rows of the largest step."""
    return 2 * power_bucket(max(config.max_num_batched_tokens, config.max_num_seqs), 16)


@dataclass(frozen=True)
class RowPart:
    """`rows` of each of `matrices` matrices of as many rows, one after the other: those of all experts are one tensor."""

    rows: slice
    matrices: int = 1

    @property
    def count(self) -> int:
        return self.matrices * len(range(self.rows.start, self.rows.stop))

    def of(self, array: Any) -> Any:
        """These rows of an array or tensor [rows of all matrices, ...]; of one matrix a view."""
        if self.matrices == 1:
            return array[self.rows.start : self.rows.stop]
        rest = array.shape[1:]
        return array.reshape(self.matrices, -1, *rest)[:, self.rows.start : self.rows.stop].reshape(-1, *rest)


@dataclass(frozen=True, eq=False)
class Split:
    """The part of one rank of a model of this configuration, which is that of the whole model."""

    config: ModelConfig
    group: RankGroup

    def __post_init__(self) -> None:
        c, world = self.config, self.group.world_size
        if reason := _undivided(c):
            raise ModelError(f"tensor_parallel_size={world}: models with {reason} are not divided yet; leave it out")
        if c.n_heads % world or (c.n_kv_heads % world and world % c.n_kv_heads):
            raise ModelError(
                f"tensor_parallel_size={world}: {c.n_heads} query heads and {c.n_kv_heads} key/value heads cannot be divided; use fewer"
            )

    @property
    def local(self) -> ModelConfig:
        """The configuration of the rank's heads."""
        world = self.group.world_size
        return replace(self.config, n_heads=self.config.n_heads // world, n_kv_heads=max(1, self.config.n_kv_heads // world))

    @property
    def _slices(self) -> tuple[int, int]:
        count = ALL_SLICES // self.group.world_size
        return self.group.rank * count, count

    def rows(self, name: str, rows: int, down_format: str) -> RowPart:
        """Those of a matrix, or the numbers of a vector, of this name, with `rows` in all; `down_format` is that of the second matrix."""
        c, rank, world = self.config, self.group.rank, self.group.world_size
        part = name.split(".")[-2]
        if part in ("attn_q", "attn_sinks"):
            heads, size = c.n_heads // world, c.head_dim if part == "attn_q" else 1
            return RowPart(slice(rank * heads * size, (rank + 1) * heads * size))
        if part in ("attn_k", "attn_v"):
            heads = max(1, c.n_kv_heads // world)
            first = rank * c.n_kv_heads // world
            return RowPart(slice(first * c.head_dim, (first + heads) * c.head_dim))
        if part in _GATES:
            matrices = c.num_experts if part.endswith("_exps") else 1
            return RowPart(self._features(name, down_format, rows // matrices), matrices)
        return RowPart(slice(0, rows))

    def head_rows(self, rows: int) -> slice:
        """The rows of the head: whole panels."""
        panels, rank, world = -(-rows // PANEL), self.group.rank, self.group.world_size
        return slice(rank * panels // world * PANEL, min(rows, (rank + 1) * panels // world * PANEL))

    def head_share(self, rows: int) -> RowShare:
        return RowShare(self.group, rows, self.head_rows(rows).start)

    def column_share(self, name: str, format: str, I: int) -> ColumnShare | None:
        """What columns of the matrix are the rank's; None for a matrix that is not divided so. ModelError where slices cut a head."""
        part = name.split(".")[-2]
        if part not in _SUMMED:
            return None
        first, count = self._slices
        columns = self._features(name, format, I)
        heads, world = I // self.group.world_size, self.group.world_size
        if part == "attn_output" and (columns.start, columns.stop) != (self.group.rank * heads, (self.group.rank + 1) * heads):
            raise ModelError(f"tensor_parallel_size={world}: the slices of {name} in {format} cut a head; use fewer, or another format")
        block = max(BLOCK, FORMATS[format].elements)
        return ColumnShare(self.group, I, first, count, columns.start % block, columns.stop - columns.start)

    def _features(self, name: str, format: str, I: int) -> slice:
        """The rank's of the I columns of a matrix in `format`; ModelError, by the tensor's name, where they are too few for all ranks."""
        world, unit = self.group.world_size, slice_unit(format, I)
        if I // unit < world:
            raise ModelError(
                f"tensor_parallel_size={world}: the {I} features of {name} are divided by {unit} at least where products are in {format}, "
                f"and {world} ranks would need {world * unit}; use fewer ranks, or another format"
            )
        return slice_columns(format, I, *self._slices)

    def column_bytes(self, share: ColumnShare, format: str, stored: str) -> slice:
        """The bytes of a row in `stored` that hold the whole blocks of `format` in which the share's columns are."""
        block, start = max(BLOCK, FORMATS[format].elements), slice_columns(format, share.all_columns, share.first, share.count).start
        begin, end = start // block * block, -(-(start + share.columns) // block) * block
        known = FORMATS[stored]
        return slice(begin // known.elements * known.nbytes, end // known.elements * known.nbytes)


def _undivided(c: ModelConfig) -> str | None:
    """What a model has that no rank can compute its part of; None if it can be divided."""
    whole = {
        "learned positions": c.family == "gpt2",
        "multi-head latent attention": c.latent is not None,
        "norms of q and k over all heads": c.whole_qk_norm,
        "norms of outputs": c.post_norms,
        "a scaled residual stream": c.residual_scale != 1.0,
    }
    return next((name for name, present in whole.items() if present), None)
