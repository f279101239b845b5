"""Steps of a model in several stages: as many are in flight as there are stages, over different sequences, so that no stage waits for work.

A sequence whose step is in flight has no token to compute, so the next schedule passes it over: it takes others, or the next chunk of the
same prompt. Every stage runs steps, and copies of blocks, in the order in which they are announced: a block that is given to another
sequence, or found in the prefix cache, while it is written is written before.
"""

from __future__ import annotations

from collections import deque

from tinyvllm.engine.stages import AnnouncedStep, Stages
from tinyvllm.scheduler import Schedule


class PipelineLoop:
    """Announces a step before it finishes the oldest one. Nothing is preempted while steps are in flight."""

    def __init__(self, stages: Stages, depth: int):
        """`depth` is the number of stages."""
        self.stages, self._depth = stages, depth
        self._steps: deque[AnnouncedStep] = deque()
        stages.scheduler.groups = depth

    @property
    def in_flight(self) -> bool:
        return bool(self._steps)

    def follow(self) -> bool:
        if not self._steps:
            return False
        self._go_on()
        return True

    def read(self) -> None:
        while self._steps:
            self._finish()

    def run(self, schedule: Schedule) -> None:
        self._announce(schedule)
        self._go_on()

    def _go_on(self) -> None:
        """Announce what may run next to the steps in flight, and finish the oldest of them."""
        while len(self._steps) < self._depth and self._may_add():
            schedule = self.stages.schedule()
            if schedule.empty:
                break
            self._announce(schedule)
        self._finish()

    def _announce(self, schedule: Schedule) -> None:
        self._steps.append(self.stages.announce(schedule))
        self.stages.scheduler.in_flight = len(self._steps)

    def discard(self) -> None:
        """Their keys and values are computed: some of their blocks may be in the prefix cache."""
        while self._steps:
            self.stages.runner.finish(self._steps[0].inputs, self._steps[0].announced)
            self._take()

    def _finish(self) -> None:
        oldest = self._steps[0]  # in flight until it has run: every later call fails, too, if ranks have ended
        step = self.stages.prepare_draw(oldest)
        logits = self.stages.finish(step, oldest.announced)
        self._take()
        self.stages.draw(step, logits)

    def _take(self) -> None:
        """The oldest step has run."""
        self._steps.popleft()
        scheduler = self.stages.scheduler
        scheduler.in_flight = len(self._steps)
        # a share of the decodes in a step that runs alone would be the same ones each time
        scheduler.groups = self._depth if self._has_room() else 1

    def _may_add(self) -> bool:
        """Whether there may be something to run next to the steps in flight."""
        scheduler = self.stages.scheduler
        idle = any(len(sequence) > sequence.num_computed for sequence in scheduler.running)
        return (idle or scheduler.waiting.has_next) and self._has_room()

    def _has_room(self) -> bool:
        """Whether a step can be chosen without a preemption, and nothing has to run alone."""
        scheduler, pool = self.stages.scheduler, self.stages.scheduler.pool
        if self.stages.scoring or scheduler.max_admissions is not None:
            return False
        return pool.num_free > scheduler.limits.max_batched_tokens // pool.block_size + len(scheduler.running)
