"""Fast path for an unchanged batch of decodes: the schedule is reused, and only sequences that cross a block boundary are looked at."""

from __future__ import annotations

from collections import Counter

from tinyvllm.request import Sequence
from tinyvllm.scheduler.schedule import Schedule, Scheduled


class ReusableDecode:
    """A schedule in which every running sequence computes one token and wants its logits, to be reused with each entry advanced.

    All advance together, so a sequence reaches the end of a block once in `block_size` steps, and which do is known beforehand.
    """

    def __init__(self, schedule: Schedule, block_size: int) -> None:
        self.schedule, self._block_size = schedule, block_size
        self.tokens_by_key = Counter(entry.sequence.options.key for entry in schedule.entries)  # of one step
        self.was_interrupted = False  # the last step had other rows than these decodes: drafts
        self._arrange()

    def _arrange(self) -> None:
        """Sort the entries by the position in their blocks."""
        self.max_start = max((entry.start for entry in self.schedule.entries), default=0)
        self._position = 0  # tokens by which all have advanced since
        # by the position at which they have filled a block
        self._crossings: list[list[Scheduled]] = [[] for _ in range(self._block_size)]
        for entry in self.schedule.entries:
            self._crossings[-entry.start % self._block_size].append(entry)

    @staticmethod
    def fits(schedule: Schedule, running: list[Sequence]) -> bool:
        """Whether a schedule consists of decodes alone, those of all running sequences, in their order."""
        entries = schedule.entries
        if not entries or len(entries) != len(running):
            return False
        return all(e.is_decode and e.sequence is s for e, s in zip(entries, running, strict=True))

    def advance(self, unseen: int) -> list[Scheduled] | None:
        """Advance every entry to its sequence's position; returns those that have reached or crossed a block boundary since.

        None if a sequence has not exactly one token to compute, counting `unseen` tokens that were drawn but are not known yet, or if the
        last step has not run: the schedule is of no use then.
        """
        if self.was_interrupted:
            return self._advance_each(unseen)
        entries = self.schedule.entries
        moved = entries[0].sequence.num_computed - entries[0].start
        if moved < 1:
            return None
        for entry in entries:
            sequence = entry.sequence
            start = sequence.num_computed
            if len(sequence.prompt_token_ids) + len(sequence.output_token_ids) + unseen != start + 1 or start != entry.start + moved:
                return None
            entry.start = start
        self.max_start += moved
        size, before = len(self._crossings), self._position
        self._position += moved
        if moved == 1:
            return self._crossings[self._position % size].copy()
        return [entry for at in range(before + 1, min(before + size, self._position) + 1) for entry in self._crossings[at % size]]

    def _advance_each(self, unseen: int) -> list[Scheduled] | None:
        """`advance` after a step with drafts, which has moved each sequence by its own count; returns all entries."""
        for entry in self.schedule.entries:
            start = entry.sequence.num_computed
            if len(entry.sequence) + unseen != start + 1 or start <= entry.start:
                return None
            entry.start = start
        self._arrange()
        return self.schedule.entries.copy()
