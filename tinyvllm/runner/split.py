"""Which part of each tensor a rank has: heads, slices of the MLP, rows of the head."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig
from tinyvllm.placement import RankGroup
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.slices import ALL_SLICES, BLOCK, ColumnShare, HeadShare, RowShare, slice_columns, slice_unit
from tinyvllm.runner.row_part import RowPart
from tinyvllm.runner.state_split import StateSplit

PANEL = 16
_GATES = frozenset(f"ffn_{half}{kind}" for half in ("gate", "up") for kind in ("", "_exps", "_shexp"))  # whose rows are divided in slices
_LATENT = frozenset(("attn_q", "attn_q_b", "attn_k_b", "attn_v_b"))  # whose rows are heads
SUMMED = frozenset(("attn_output", *(f"ffn_down{kind}" for kind in ("", "_exps", "_shexp"))))  # whose columns are divided


@dataclass(frozen=True, eq=False)
class Split:
    """The part of one rank of a model of this configuration, which is that of the whole model."""

    config: ModelConfig
    group: RankGroup

    def __post_init__(self) -> None:
        c, world = self.config, self.group.world_size
        if reason := _undivided(c):
            raise ModelError(f"tensor_parallel_size={world}: models with {reason} are not divided yet; leave it out")
        for kv_heads in (c.n_kv_heads, *(c.window_heads or ())[:1]):
            if c.n_heads % world or (kv_heads % world and world % kv_heads):
                raise ModelError(
                    f"tensor_parallel_size={world}: {c.n_heads} query heads and {kv_heads} key/value heads cannot be divided; use fewer"
                )
        _ = self._states  # which refuses heads as well

    @property
    def local(self) -> ModelConfig:
        """The configuration of the rank's heads."""
        c, states = self.config, self._states
        kv_heads, windowed = self._kv_heads(c.n_kv_heads), c.window_heads
        if windowed is not None:
            windowed = len(self._kv_heads(windowed[0])), windowed[1]
        delta = None if states is None else states.local
        return replace(c, n_heads=c.n_heads // self.group.world_size, n_kv_heads=len(kv_heads), window_heads=windowed, delta=delta)

    @property
    def _states(self) -> StateSplit | None:
        """The heads of layers with recurrent states."""
        return None if self.config.delta is None else StateSplit.of(self.config.delta, self.group.rank, self.group.world_size)

    @property
    def _slices(self) -> tuple[int, int]:
        count = ALL_SLICES // self.group.world_size
        return self.group.rank * count, count

    @property
    def _heads(self) -> slice:
        heads = self.config.n_heads // self.group.world_size
        return slice(self.group.rank * heads, (self.group.rank + 1) * heads)

    def _kv_heads(self, count: int) -> range:
        """The rank's of `count` key/value heads in all."""
        first = self.group.rank * count // self.group.world_size
        return range(first, first + max(1, count // self.group.world_size))

    def heads_of_all(self) -> HeadShare | None:
        """The rank's heads, where it has the rows of all heads of q and k."""
        if not self.config.whole_qk_norm:
            return None
        kv_heads = self._kv_heads(self.config.n_kv_heads)
        return HeadShare(self._heads, slice(kv_heads.start, kv_heads.stop))

    def rows(self, name: str, rows: int, down_format: str) -> RowPart:
        """Those of a matrix, or the numbers of a vector, of this name, with `rows` in all; `down_format` is that of the second matrix."""
        *path, part, _ = name.split(".")
        layer = int(path[1]) if path else 0
        c, states = self.config.of_layer(layer), self._states
        if states is not None and layer in c.delta_layers and (own := states.rows(part)) is not None:
            return own
        if c.latent is not None and part in _LATENT:
            return self._latent_rows(part)
        if c.whole_qk_norm and part in ("attn_q", "attn_k"):
            return RowPart(slice(0, rows))
        if part in ("attn_q", "attn_gate", "attn_sinks"):
            return RowPart.of_heads(self._heads, 1 if part == "attn_sinks" else c.head_dim)
        if part in ("attn_k", "attn_v"):
            kv_heads = self._kv_heads(c.n_kv_heads)
            return RowPart.of_heads(slice(kv_heads.start, kv_heads.stop), c.head_dim)
        if part in _GATES:
            matrices = c.num_experts if part.endswith("_exps") else 1
            return RowPart(self._features(name, down_format, rows // matrices), matrices)
        return RowPart(slice(0, rows))

    def _latent_rows(self, part: str) -> RowPart:
        """Of the matrices of latent attention that differ by head; q has what is not rotated of all heads first, then the rest."""
        c, heads, latent = self.config, self._heads, self.config.latent
        assert latent is not None
        if part in ("attn_k_b", "attn_v_b"):
            return RowPart.of_heads(heads, latent.rank if part == "attn_k_b" else latent.value)
        start, R = c.n_heads * latent.plain, c.rope_dim
        return replace(RowPart.of_heads(heads, latent.plain), more=(slice(start + heads.start * R, start + heads.stop * R),))

    def matrices(self, name: str) -> slice | None:
        """Which of the matrices of a tensor the rank has, where they are one for each head; None for any other tensor."""
        return self._heads if self.config.latent is not None and name.split(".")[-2] in ("attn_k_b", "attn_v_b") else None

    def head_rows(self, rows: int) -> slice:
        """The rows of the head: whole panels."""
        panels, rank, world = -(-rows // PANEL), self.group.rank, self.group.world_size
        return slice(rank * panels // world * PANEL, min(rows, (rank + 1) * panels // world * PANEL))

    def head_share(self, rows: int) -> RowShare:
        return RowShare(self.group, rows, self.head_rows(rows).start)

    def column_share(self, name: str, format: str, I: int) -> ColumnShare | None:
        """What columns of the matrix are the rank's; None for a matrix that is not divided so. ModelError where slices cut a head."""
        part = name.split(".")[-2]
        if part not in SUMMED:
            return None
        first, count = self._slices
        columns = self._features(name, format, I)
        heads, world = I // self.group.world_size, self.group.world_size
        if part == "attn_output" and (columns.start, columns.stop) != (self.group.rank * heads, (self.group.rank + 1) * heads):
            raise ModelError(f"tensor_parallel_size={world}: the slices of {name} in {format} cut a head; use fewer, or another format")
        block = max(BLOCK, FORMATS[format].elements)
        return ColumnShare(self.group, I, first, count, columns.start % block, columns.stop - columns.start)

    def columns(self, share: ColumnShare, format: str) -> slice:
        """The columns of the whole matrix, in `format`, that a share has."""
        return slice_columns(format, share.all_columns, share.first, share.count)

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
    }
    return next((name for name, present in whole.items() if present), None)
