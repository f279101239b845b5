"""Which part of each tensor a rank has: heads, slices of the MLP, rows of the head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tinyvllm.config import EngineConfig
from tinyvllm.distributed.memory import Layout, SharedMemory
from tinyvllm.errors import ModelError
from tinyvllm.models.config import ModelConfig
from tinyvllm.placement import RankGroup
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.slices import ALL_SLICES, BLOCK, ColumnShare, RowShare, slice_columns
from tinyvllm.runner.prepare import power_bucket
from tinyvllm.weights.memory import place_bytes

PANEL = 16
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
    place, logits = (rows * model.dim, rows * model.vocab_size) if tensor > 1 else (0, 0)
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

    def rows(self, name: str, down_format: str) -> slice | None:
        """The rows of a matrix, or numbers of a bias, of this name; None for all."""
        c, rank, world = self.config, self.group.rank, self.group.world_size
        part = name.split(".")[-2]
        if part == "attn_q":
            heads = c.n_heads // world
            return slice(rank * heads * c.head_dim, (rank + 1) * heads * c.head_dim)
        if part in ("attn_k", "attn_v"):
            heads = max(1, c.n_kv_heads // world)
            first = rank * c.n_kv_heads // world
            return slice(first * c.head_dim, (first + heads) * c.head_dim)
        if part in ("ffn_gate", "ffn_up"):
            return slice_columns(down_format, c.hidden_dim, *self._slices)
        return None

    def head_rows(self, rows: int) -> slice:
        """The rows of the head: whole panels."""
        panels, rank, world = -(-rows // PANEL), self.group.rank, self.group.world_size
        return slice(rank * panels // world * PANEL, min(rows, (rank + 1) * panels // world * PANEL))

    def head_share(self, rows: int) -> RowShare:
        return RowShare(self.group, rows, self.head_rows(rows).start)

    def column_share(self, name: str, format: str, I: int) -> ColumnShare | None:
        """What columns of the matrix are the rank's; None for a matrix that is not divided so. ModelError where slices cut a head."""
        part = name.split(".")[-2]
        if part not in ("attn_output", "ffn_down"):
            return None
        first, count = self._slices
        columns = slice_columns(format, I, first, count)
        heads, world = I // self.group.world_size, self.group.world_size
        if part == "attn_output" and (columns.start, columns.stop) != (self.group.rank * heads, (self.group.rank + 1) * heads):
            raise ModelError(f"tensor_parallel_size={world}: the slices of {name} in {format} cut a head; use fewer, or another format")
        if columns.start == columns.stop:
            raise ModelError(f"tensor_parallel_size={world}: {name} in {format} has too few columns to be divided; use fewer")
        block = max(BLOCK, FORMATS[format].elements)
        return ColumnShare(self.group, I, first, count, columns.start % block, columns.stop - columns.start)

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
        "experts": bool(c.num_experts),
        "norms of q and k over all heads": c.whole_qk_norm,
        "norms of outputs": c.post_norms,
        "a scaled residual stream": c.residual_scale != 1.0,
    }
    return next((name for name, present in whole.items() if present), None)


def taken(rows: np.ndarray, part: slice | None) -> np.ndarray:
    return rows if part is None else rows[part]
