"""The state of a decode step after its tokens were drawn: what the next step starts from, without a way over the host."""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor

from tinyvllm.backends.base import calls_of
from tinyvllm.backends.registry import select
from tinyvllm.batch import Batch
from tinyvllm.placement import Placement


@dataclass(frozen=True, eq=False)
class History:
    """Tokens of the last rounds, int32 [N, B] (-1 where a row had none), and the round that is written next, int32 [1]."""

    tokens: Tensor
    round: Tensor


def advance(batch: Batch, sampled: Tensor, history: History, block_size: int, scratch_slot: int) -> None:
    """Move a batch of decodes to its next tokens, in place: row b gets sampled[b] [B] int32 at the next position, in that one's slot.

    A sequence whose blocks are full writes to the scratch slot. Rows from batch.decodes on stay as they are.
    """
    B, M = (int(d) for d in batch.block_tables.shape)
    row = select("advance", Placement.of(sampled.device), f"S={block_size}")
    if row is not None:
        calls_of(str(sampled.device)).advance(row, batch, sampled, history, block_size, scratch_slot)
        return
    counts = Tensor.arange(B, device=sampled.device) < batch.decodes
    positions = counts.where(batch.positions + 1, batch.positions).contiguous()
    block = (positions // block_size).minimum(M - 1).reshape(B, 1)
    slot = batch.block_tables.gather(1, block).reshape(B) * block_size + positions % block_size
    slot = (positions < M * block_size).where(slot, scratch_slot)
    now = (Tensor.arange(int(history.tokens.shape[0]), device=sampled.device) == history.round).unsqueeze(1) & counts.unsqueeze(0)
    values = [
        counts.where(sampled.maximum(0), batch.tokens), positions, counts.where(slot, batch.slots),
        counts.where(batch.context_lens + 1, batch.context_lens), now.where(sampled.unsqueeze(0), history.tokens), history.round + 1,
    ]  # fmt: skip
    fresh = [value.cast("int32").contiguous() for value in values]  # all computed before any is overwritten
    Tensor.realize(*fresh)
    outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
    Tensor.realize(*(out.assign(value) for out, value in zip(outs, fresh, strict=True)))
