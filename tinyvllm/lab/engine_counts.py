"""What the lab reads off an engine: drafts by position, turns of sequences, and times of steps and of drafting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Row
from statistics import median
from typing import Any

from tinyvllm.engine.observer import EngineObserver
from tinyvllm.engine.output import ActiveRequest
from tinyvllm.errors import InternalError
from tinyvllm.lab.target import DraftCounts
from tinyvllm.request import Sequence
from tinyvllm.scheduler import Schedule
from tinyvllm.speculate.protocol import Controller, Draft, DraftRequest


class Counter(EngineObserver):
    """Counts of one batch, from `begin` on."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the last batch."""
        self.counts = DraftCounts(draft_ms=0.0)
        self._decodes = 0  # sequences of the step that runs, if it has decodes alone
        self._num_steps = 1
        self._last: tuple[int, float] | None = None  # sequences of the last step and when it was over
        self._seconds: dict[int, list[float]] = {}  # of steps, by their sequences

    def step_launched(self, schedule: Schedule, owners: Mapping[int, ActiveRequest], num_steps: int) -> None:
        decodes = sum(entry.start >= len(entry.sequence.prompt_token_ids) for entry in schedule.entries)
        self._decodes, self._num_steps = decodes if decodes == len(schedule.entries) else 0, num_steps
        self.counts.turns = (self.counts.turns or 0) + decodes * num_steps
        self.counts.steps += num_steps * bool(decodes)

    def step_finished(self) -> None:
        now = time.perf_counter()
        if self._last is not None and self._last[0] == self._decodes:
            self._seconds.setdefault(self._decodes, []).append((now - self._last[1]) / self._num_steps)
        self._last = self._decodes, now

    def drafts_checked(self, request: ActiveRequest, num_drafts: int, num_accepted: int) -> None:
        self.counts.add_chain(num_drafts, num_accepted)

    def step_ms(self, sequences: int) -> float:
        """The median of the times between steps that decode one token of each of this number of sequences."""
        if not self._seconds.get(sequences):
            raise InternalError(f"lab: no step had {sequences} decodes alone")
        return 1000 * median(self._seconds[sequences])

    def add_drafting(self, seconds: float) -> None:
        """A drafter took so long in one call."""
        self.counts.draft_ms = (self.counts.draft_ms or 0.0) + 1000 * seconds

    def timed(self, take_states: Callable[..., None]) -> Callable[..., None]:
        """The same function, whose time counts as drafting: heads extend their own cache by each step's states."""

        def take(*step: Any) -> None:
            start = time.perf_counter()
            take_states(*step)
            self.add_drafting(time.perf_counter() - start)

        return take


class CountedController:
    """A controller whose drafter's times are counted, too."""

    def __init__(self, inner: Controller, counter: Counter):
        self._inner, self._counter = inner, counter

    @property
    def pauses(self) -> bool:
        return self._inner.pauses

    def limits(self, sequences: Row[Sequence], num_sequences: int) -> list[int]:
        return self._inner.limits(sequences, num_sequences)

    def rest(self, sequences: Row[Sequence]) -> int:
        return self._inner.rest(sequences)

    def batch_pause(self, num_sequences: int) -> int:
        return self._inner.batch_pause(num_sequences)

    def choose(self, requests: Row[DraftRequest], drafts: Row[Draft], num_sequences: int) -> list[int]:
        return self._inner.choose(requests, drafts, num_sequences)

    def observe_proposal(self, num_drafts: int, seconds: float) -> None:
        self._counter.add_drafting(seconds)
        self._inner.observe_proposal(num_drafts, seconds)

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._inner.observe(sequence, num_drafts, num_accepted)

    def observe_step(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        self._inner.observe_step(num_sequences, num_drafts, seconds)

    def forget(self, sequence: Sequence) -> None:
        self._inner.forget(sequence)
