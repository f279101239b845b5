"""The prefix cache as sequences use it: hashes of their blocks, the match at admission, publication as blocks are computed."""

from __future__ import annotations

from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.request import Sequence
from tinyvllm.scheduler.inflight_prefix import InflightPrefixes
from tinyvllm.scheduler.recurrent import SequenceStates
from tinyvllm.windows import BlockGroups


class SequencePrefixes:
    """Without a `cache` nothing is found and nothing is published. `inflight` knows the blocks that are being computed. Where there are
    copies of recurrent `states`, a prefix ends where one of them was made.
    """

    def __init__(self, cache: PrefixCache | None, groups: BlockGroups, states: SequenceStates) -> None:
        self._cache, self._groups, self._block_size, self._states = cache, groups, groups.window.block_size, states
        self.inflight = InflightPrefixes(self._block_size)

    def find(self, sequence: Sequence) -> list[int]:
        """A table with the cached blocks of a waiting sequence's beginning. Takes no reference."""
        return self._cache.find(self._known_hashes(sequence)) if self._cache is not None else []

    def match(self, sequence: Sequence) -> list[int]:
        """The same blocks, held for the sequence; the scratch block in place of those before the window."""
        return self._cache.match(self._known_hashes(sequence)) if self._cache is not None else []

    def give_back(self, found: list[int]) -> None:
        """The sequence that blocks were matched for is not admitted."""
        if self._cache is not None:
            self._cache.pool.release(self._cache.held(found))

    def begin(self, sequence: Sequence, found: list[int]) -> None:
        """An admitted sequence starts after its cached blocks, which are held for it."""
        rows = self._groups.num_rows(found)
        sequence.block_table, sequence.num_computed, sequence.num_published = found, rows * self._block_size, rows
        sequence.num_freed = self._groups.window.first_block(sequence.num_computed)
        if rows and self._states.snapshots is not None:
            self._states.begin(sequence, sequence.block_hashes[rows - 1])
        if self._cache is not None and not sequence.num_preemptions:
            sequence.num_cached = sequence.num_computed
            self._cache.count(len(sequence), sequence.num_computed)

    def publish(self, sequence: Sequence) -> None:
        """Make its full blocks of known tokens findable."""
        full = min(sequence.num_computed, len(sequence)) // self._block_size
        if self._cache is not None and full > sequence.num_published:
            hashes, tokens_of, options = self._hashes(sequence, full), sequence.token_ids, sequence.options
            table, start = sequence.block_table, sequence.num_published
            name = None if options.adapter is None else options.adapter.name
            self._cache.publish(hashes, table, start, full, tokens_of, options.prefix_salt, options.owner, name)
            self.inflight.published(sequence, sequence.num_published, full)
        if sequence.copy_at and self._cache is not None:
            self._states.publish(sequence, self._hashes(sequence, full))
        sequence.num_published = max(full, sequence.num_published)

    def withdraw(self, sequence: Sequence) -> None:
        """It stops running: what it has not published, it never will."""
        self.inflight.published(sequence, sequence.num_published, len(sequence.block_hashes))

    def _known_hashes(self, sequence: Sequence) -> list[bytes]:
        """The hashes of all blocks of a waiting sequence that could be found. Its last token is always left to compute."""
        hashes, snapshots = self._hashes(sequence, (len(sequence) - 1) // self._block_size), self._states.snapshots
        while snapshots is not None and self._cache is not None and hashes:
            hashes = hashes[: snapshots.longest(hashes)]
            if (known := self._cache.known(hashes)) == len(hashes):
                break
            hashes = hashes[:known]
        return hashes

    def _hashes(self, sequence: Sequence, blocks: int) -> list[bytes]:
        assert self._cache is not None
        if len(sequence.block_hashes) < blocks:
            self._cache.extend(sequence.block_hashes, sequence.token_ids, blocks, sequence.options.prefix_salt)
        return sequence.block_hashes[:blocks]
