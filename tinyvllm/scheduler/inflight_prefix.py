"""Who computes which blocks at this moment, so that others that begin with them can wait for that and share them.

Without it, requests that arrive together compute a common beginning once each: a block can be found when it is computed, and not before.
"""

from __future__ import annotations

from tinyvllm.request import Sequence
from tinyvllm.scheduler.queue import rank_of

WORTH = 64  # tokens; for fewer nobody waits: a step less in the queue is worth as much


class InflightPrefixes:
    """Blocks that running sequences have before them, by hash. Any number may wait for them; none waits for who ranks behind it."""

    def __init__(self, block_size: int) -> None:
        self._leaders: dict[bytes, Sequence] = {}
        self._followers: dict[Sequence, bytes] = {}  # and the last block that each waits for
        self._worth = -(-WORTH // block_size)

    def lead(self, sequence: Sequence) -> None:
        """It runs, and will compute those of its hashed blocks that are not published."""
        for block in sequence.block_hashes[sequence.num_published :]:
            self._leaders.setdefault(block, sequence)

    def passed(self, sequence: Sequence, start: int, stop: int) -> None:
        """Its blocks start..stop are published, or will never be."""
        if self._leaders:
            for block in sequence.block_hashes[start:stop]:
                if self._leaders.get(block) is sequence:
                    del self._leaders[block]

    def follow(self, sequence: Sequence, found: int) -> bool:
        """Whether a sequence whose first `found` blocks are there had better wait for the next ones; then `ready` names it in its time."""
        if not self._leaders:
            return False
        rank, wanted = rank_of(sequence), sequence.block_hashes[found:]
        count = next((i for i, block in enumerate(wanted) if (by := self._leaders.get(block)) is None or rank_of(by) > rank), len(wanted))
        if count < self._worth:
            return False
        self._followers[sequence] = wanted[count - 1]
        return True

    def ready(self) -> list[Sequence]:
        """Those for whom nobody computes anything any more; they are followers no longer."""
        ready = [sequence for sequence, block in self._followers.items() if block not in self._leaders]
        for sequence in ready:
            del self._followers[sequence]
        return ready

    def leave(self, sequence: Sequence) -> None:
        """A follower, or nobody, is over."""
        self._followers.pop(sequence, None)
