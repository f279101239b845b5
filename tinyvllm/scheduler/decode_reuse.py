"""Steps of decodes that only go on: what the next one needs is found once, and only what stands at a block's border is looked at again."""

from __future__ import annotations

from collections import Counter

from tinyvllm.request import Sequence
from tinyvllm.scheduler.schedule import Schedule, Scheduled


class ReusableDecode:
    """A schedule in which everybody that runs computes one token and samples, to be given again with each entry moved on.

    All move on together, so a sequence stands at the border of a block once in `block_size` steps, and which do is known beforehand.
    """

    def __init__(self, schedule: Schedule, block_size: int) -> None:
        self.schedule = schedule
        self.keys = Counter(entry.sequence.options.key for entry in schedule.entries)  # for whom a step computes how many tokens
        self.longest = max((entry.start for entry in schedule.entries), default=0)
        self._position = 0  # tokens that each has gone on since
        self._borders: list[list[Scheduled]] = [[] for _ in range(block_size)]  # by the position at which they have filled a block
        for entry in schedule.entries:
            self._borders[-entry.start % block_size].append(entry)

    @staticmethod
    def fits(schedule: Schedule, running: list[Sequence]) -> bool:
        """Whether a schedule is of decodes alone, those of all that run, in their order."""
        entries = schedule.entries
        if not entries or len(entries) != len(running):
            return False
        return all(e.num_tokens == e.num_logits == 1 and e.sequence is s for e, s in zip(entries, running, strict=True))

    def advance(self, unseen: int) -> list[Scheduled] | None:
        """Move every entry to where its sequence stands; those that have come to, or over, the border of a block since.

        None where somebody has not one token to compute, `unseen` of those already drawn not counted, or where the last step has not run:
        the schedule is of no use then.
        """
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
        self.longest += moved
        size, before = len(self._borders), self._position
        self._position += moved
        if moved == 1:
            return self._borders[self._position % size].copy()
        return [entry for at in range(before + 1, min(before + size, self._position) + 1) for entry in self._borders[at % size]]
