"""The arrays of one step as the model reads them. No requests and no text; docs/shapes.md defines the letters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tinygrad import Tensor, UOp

from tinyvllm.lazy_dataclass import dataclass

# How keys and values are packed, as CACHE_TYPE of the kernels and by the name of the option kv_cache_dtype.
PACKED_KV = {"fp8_e4m3": "KV_FP8", "int8": "KV_INT8", "int4": "KV_INT4"}


# The slot of a row whose key and value are not stored: padding, and sequences without a free slot. Several rows of a step have it, and
# kernels run rows in any order, so no place in memory would do. The reference stores such rows in the last block, which no row reads.
NO_SLOT = -1


@dataclass(frozen=True)
class KVLayout:
    """A packed block: of both sides (keys, values) and all K heads first the quants of S slots, then a bfloat16 scale a slot and head.

    The quants of a key are words of four bytes, word j of slot s at word j * S + s. Those of a value are bytes, byte i of slot s at byte
    (s // 4 * N + i) * 4 + s % 4, N being the bytes of a row. So sixteen keys, or sixteen columns of four values, are one contiguous load,
    and every byte belongs to one slot. tinyvllm/quant/kv.py says what the bytes mean.
    """

    format: str
    K: int
    S: int
    D: int

    @property
    def row_bytes(self) -> int:
        """Quants of one slot, side and head."""
        return self.D // 2 if self.format == "KV_INT4" else self.D

    @property
    def scales(self) -> int:
        """Where the scales begin in a block."""
        return 2 * self.K * self.S * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return self.scales + 2 * self.K * self.S * 2


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's blocks, twice: keys go through the one tensor, values through the other. Both are the same memory.

    tinygrad copies a tensor that two kernels read after a store into it: the whole pool, in every layer. It reads a tensor with one reader
    in place. Without `packed` the tensors are [P, 2, K, S, D] floats, keys [:, 0] and values [:, 1]; else they are uint8 [P, bytes].

    With `latent` above 0 they are [P, 1, 1, S, D] floats: the one key of a token, whose first `latent` features are also its value.

    Layers of the same `group` have their keys and values in the same blocks (`Batch.of`).

    Where ranks divide contexts, `ranks` is their `RankGroup`: a block of the batch's tables and slots is S tokens of each rank, in order.
    """

    keys: Tensor
    values: Tensor
    packed: KVLayout | None = None
    latent: int = 0
    group: int = 0
    ranks: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        yield from (self.keys, self.values)

    def after(self, keys: Tensor, values: Tensor) -> LayerCache:
        """The same cache once what these tensors depend on has run."""
        return replace(self, keys=keys, values=values)

    @property
    def K(self) -> int:
        return self.packed.K if self.packed else int(self.keys.shape[2])

    @property
    def S(self) -> int:
        return self.packed.S if self.packed else int(self.keys.shape[3])

    @property
    def D(self) -> int:
        return self.packed.D if self.packed else int(self.keys.shape[4])

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        return self.latent or self.D


@dataclass(frozen=True, eq=False)
class StateCache:
    """The recurrent states of a layer that has no keys and values: float32 [P, numbers], one row a slot; the last slot is scratch, for
    padded sequences. What a row means is in `DeltaShape` (backends/operands.py). Its layer reads no blocks: it is in the first group.
    Of up to `drafts` drafts of a step a slot keeps what the state needs of them once they are accepted.
    """

    states: Tensor
    drafts: int = 0
    group: int = 0
    ranks: Any = None  # no ranks divide it


@dataclass(frozen=True)
class Batch:
    """One flat batch of T tokens of B sequences: first `num_decodes` sequences with one token each, then chunks of up to `max_query`.

    Every tensor is int32, on the device, in a persistent buffer that the runner refills; padded rows store no keys and values.

    tokens [T]            token ids
    positions [T]         position of each token in its sequence
    slots [T]             where its key and value go: block * S + offset, each of one row; NO_SLOT: nowhere
    block_tables [B, M]   the blocks of each sequence, in order
    query_starts [B + 1]  first row of each sequence in the flat batch
    context_lens [B]      tokens of each sequence in the cache with those of this step; for kernels, as the reference masks by position
    rows [1]              rows of the flat batch up to the last that counts; kernels leave the others alone
    decodes [1]           sequences of one token that count
    chunks [2]            the first sequence of several tokens, which is `num_decodes`, and how many of them count
    samples [N]           the rows whose logits are wanted, of which the first sample_count [1] count
    num_blocks            blocks of the longest context of the step; an int, or a bound variable so that one capture serves all lengths
    adapters [T]          the adapter of each row, n for the n-th, 0 for none; None where no row of the batch has one
    shared_prefix_lens [B] for each decode, leading tokens in the same blocks as those of the decode before it; None where not computed
    states [B, 4]         of each sequence the slot of its recurrent states, the slot where they are before the step, a slot for a copy of
                          them, and after how many of its tokens that is made, 0 for none; the last slot where there is none, and for
                          padding. A decode with the own slot of the decode before it is a draft after that. None for a model without
    arrived [T, E]        float32: the residual stream from the layers of another process; None where the model begins with its embedding
    others                the same batch for each group of layers after the first: with its own slots, block tables and shared prefixes
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    rows: Tensor
    decodes: Tensor
    chunks: Tensor
    samples: Tensor
    sample_count: Tensor
    num_blocks: int | UOp
    num_decodes: int
    max_query: int
    shared_prefix_lens: Tensor | None = None
    adapters: Tensor | None = None
    states: Tensor | None = None
    arrived: Tensor | None = None
    others: tuple[Batch, ...] = ()

    def of(self, cache: LayerCache) -> Batch:
        """The batch as the layer of a cache reads it."""
        return self.others[cache.group - 1] if cache.group else self

    @property
    def num_chunks(self) -> int:
        """Number of sequences after the decodes; each prefills up to `max_query` tokens."""
        return int(self.block_tables.shape[0]) - self.num_decodes
