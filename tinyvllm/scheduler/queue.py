"""The waiting sequences and which is next: by priority, then by deadline, then the key that was served least, then by arrival.

Equal shares of keys are those of a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024): each key counts
the tokens computed for it, and the smallest count is next. A key that comes back starts from the smallest count of the waiting keys, or, if
none waits, from that of the key that left the queue last, so that a pause earns no credit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tinyvllm.request import Sequence

Rank = tuple[int, float, int]
_KEYS = 1024


def rank_of(sequence: Sequence) -> Rank:
    """Smaller is served first: priority, deadline in seconds of time.monotonic, number. Unique, and never changes."""
    return sequence.options.priority, sequence.due, sequence.sequence_id


class WaitingQueue:
    """One heap per key. Adding and taking cost a logarithm and a look at each key's first sequence.

    Deferred sequences stay counted and visible, but `first` skips them until `bring_back`.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[Rank, Sequence]]] = {}  # of the keys with waiting sequences; the first of each heap waits
        self._served: dict[str, int] = {}  # tokens, by key
        self._last_key = ""  # the key that left the queue last
        self._max_counts = _KEYS  # counts kept before the useless ones are dropped
        self._removed: set[int] = set()  # ids that are still in a heap
        self._deferred: dict[Sequence, None] = {}
        self._count = 0
        self.num_tokens = 0  # of all waiting sequences

    def __len__(self) -> int:
        return self._count

    @property
    def has_next(self) -> bool:
        """Whether there is a first sequence: one that is not deferred."""
        return bool(self._heaps)

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences by rank, without regard to the shares of keys."""
        entries = [entry for heap in self._heaps.values() for entry in heap if entry[1].sequence_id not in self._removed]
        entries += [(rank_of(sequence), sequence) for sequence in self._deferred]
        return (sequence for _, sequence in sorted(entries, key=lambda entry: entry[0]))

    def first(self) -> Sequence:
        """The next sequence to run; there must be one."""
        best: tuple[tuple[int, float, int, int], Sequence] | None = None
        for key, heap in self._heaps.items():
            (priority, due, number), sequence = heap[0]
            order = priority, due, self._served[key], number
            if best is None or order < best[0]:
                best = order, sequence
        assert best is not None, "WaitingQueue: the queue is empty"
        return best[1]

    def push(self, sequence: Sequence) -> None:
        key = sequence.options.key
        if key not in self._heaps:
            minimum = self._min_served()
            if len(self._served) >= self._max_counts:
                self._drop_counts(minimum)
            self._served[key] = max(self._served.get(key, 0), minimum)
            self._heaps[key] = []
        heapq.heappush(self._heaps[key], (rank_of(sequence), sequence))
        self._count += 1
        self.num_tokens += len(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out one that waits, deferred or not."""
        self._count -= 1
        self.num_tokens -= len(sequence)
        if sequence in self._deferred:
            del self._deferred[sequence]
            return
        key = sequence.options.key
        heap = self._heaps[key]
        self._removed.add(sequence.sequence_id)
        while heap and heap[0][1].sequence_id in self._removed:
            self._removed.discard(heapq.heappop(heap)[1].sequence_id)
        if not heap:
            del self._heaps[key]
            self._last_key = key

    def defer(self, sequence: Sequence) -> None:
        """Skip a waiting sequence from now on."""
        self.remove(sequence)
        self._deferred[sequence] = None
        self._count += 1
        self.num_tokens += len(sequence)

    def bring_back(self, sequence: Sequence) -> None:
        """A deferred sequence has its place again."""
        self.remove(sequence)
        self.push(sequence)

    def serve(self, key: str, tokens: int) -> None:
        """Count the tokens that a step computes for sequences of this key."""
        self._served[key] = self._served.get(key, 0) + tokens

    def _min_served(self) -> int:
        """The count that a key which comes back starts from at least."""
        return min((self._served[key] for key in self._heaps), default=self._served.get(self._last_key, 0))

    def _drop_counts(self, minimum: int) -> None:
        """Drop counts that would be raised to `minimum` anyway; with a key per user they would grow without end."""
        kept = {*self._heaps, self._last_key}
        self._served = {key: count for key, count in self._served.items() if count > minimum or key in kept}
        self._max_counts = max(_KEYS, 2 * len(self._served))
