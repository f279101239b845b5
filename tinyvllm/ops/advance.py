"""Moves the state of a decode step to the next position after its tokens were drawn, without a host round trip."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import History
from tinyvllm.backends.registry import select
from tinyvllm.batch import NO_SLOT, Batch
from tinyvllm.placement import Placement

__all__ = ["History", "advance"]


def advance(batch: Batch, sampled: Tensor, history: History, block_size: int) -> None:
    """Move a batch of decodes to its next tokens, in place: row b gets sampled[b] [B] int32 at the next position, in that position's slot.

    A sequence whose blocks are full gets NO_SLOT, so nothing is stored. Rows from batch.decodes on do not change. Other groups of layers
    get the slots of the same positions in their own blocks.
    """
    _advance(batch, sampled, history, block_size)
    if batch.others:
        slots = [_slots(batch, group.block_tables, group.slots, batch.positions, block_size) for group in batch.others]
        Tensor.realize(*slots)
        Tensor.realize(*(group.slots.assign(each) for group, each in zip(batch.others, slots, strict=True)))


def _advance(batch: Batch, sampled: Tensor, history: History, block_size: int) -> None:
    placement = Placement.of(sampled.device)
    kernel = select("advance", placement, f"S={block_size}", ShapeFacts(placement))
    if kernel is not None:
        kernel.backend.advance(kernel.variant, batch, sampled, history, block_size)
        return
    counts = Tensor.arange(int(batch.block_tables.shape[0]), device=sampled.device) < batch.decodes
    positions = counts.where(batch.positions + 1, batch.positions).contiguous()
    now = (Tensor.arange(int(history.tokens.shape[0]), device=sampled.device) == history.round).unsqueeze(1) & counts.unsqueeze(0)
    values = [
        counts.where(sampled.maximum(0), batch.tokens), positions,
        _slots(batch, batch.block_tables, batch.slots, positions, block_size),
        counts.where(batch.context_lens + 1, batch.context_lens), now.where(sampled.unsqueeze(0), history.tokens), history.round + 1,
    ]  # fmt: skip
    results = [value.cast("int32").contiguous() for value in values]  # all are computed before any buffer is overwritten
    Tensor.realize(*results)
    outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
    Tensor.realize(*(out.assign(value) for out, value in zip(outs, results, strict=True)))


def _slots(batch: Batch, tables: Tensor, slots: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of new positions in the blocks of `tables` [B, M]; `slots` [B] in rows from batch.decodes on."""
    B, M = (int(d) for d in tables.shape)
    counts = Tensor.arange(B, device=tables.device) < batch.decodes
    block = (positions // block_size).minimum(M - 1).reshape(B, 1)
    slot = tables.gather(1, block).reshape(B) * block_size + positions % block_size
    slot = (positions < M * block_size).where(slot, NO_SLOT)
    return counts.where(slot, slots).cast("int32").contiguous()
