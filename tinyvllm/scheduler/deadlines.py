"""Which sequences have deadlines, and which of them are late."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from tinyvllm.request import Sequence


class Deadlines:
    """The unfinished sequences with deadlines. `clock` gives seconds on the clock of `Sequence.arrival`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._sequences: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Watch those of the sequences that have a deadline."""
        self._sequences.update((sequence, None) for sequence in sequences if sequence.due < math.inf)

    def discard(self, sequence: Sequence) -> None:
        self._sequences.pop(sequence, None)

    def late(self) -> list[Sequence]:
        """Sequences past their whole deadline, or past that of the first token without having one."""
        if not self._sequences:
            return []
        now = self.clock()
        return [sequence for sequence in self._sequences if _is_late(sequence, now)]


def _is_late(sequence: Sequence, now: float) -> bool:
    options = sequence.options
    if options.deadline_ms is not None and now > sequence.arrival + options.deadline_ms / 1000:
        return True
    first = options.ttft_deadline_ms
    return first is not None and not sequence.output_token_ids and now > sequence.arrival + first / 1000
