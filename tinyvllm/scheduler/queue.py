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


def rank_of(sequence: Sequence) -> Rank:
    """Smaller is served first: priority, deadline in seconds of time.monotonic, number. Never changes and is never another's."""
    return sequence.terms.priority, sequence.due, sequence.sequence_id


class WaitingQueue:
    """A heap a key. Adding and taking cost a logarithm and a look at each key's first."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[Rank, Sequence]]] = {}
        self._served: dict[str, int] = {}  # tokens, by key
        self._removed: set[int] = set()  # ids that are still in a heap
        self._count = 0
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, by rank; whose turn it is among keys shows only as it comes."""
        entries = [entry for heap in self._heaps.values() for entry in heap if entry[1].sequence_id not in self._removed]
        return (sequence for _, sequence in sorted(entries, key=lambda entry: entry[0]))

    def push(self, sequence: Sequence) -> None:
        key = sequence.terms.key
        if key not in self._heaps:
            self._heaps[key] = []
            others = [self._served[other] for other in self._heaps if other != key]
            self._served[key] = max(self._served.get(key, 0), min(others, default=0))
        heapq.heappush(self._heaps[key], (rank_of(sequence), sequence))
        self._count += 1
        self.num_tokens += len(sequence)

    def first(self) -> Sequence:
        """Whose turn it is; the queue must not be empty."""
        best: tuple[tuple[int, float, int, int], Sequence] | None = None
        for key in tuple(self._heaps):
            heap = self._heaps[key]
            while heap and heap[0][1].sequence_id in self._removed:
                self._removed.discard(heapq.heappop(heap)[1].sequence_id)
            if not heap:
                del self._heaps[key]  # its count stays
                continue
            (priority, due, number), sequence = heap[0]
            order = priority, due, self._served[key], number
            if best is None or order < best[0]:
                best = order, sequence
        assert best is not None, "WaitingQueue: nobody waits"
        return best[1]

    def remove(self, sequence: Sequence) -> None:
        """Take out one that waits."""
        heap = self._heaps[sequence.terms.key]
        if heap and heap[0][1] is sequence:
            heapq.heappop(heap)
        else:
            self._removed.add(sequence.sequence_id)
        self._count -= 1
        self.num_tokens -= len(sequence)

    def serve(self, sequence: Sequence, tokens: int) -> None:
        """So many tokens are computed for the sequence's key."""
        key = sequence.terms.key
        self._served[key] = self._served.get(key, 0) + tokens
