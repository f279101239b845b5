"""Which running sequences are computing which blocks, so that others with the same prefix can wait for these blocks and share them.

Without it, requests that arrive together compute a common prefix once each: a block can be found only after it was computed.
"""

from __future__ import annotations

from tinyvllm.request import Sequence
from tinyvllm.scheduler.queue import rank_of

MIN_TOKENS = 64  # a shorter common prefix is not waited for: it saves no more than starting a step earlier does


class InflightPrefixes:
    """Blocks that running sequences have yet to compute, by hash. Any number of sequences may wait for a block, but never for one that is
    computed by a sequence of lower rank. `min_blocks` is the shortest prefix to wait for.
    """

    def __init__(self, block_size: int) -> None:
        self.min_blocks = -(-MIN_TOKENS // block_size)
        self._computing: dict[bytes, Sequence] = {}  # by block
        self._waiting: dict[Sequence, bytes] = {}  # and the last block that each waits for

    def register(self, sequence: Sequence) -> None:
        """It runs, and will compute those of its hashed blocks that are not published."""
        for block in sequence.block_hashes[sequence.num_published :]:
            self._computing.setdefault(block, sequence)

    def published(self, sequence: Sequence, start: int, stop: int) -> None:
        """Its blocks start..stop are published, or never will be."""
        if self._computing:
            for block in sequence.block_hashes[start:stop]:
                if self._computing.get(block) is sequence:
                    del self._computing[block]

    def wait_for(self, sequence: Sequence, num_found: int) -> bool:
        """Whether a sequence whose first `num_found` blocks are cached should wait for the next ones; `ready` returns it later."""
        if not self._computing:
            return False
        rank, wanted = rank_of(sequence), sequence.block_hashes[num_found:]
        count = next((i for i, block in enumerate(wanted) if (by := self._computing.get(block)) is None or rank_of(by) > rank), len(wanted))
        if count < self.min_blocks:
            return False
        self._waiting[sequence] = wanted[count - 1]
        return True

    def ready(self) -> list[Sequence]:
        """Sequences whose blocks are published or no longer computed by any other; they no longer wait."""
        ready = [sequence for sequence, block in self._waiting.items() if block not in self._computing]
        for sequence in ready:
            del self._waiting[sequence]
        return ready

    def discard(self, sequence: Sequence) -> None:
        """A sequence that may have been waiting has ended."""
        self._waiting.pop(sequence, None)
