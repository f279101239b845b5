"""Whether there is anything to guess from, before anything is built for a guess: a step of text that repeats nothing costs a comparison."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Row
from typing import Protocol

from tinyvllm.request import Sequence
from tinyvllm.speculate.cost_curve import MAX_FEW
from tinyvllm.speculate.protocol import LookupDrafter

# The first look is after the first token, whose context is the prompt's: a text to be continued may recur already. If a prompt ends with a
# chat template, an answer that copies is noticed some tokens later. A look costs 3 us, and 5 to 15 us when its code has left the caches.
FIRST_LOOK, SECOND_LOOK = 1, 5  # tokens of output
# Tokens after later looks in vain, half as many more after each; in a batch of N sequences at least N / 4, as each is looked at. In a batch
# of more than MAX_FEW one is looked at half a pause early if another one is, so that looks are in few steps.
PAUSE = 6
MAX_PAUSE = 16
LARGE_TIMES = 2  # in batches of more than MAX_FEW, that many times as many tokens must recur: their rows cost nearly what tokens do
TRUST = 4  # looks that are skipped after an accepted draft, their answer being yes


class Decode(Protocol):
    """A sequence whose next token the step computes."""

    @property
    def sequence(self) -> Sequence: ...


class _Look:
    """When the end of a sequence is looked at next, as a length of its output."""

    __slots__ = ("next", "pause", "tenant", "trust")

    def __init__(self, tenant: str):
        self.tenant, self.next = tenant, FIRST_LOOK  # while it recurs, `next` is reached
        self.pause = PAUSE  # the next one
        self.trust = 0  # looks that will be skipped

    def pause_from(self, length: int, least: int) -> int:
        """After a look in vain at a length of the output: tokens until the next one."""
        if length <= FIRST_LOOK:
            pause = SECOND_LOOK - length
        else:
            pause, self.pause = max(least, self.pause), min(MAX_PAUSE, self.pause + self.pause // 2)
        self.next = length + pause
        return pause


class Watch:
    """Looks at the ends of running sequences, after pauses while they are in vain. For controllers that leave out tokens, too.

    After an accepted draft some looks say yes: the drafter also knows contexts that are too short to begin with.
    """

    def __init__(self, drafter: LookupDrafter, batch_pause: Callable[[int], int] = lambda num_sequences: 0):
        """`batch_pause`: for how many steps no sequence of a batch of more than MAX_FEW is worth a look."""
        self._drafter, self._batch_pause = drafter, batch_pause
        self._looks: dict[int, _Look] = {}  # by sequence id
        self._recurring: dict[int, Sequence] = {}  # what the last looks have found
        self._first: list[int] = []  # the output of the first sequence of the last call
        self._first_length = 0
        self._due = 0  # its length from which each sequence is examined again
        self._time = self._wakes_at = 0  # steps
        self.pause = 0  # tokens from the last call until a sequence that does not recur is due

    def __len__(self) -> int:
        return len(self._looks)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the sequence was looked at, and is not forgotten."""
        return sequence.sequence_id in self._looks

    def recurring(self, entries: Row[Decode], same: bool = False) -> list[Sequence]:
        """The sequences of these decodes that may get drafts: their last tokens recur by a look of now, or by the last one.

        `same`: the sequences are those of the last call. Then only those that did recur are examined until another one is due.
        """
        first = entries[0].sequence.output_token_ids
        same = same and first is self._first
        self._time += len(first) - self._first_length if same else 1
        self._first_length = len(first)
        if len(entries) > MAX_FEW and self._falls_asleep(len(entries)):
            self._first, self._due, self.pause = first, 0, self._wakes_at - self._time
            self._recurring.clear()
            return []
        if same and len(first) < self._due:
            self._look_again(len(entries))
        else:
            self._look_at(entries)
            self._first = first
        self.pause = self._due - len(first)
        return list(self._recurring.values())

    @property
    def sleeps(self) -> bool:
        """Whether a step of a large batch is worth no look. A call counts as a step."""
        self._time += 1
        return self._time < self._wakes_at

    def _falls_asleep(self, num_sequences: int) -> bool:
        if self._time >= self._wakes_at:
            self._wakes_at = self._time + self._batch_pause(num_sequences)
        return self._time < self._wakes_at

    def _look_at(self, entries: Row[Decode]) -> None:
        """A look at each sequence that is due."""
        looks, recurring = self._looks, dict[int, Sequence]()
        soonest, pause_in_vain = MAX_PAUSE, _pause_of(len(entries))
        early, times = (0, 1) if len(entries) <= MAX_FEW else (pause_in_vain // 2, LARGE_TIMES)
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
                    recurs = True
                else:
                    recurs = self._drafter.recurs(sequence, look.tenant, times)
                if recurs:
                    recurring[sequence.sequence_id], look.pause = sequence, PAUSE
                    continue
                pause = look.pause_from(length, pause_in_vain)
            if pause < soonest:
                soonest = pause
        self._recurring = recurring
        self._due = len(entries[0].sequence.output_token_ids) + soonest

    def _look_again(self, num_sequences: int) -> None:
        """A look at each sequence that did recur."""
        for number, sequence in list(self._recurring.items()):
            look = self._looks[number]
            if look.trust:
                look.trust -= 1
            elif not self._drafter.recurs(sequence, look.tenant, 1 if num_sequences <= MAX_FEW else LARGE_TIMES):
                del self._recurring[number]
                pause = look.pause_from(len(sequence.output_token_ids), _pause_of(num_sequences))
                self._due = min(self._due, len(self._first) + pause)

    def trust(self, sequence: Sequence) -> None:
        """A draft of the sequence was accepted."""
        look = self._looks.get(sequence.sequence_id)
        if look is not None:
            look.trust, look.next = TRUST, 0

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._looks.pop(sequence.sequence_id, None)
        self._recurring.pop(sequence.sequence_id, None)


def _pause_of(num_sequences: int) -> int:
    """Tokens after a look in vain."""
    return min(MAX_PAUSE, max(PAUSE, num_sequences // 4))


def tenant_of(sequence: Sequence) -> str:
    """Which sequences may be guessed from each other's text: those of one salt and one key."""
    return f"{sequence.options.cache_salt or ''}\0{sequence.options.key}"
