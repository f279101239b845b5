"""Whether there is anything to guess from, before anything is built for a guess: a step of text that repeats nothing costs a comparison."""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import Protocol

from tinyvllm.request import Sequence
from tinyvllm.speculate.protocol import LookupDrafter

# The first look is after the first token, whose context is the prompt's: a text to be continued may recur already. If a prompt ends with a
# chat template, an answer that copies is noticed some tokens later. A look costs 3 us, and 5 to 15 us when its code has left the caches.
FIRST_LOOK, SECOND_LOOK = 1, 5  # tokens of output
PAUSE = 6  # tokens after later looks in vain; in a batch of N sequences N / 4, as each is looked at, to MAX_PAUSE
MAX_PAUSE = 16
FEW = 8  # sequences; in larger batches one is looked at half a pause early if another one is, so that looks are in few steps
TRUST = 4  # looks that are skipped after an accepted draft, their answer being yes


class Decode(Protocol):
    """A sequence whose next token the step computes."""

    @property
    def sequence(self) -> Sequence: ...


class _Look:
    """When the end of a sequence is looked at next, and what the last look found."""

    __slots__ = ("next", "recurs", "tenant", "trust")

    def __init__(self, tenant: str):
        self.tenant, self.next, self.recurs = tenant, FIRST_LOOK, False
        self.trust = 0  # looks that will be skipped


class Watch:
    """Looks at the ends of running sequences, after pauses while they are in vain. For controllers that leave out tokens, too.

    After an accepted draft some looks say yes: the drafter also knows contexts that are too short to begin with.
    """

    def __init__(self, drafter: LookupDrafter):
        self._drafter = drafter
        self._looks: dict[int, _Look] = {}  # by sequence id
        self.pause = 0  # tokens from the last `any_recurs` until the next sequence is due

    def __len__(self) -> int:
        return len(self._looks)

    def any_recurs(self, entries: Row[Decode]) -> bool:
        """Whether one of these decodes may get drafts: its sequence is due, or was found to recur by the look before."""
        looks, answer = self._looks, False
        soonest = pause_in_vain = min(MAX_PAUSE, max(PAUSE, len(entries) // 4))
        early = 0 if len(entries) <= FEW else pause_in_vain // 2
        for entry in entries:  # one loop without further calls: this code is not in the processor's caches
            sequence = entry.sequence
            look = looks.get(sequence.sequence_id)
            if look is None:
                look = looks[sequence.sequence_id] = _Look(tenant_of(sequence))
            length = len(sequence.output_token_ids)
            pause = look.next - length
            if pause <= (early if length > SECOND_LOOK else 0):
                if look.trust:
                    look.trust -= 1
                    look.recurs = True
                else:
                    look.recurs = self._drafter.recurs(sequence, look.tenant)
                if look.recurs:
                    pause = 1
                else:
                    pause = pause_in_vain if length > FIRST_LOOK else SECOND_LOOK - length
                look.next = length + pause
            if look.recurs:
                answer = True
            if pause < soonest:
                soonest = pause
        self.pause = soonest
        return answer

    def recurs(self, sequence: Sequence) -> bool:
        """What the last look at the sequence found."""
        look = self._looks.get(sequence.sequence_id)
        return look is not None and look.recurs

    def trust(self, sequence: Sequence) -> None:
        """A draft of the sequence was accepted."""
        look = self._looks.get(sequence.sequence_id)
        if look is not None:
            look.trust, look.next = TRUST, 0

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._looks.pop(sequence.sequence_id, None)


def tenant_of(sequence: Sequence) -> str:
    """Which sequences may be guessed from each other's text: those of one salt and one key."""
    return f"{sequence.options.cache_salt or ''}\0{sequence.options.key}"
