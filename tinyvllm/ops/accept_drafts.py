"""How many guessed tokens of each sequence the model agrees with: the acceptance of speculative decoding where drawing is a function.

A token drawn here depends on its logits, seed and position alone (sample.py). So a guess is right exactly when it is the token that the
model draws at its place, and what is accepted is what would have come without guessing: no rejection sampling is needed, also at a
temperature (Leviathan et al. 2022, arXiv:2211.17192, has the greedy case).
"""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.base import calls_of
from tinyvllm.backends.registry import select
from tinyvllm.placement import Placement


def accept_drafts(drafts: Tensor, chosen: Tensor, lengths: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted guesses int32 [B], and the token that follows them int32 [B]; rows from count [1] on are not defined.

    drafts [B, N] int32, of which lengths [B] int32 count; chosen [B, N + 1] int32, the model's own token behind each of them.
    """
    B, N = (int(d) for d in drafts.shape)
    row = select("accept_drafts", Placement.of(drafts.device), f"N={N}")
    if row is not None:
        accepted, following = calls_of(str(drafts.device)).accept_drafts(row, drafts, chosen, lengths, count)
        return accepted, following
    place = Tensor.arange(N, device=drafts.device).reshape(1, N)
    wrong = (drafts != chosen[:, :N]) | (place >= lengths.reshape(B, 1))
    accepted = wrong.where(place, N).min(1).cast("int32").contiguous()
    return accepted, chosen.gather(1, accepted.reshape(B, 1)).reshape(B).contiguous()
