"""Who waits, and who is next: by priority, then by deadline, then whose key has had least, then by arrival.

Equal shares of keys are those of a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024): each key counts
the tokens computed for it, the smallest count goes first, and a key that comes back starts from the smallest count of those that wait, or
from that of the one that left last where nobody does, so that nobody saves up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tinyvllm.request import Sequence

Rank = tuple[int, float, int]
_KEYS = 1024


def rank_of(sequence: Sequence) -> Rank:
    """Smaller is served first: priority, deadline in seconds of time.monotonic, number. Never changes and is never another's."""
    return sequence.options.priority, sequence.due, sequence.sequence_id


class WaitingQueue:
    """A heap a key. Adding and taking cost a logarithm and a look at each key's first.

    Who is set aside waits like everybody, is counted and seen, but it is not his turn before he is brought back.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[Rank, Sequence]]] = {}  # of the keys for whom somebody waits; the first of each is alive
        self._served: dict[str, int] = {}  # tokens, by key
        self._left = ""  # the key that went last of those that wait
        self._most = _KEYS  # counts kept before those are dropped that say nothing
        self._removed: set[int] = set()  # ids that are still in a heap
        self._aside: dict[Sequence, None] = {}
        self._count = 0
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return self._count

    @property
    def has_next(self) -> bool:
        """Whether there is a first."""
        return bool(self._heaps)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, by rank; whose turn it is among keys shows only as it comes."""
        entries = [entry for heap in self._heaps.values() for entry in heap if entry[1].sequence_id not in self._removed]
        entries += [(rank_of(sequence), sequence) for sequence in self._aside]
        return (sequence for _, sequence in sorted(entries, key=lambda entry: entry[0]))

    def push(self, sequence: Sequence) -> None:
        key = sequence.options.key
        if key not in self._heaps:
            least = self._least()
            if len(self._served) >= self._most:
                self._drop_counts(least)
            self._served[key] = max(self._served.get(key, 0), least)
            self._heaps[key] = []
        heapq.heappush(self._heaps[key], (rank_of(sequence), sequence))
        self._count += 1
        self.num_tokens += len(sequence)

    def _least(self) -> int:
        """What a key that comes back is lifted to."""
        return min((self._served[key] for key in self._heaps), default=self._served.get(self._left, 0))

    def _drop_counts(self, least: int) -> None:
        """Those that would be lifted to as much or more; with a key a user there would be no end to them."""
        kept = {*self._heaps, self._left}
        self._served = {key: count for key, count in self._served.items() if count > least or key in kept}
        self._most = max(_KEYS, 2 * len(self._served))

    def first(self) -> Sequence:
        """Whose turn it is; there must be one."""
        best: tuple[tuple[int, float, int, int], Sequence] | None = None
        for key, heap in self._heaps.items():
            (priority, due, number), sequence = heap[0]
            order = priority, due, self._served[key], number
            if best is None or order < best[0]:
                best = order, sequence
        assert best is not None, "WaitingQueue: nobody waits"
        return best[1]

    def remove(self, sequence: Sequence) -> None:
        """Take out one that waits."""
        self._count -= 1
        self.num_tokens -= len(sequence)
        if sequence in self._aside:
            del self._aside[sequence]
            return
        key = sequence.options.key
        heap = self._heaps[key]
        self._removed.add(sequence.sequence_id)
        while heap and heap[0][1].sequence_id in self._removed:
            self._removed.discard(heapq.heappop(heap)[1].sequence_id)
        if not heap:
            del self._heaps[key]
            self._left = key

    def set_aside(self, sequence: Sequence) -> None:
        """One that waits is passed over from now on."""
        self.remove(sequence)
        self._aside[sequence] = None
        self._count += 1
        self.num_tokens += len(sequence)

    def bring_back(self, sequence: Sequence) -> None:
        """One that was set aside has its place again."""
        self.remove(sequence)
        self.push(sequence)

    def serve(self, key: str, tokens: int) -> None:
        """So many tokens are computed for sequences of this key."""
        self._served[key] = self._served.get(key, 0) + tokens
