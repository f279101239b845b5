"""When copies of recurrent states are made, and which a sequence begins from. Integers only.

Of each prompt one is made at its last full block, from which the next turn of a conversation continues, and one at every multiple of EVERY
tokens; while a sequence is continued, at every multiple of EVERY_DECODED. A step makes one copy a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from tinyvllm.cache.snapshots import StateSnapshots
from tinyvllm.request import Sequence
from tinyvllm.scheduler.schedule import Scheduled

EVERY, EVERY_DECODED = 2048, 256  # tokens, rounded down to blocks


class SequenceStates:
    """The copies as sequences use them; `snapshots` is None where there are none."""

    def __init__(self, snapshots: StateSnapshots | None, block_size: int) -> None:
        self.snapshots, self._block_size = snapshots, block_size
        self._every, self._every_decoded = (max(1, tokens // block_size) * block_size for tokens in (EVERY, EVERY_DECODED))

    def begin(self, sequence: Sequence, hash: bytes) -> None:
        """An admitted sequence continues from the copy that belongs to its last cached block."""
        assert self.snapshots is not None
        sequence.state_source = self.snapshots.read(hash)

    def plan_copies(self, entries: Row[Scheduled]) -> None:
        """Choose slots for the copies that a step makes."""
        for entry in entries if self.snapshots is not None else ():
            sequence = entry.sequence
            if not sequence.copy_at and (at := self._place(entry)) and not self._known(sequence, at):
                self._take(sequence, at)

    def launched(self, sequence: Sequence) -> None:
        """The step that reads its copy has been launched: its state is in its own slot from now on."""
        if sequence.state_source >= 0 and self.snapshots is not None:
            self.snapshots.release(sequence.state_source)
        sequence.state_source = -1

    def publish(self, sequence: Sequence, hashes: Row[bytes]) -> None:
        """Make a copy findable that has been made; `hashes` are those of the sequence's full blocks."""
        blocks = sequence.copy_at // self._block_size
        if self.snapshots is not None and 0 < blocks <= len(hashes):
            self.snapshots.publish(hashes[blocks - 1], sequence.copy_slot)
            sequence.copy_at = 0

    def stop(self, sequence: Sequence) -> None:
        """It runs no longer."""
        self.launched(sequence)
        if sequence.copy_at and self.snapshots is not None:
            self.snapshots.discard(sequence.copy_slot)
            sequence.copy_at = 0

    def _place(self, entry: Scheduled) -> int:
        """After how many tokens a copy is made in this step, or for a decode in one of the next; 0 for none."""
        size, start, end = self._block_size, entry.start, entry.start + entry.num_tokens
        if entry.is_decode and entry.sequence.output_token_ids:
            at = (start // size + 1) * size
            return at if at % self._every_decoded == 0 else 0
        last = (len(entry.sequence) - 1) // size * size
        at = last if start < last <= end else end // self._every * self._every
        return at if at > start else 0

    def _known(self, sequence: Sequence, at: int) -> bool:
        blocks = at // self._block_size
        return blocks <= len(sequence.block_hashes) and self.snapshots is not None and sequence.block_hashes[blocks - 1] in self.snapshots

    def _take(self, sequence: Sequence, at: int) -> None:
        assert self.snapshots is not None
        if (slot := self.snapshots.take()) is not None:
            sequence.copy_slot, sequence.copy_at = slot, at
