"""Acceptance of drafts in speculative decoding, where drawing a token is a function.

A drawn token depends on its logits, seed and position alone (sample.py). So a draft is right exactly if it is the token that the model
draws at that position, and the accepted tokens are those that would have come without drafts: no rejection sampling is needed, also at a
temperature (Leviathan et al. 2022, arXiv:2211.17192, has the greedy case).
"""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import select
from tinyvllm.placement import Placement


def accept_drafts(drafts: Tensor, chosen: Tensor, lengths: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted drafts int32 [B], and the token that follows them int32 [B]; rows from count [1] on are undefined.

    drafts [B, N] int32, of which lengths [B] int32 count; chosen [B, N + 1] int32, the model's own token after each of them.
    """
    (B, N), placement = (int(d) for d in drafts.shape), Placement.of(drafts.device)
    kernel = select("accept_drafts", placement, f"N={N}", ShapeFacts(placement))
    if kernel is not None:
        return kernel.backend.accept_drafts(kernel.variant, drafts, chosen, lengths, count)
    index = Tensor.arange(N, device=drafts.device).reshape(1, N)
    wrong = (drafts != chosen[:, :N]) | (index >= lengths.reshape(B, 1))
    accepted = wrong.where(index, N).min(1).cast("int32").contiguous()
    return accepted, chosen.gather(1, accepted.reshape(B, 1)).reshape(B).contiguous()
