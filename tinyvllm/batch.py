"""The arrays of one step as the model reads them. No requests and no text; docs/shapes.md defines the letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import Tensor, UOp


class LayerCache(NamedTuple):
    """One layer's block tensor [P, 2, K, S, D], twice: keys [:, 0] go through the one, values [:, 1] through the other.

    Both are the same memory. tinygrad copies a tensor that two kernels read after a store into it: the whole pool, in every layer. It
    reads a tensor with one reader in place.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Batch:
    """One flat batch of T tokens of B sequences: first `num_decodes` sequences with one token each, then chunks of up to `max_query`.

    Every tensor is int32, on the device, in a persistent buffer that the runner refills; padded rows write to the scratch block.

    tokens [T]            token ids
    positions [T]         position of each token in its sequence
    slots [T]             where its key and value go: block * S + offset
    block_tables [B, M]   the blocks of each sequence, in order
    query_starts [B + 1]  first row of each sequence in the flat batch
    context_lens [B]      tokens of each sequence in the cache with those of this step; for kernels, as the reference masks by position
    rows [1]              rows of the flat batch up to the last that counts; kernels leave the others alone
    decodes [1]           sequences of one token that count
    chunks [2]            the first sequence of several tokens, which is `num_decodes`, and how many of them count
    samples [N]           the rows whose logits are wanted, of which the first sample_count [1] count
    num_blocks            blocks of the longest context of the step; an int, or a bound variable so that one capture serves all lengths
    shared_prefix_lens [B] for each decode, leading tokens in the same blocks as those of the decode before it; None where not computed
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

    @property
    def num_chunks(self) -> int:
        """Number of sequences after the decodes; each prefills up to `max_query` tokens."""
        return int(self.block_tables.shape[0]) - self.num_decodes
