"""Which part of each tensor a rank has: heads, slices of the MLP, rows of the head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.config.engine import EngineConfig
from tinyvllm.distributed.memory import Layout, SharedMemory
from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig
from tinyvllm.placement import RankGroup
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.slices import ALL_SLICES, BLOCK, ColumnShare, HeadShare, RowShare, slice_columns, slice_unit
from tinyvllm.runner.prepare import power_bucket
from tinyvllm.weights.memory import place_bytes

PANEL = 16
_GATES = frozenset(f"ffn_{half}{kind}" for half in ("gate", "up") for kind in ("", "_exps", "_shexp"))  # whose rows are divided in slices
_LATENT = frozenset(("attn_q", "attn_q_b", "attn_k_b", "attn_v_b"))  # whose rows are heads
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
    """`rows` of each of `matrices` matrices of as many rows, one after the other: those of all experts are one tensor.

    `more` are further rows, of a single matrix.
    """

    rows: slice
    matrices: int = 1
    more: slice | None = None

    @property
    def count(self) -> int:
        return self.matrices * _length(self.rows) + (0 if self.more is None else _length(self.more))

    def of(self, array: Any) -> Any:
        """These rows of an array or tensor [rows of all matrices, ...]; a view where they follow each other."""
        if self.more is not None:
            return np.concatenate([array[self.rows], array[self.more]])
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

    @property
    def _heads(self) -> slice:
        heads = self.local.n_heads
        return slice(self.group.rank * heads, (self.group.rank + 1) * heads)

    @property
    def _kv_heads(self) -> slice:
        first = self.group.rank * self.config.n_kv_heads // self.group.world_size
        return slice(first, first + self.local.n_kv_heads)

    def heads_of_all(self) -> HeadShare | None:
        """The rank's heads, where it has the rows of all heads of q and k."""
        return HeadShare(self._heads, self._kv_heads) if self.config.whole_qk_norm else None

    def rows(self, name: str, rows: int, down_format: str) -> RowPart:
        """Those of a matrix, or the numbers of a vector, of this name, with `rows` in all; `down_format` is that of the second matrix."""
        c, part = self.config, name.split(".")[-2]
        if c.latent is not None and part in _LATENT:
            return self._latent_rows(part)
        if c.whole_qk_norm and part in ("attn_q", "attn_k"):
            return RowPart(slice(0, rows))
        if part in ("attn_q", "attn_sinks"):
            return _rows_of(self._heads, c.head_dim if part == "attn_q" else 1)
        if part in ("attn_k", "attn_v"):
            return _rows_of(self._kv_heads, c.head_dim)
        if part in _GATES:
            matrices = c.num_experts if part.endswith("_exps") else 1
            return RowPart(self._features(name, down_format, rows // matrices), matrices)
        return RowPart(slice(0, rows))

    def _latent_rows(self, part: str) -> RowPart:
        """Of the matrices of latent attention that differ by head; q has what is not rotated of all heads first, then the rest."""
        c, heads, latent = self.config, self._heads, self.config.latent
        assert latent is not None
        if part in ("attn_k_b", "attn_v_b"):
            return _rows_of(heads, latent.rank if part == "attn_k_b" else latent.value)
        start, R = c.n_heads * latent.plain, c.rope_dim
        return replace(_rows_of(heads, latent.plain), more=slice(start + heads.start * R, start + heads.stop * R))

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


def _length(rows: slice) -> int:
    return len(range(rows.start, rows.stop))


def _rows_of(heads: slice, size: int) -> RowPart:
    return RowPart(slice(heads.start * size, heads.stop * size))


def _undivided(c: ModelConfig) -> str | None:
    """What a model has that no rank can compute its part of; None if it can be divided."""
    whole = {
        "learned positions": c.family == "gpt2",
    }
    return next((name for name, present in whole.items() if present), None)
