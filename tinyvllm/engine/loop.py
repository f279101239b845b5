"""How a schedule runs: loops with one protocol. PlainLoop is the specification; the others give the same tokens sooner.

Each loop gets the loop that runs what it cannot speed up, so that they stack: drafts (draft_loop.py) over multi-step over run-ahead over
plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tinyvllm.engine.pipeline_loop import PipelineLoop
from tinyvllm.engine.stages import Stages, Step
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.scheduler import Schedule

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Reading


class StepLoop(Protocol):
    """Runs schedules, and appends the tokens that are drawn to their requests."""

    @property
    def in_flight(self) -> bool:
        """Whether the device runs a step whose tokens are not appended yet."""
        ...

    def follow(self) -> bool:
        """Append the tokens of the step in flight, if there is one; True if the next one was launched before that."""
        ...

    def read(self) -> None:
        """Append the tokens of the step in flight, if there is one, and launch nothing."""
        ...

    def run(self, schedule: Schedule) -> None:
        """Run a schedule that is not empty. Nothing is in flight."""
        ...

    def discard(self) -> None:
        """Forget the step in flight, if there is one: its sequences are computed again."""
        ...


class PlainLoop:
    """One step at a time: the host appends each token before it schedules the next."""

    in_flight = False

    def __init__(self, stages: Stages):
        self.stages = stages

    def follow(self) -> bool:
        return False

    def read(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def run(self, schedule: Schedule) -> None:
        step = self.stages.prepare(schedule)
        logits = self.stages.launch(step)
        if not step.sequences:  # parts of prompts only
            self.stages.observer.phase_ended("run")
        else:
            failures = self.stages.constrain(step, logits)
            (tokens,) = self.stages.sample(step, logits)
            self.stages.append(step, logits, tokens, failures)
        self.stages.pass_states(step.inputs, logits)


class MultiStepLoop:
    """Several decode steps in a row on the device (num_scheduler_steps); the host appends the tokens of one while the next one runs."""

    def __init__(self, stages: Stages, single: StepLoop, max_steps: int):
        """`single` runs the schedules that the host must follow token by token."""
        self.stages, self.single, self.max_steps = stages, single, max_steps

    @property
    def in_flight(self) -> bool:
        return self.single.in_flight

    def follow(self) -> bool:
        return self.single.follow()

    def read(self) -> None:
        self.single.read()

    def discard(self) -> None:
        self.single.discard()

    def run(self, schedule: Schedule) -> None:
        num_steps = self._num_steps(schedule)
        if num_steps == 1:
            self.single.run(schedule)
            return
        step = self.stages.prepare(schedule)
        logits = self.stages.launch(step, num_steps)
        self.stages.constrain(step, logits)
        for tokens in self.stages.sample(step, logits, num_steps):
            self.stages.append_rounds(step, tokens)
        self.stages.observer.phase_ended("run")

    def _num_steps(self, schedule: Schedule) -> int:
        """How many tokens each sequence may get before the host must look; blocks for them are reserved."""
        stages, sequences = self.stages, [entry.sequence for entry in schedule.entries]
        if not _decodes_only(schedule) or stages.scheduler.waiting or stages.needs_host(sequences):
            return 1
        wanted = max(self.max_steps if s.params.max_tokens is None else s.params.max_tokens - len(s.output_token_ids) for s in sequences)
        room = min(stages.runner.max_model_len - len(s) for s in sequences)
        return stages.scheduler.reserve(schedule, max(1, min(self.max_steps, wanted, room)))


@dataclass(frozen=True)
class _InFlight:
    step: Step
    tokens: Reading


class RunAheadLoop:
    """Decodes one step ahead of the host: the next step is launched before the tokens of the last one are read.

    A step that is computed for a sequence that turns out to have ended is surplus. It may write into blocks that were given to another
    sequence meanwhile, but that one's own writes come after it on the device.
    """

    def __init__(self, stages: Stages, single: StepLoop):
        """`single` runs prefills, and the schedules that the host must follow token by token."""
        self.stages, self.single = stages, single
        self._in_flight: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def follow(self) -> bool:
        last, self._in_flight = self._in_flight, None
        if last is None:
            return False
        stages = self.stages
        schedule = stages.scheduler.follow(last.step.schedule) if self._continues(last.step) else None
        stages.observer.phase_ended("schedule")
        try:
            if schedule is not None:
                inputs = stages.runner.prepare(schedule)
                self._launch(Step(schedule, inputs, [entry.sequence for entry in inputs.logit_rows], last.step.flags))
        finally:  # a launch that fails must not lose the tokens of the last step
            self._append(last)
        return schedule is not None

    def read(self) -> None:
        last, self._in_flight = self._in_flight, None
        if last is not None:
            self._append(last)

    def discard(self) -> None:
        self._in_flight = None

    def run(self, schedule: Schedule) -> None:
        if _decodes_only(schedule) and not self.stages.needs_host([entry.sequence for entry in schedule.entries]):
            self._launch(self.stages.prepare(schedule))
        else:
            self.single.run(schedule)

    def _launch(self, step: Step) -> None:
        self._in_flight = _InFlight(step, self.stages.launch_whole(step))

    def _append(self, last: _InFlight) -> None:
        tokens = last.tokens.get()[: len(last.step.sequences)]
        self.stages.observer.phase_ended("run")
        self.stages.append_rounds(last.step, tokens.reshape(1, -1))

    def _continues(self, step: Step) -> bool:
        """Whether a sequence wants another token, as far as that is known without reading its last one."""
        if self.stages.scoring:
            return False
        return any(s.params.max_tokens is None or len(s.output_token_ids) + 1 < s.params.max_tokens for s in step.sequences)


def new_loop(stages: Stages, max_steps: int, run_ahead: bool, pipeline: int = 1) -> StepLoop:
    """The loop for `num_scheduler_steps`, `async_scheduling`, or `pipeline_parallel_size`, which excludes the others."""
    if pipeline > 1:
        return PipelineLoop(stages, pipeline)
    loop: StepLoop = PlainLoop(stages)
    if run_ahead:
        loop = RunAheadLoop(stages, loop)
    if max_steps > 1:
        loop = MultiStepLoop(stages, loop, max_steps)
    return loop


def _decodes_only(schedule: Schedule) -> bool:
    return all(entry.is_decode for entry in schedule.entries)
