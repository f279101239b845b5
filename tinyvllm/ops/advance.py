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

    A sequence whose blocks are full gets NO_SLOT, so nothing is stored. Rows from batch.decodes on do not change.
    """
    (B, M), placement = (int(d) for d in batch.block_tables.shape), Placement.of(sampled.device)
    kernel = select("advance", placement, f"S={block_size}", ShapeFacts(placement))
    if kernel is not None:
        kernel.backend.advance(kernel.variant, batch, sampled, history, block_size)
        return
    counts = Tensor.arange(B, device=sampled.device) < batch.decodes
    positions = counts.where(batch.positions + 1, batch.positions).contiguous()
    block = (positions // block_size).minimum(M - 1).reshape(B, 1)
    slot = batch.block_tables.gather(1, block).reshape(B) * block_size + positions % block_size
    slot = (positions < M * block_size).where(slot, NO_SLOT)
    now = (Tensor.arange(int(history.tokens.shape[0]), device=sampled.device) == history.round).unsqueeze(1) & counts.unsqueeze(0)
    values = [
        counts.where(sampled.maximum(0), batch.tokens), positions, counts.where(slot, batch.slots),
        counts.where(batch.context_lens + 1, batch.context_lens), now.where(sampled.unsqueeze(0), history.tokens), history.round + 1,
    ]  # fmt: skip
    results = [value.cast("int32").contiguous() for value in values]  # all are computed before any buffer is overwritten
    Tensor.realize(*results)
    outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
    Tensor.realize(*(out.assign(value) for out, value in zip(outs, results, strict=True)))
