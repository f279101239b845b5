"""What a way of guessing drafts implements. A draft can only cost speed: the engine keeps it only if it is the token that comes anyway.

The engine draws the token of every position from the model's own logits, by (seed, position). A draft is accepted exactly if it equals that
token, so the output is the same with any drafter, with any number of drafts, and with none (drafter invariance; Daliri et al. 2024,
arXiv:2408.07978, have the general theory).
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import Protocol

from tinyvllm.request import Sequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that may get drafts in the next step: at most `max_drafts` of them, 1 or more.

    The drafter reads the sequence's tokens (`token_ids`, `token_at`, `len`) and changes nothing. Sequences of different `tenant` must not
    learn of each other's tokens, also not by speed.
    """

    sequence: Sequence
    max_drafts: int
    tenant: str = ""


@dataclass(slots=True)
class Draft:
    """Tokens that may follow the sequence's last one.

    `confidences` holds for each the drafter's estimate, 0 to 1, that it is right if those before it are; empty: it has none.
    """

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)


class Drafter(Protocol):
    """One way of guessing. A method that raises ends speculation by this drafter, never a request."""

    method: str

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        """One draft for each request, in their order; an empty one where there is no guess."""
        ...

    def observe(self, sequence: Sequence, num_new: int) -> None:
        """The last `num_new` tokens of the sequence are final: drawn by the model, and appended."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; nothing is kept for it. What its text has taught may stay, for its own tenant and within bounds."""
        ...
