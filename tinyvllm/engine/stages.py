"""The stages of a step: schedule, prepare, launch, constrain, sample, append. The loops in loop.py put them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm.engine.constraints import Failures, TokenConstraints
from tinyvllm.engine.observer import LAUNCH_ENDED, LAUNCH_STARTED, EngineObserver, Marks
from tinyvllm.engine.requests import ActiveRequests
from tinyvllm.engine.scoring import PromptScoring
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Sequence
from tinyvllm.runner.drawing import draw_tokens
from tinyvllm.scheduler import Schedule, Scheduler

if TYPE_CHECKING:
    from tinygrad import Tensor

    from tinyvllm.runner.ranked import Announced
    from tinyvllm.runner.runner import Logits, PreparedStep, Reading, Runner
    from tinyvllm.sampling.sampler import Rows, Sampler, SamplingFlags


@dataclass(frozen=True)
class Step:
    """One step on its way: what the scheduler chose, its inputs on the device, and the sequence of each row of logits."""

    schedule: Schedule
    inputs: PreparedStep
    sequences: list[Sequence]
    flags: SamplingFlags


@dataclass(frozen=True)
class AnnouncedStep:
    """One step on its way through the processes of a pipeline."""

    schedule: Schedule
    inputs: PreparedStep
    sequences: list[Sequence]
    announced: Announced


class Stages:
    """One method a stage, each for one step of one engine."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        constraints: TokenConstraints,
        requests: ActiveRequests,
        scoring: PromptScoring,
        observer: EngineObserver,
    ):
        self.runner, self.sampler, self.constraints = runner, sampler, constraints
        self.requests, self.scoring, self.observer = requests, scoring, observer
        self.on_states: Callable[[PreparedStep, Tensor], None] | None = None  # called with the hidden states of each step, if wanted
        self.marks: Marks | None = None  # of the trace that runs, if there is one
        self.scheduled: Schedule | None = None  # the last schedule; None while the next one is chosen

    @property
    def scheduler(self) -> Scheduler:
        return self.requests.scheduler

    def schedule(self) -> Schedule:
        """Choose what runs. Before it runs, ended and preempted sequences are dealt with, and blocks are where it needs them."""
        self.scheduled = None
        self.scheduled = schedule = self.scheduler.schedule()
        if not schedule.reused:
            self.observer.step_scheduled(schedule)
            self.requests.settle(schedule)
            self._move_blocks(schedule)
        self.observer.phase_ended("schedule")
        if not schedule.reused:
            self.requests.join_sampler(schedule)
        return schedule

    def forget_device_state(self) -> None:
        """After a step that failed: nothing that the device was given by earlier steps is relied on any more."""
        self.runner.forget_device_state()
        self.sampler.forget_device_state()
        self.constraints.forget_masks()

    def _move_blocks(self, schedule: Schedule) -> None:
        if schedule.swap_out or schedule.swap_in or schedule.copies:
            start = time.perf_counter()
            self.runner.move(schedule)
            self.observer.blocks_moved(schedule, time.perf_counter() - start)

    def prepare(self, schedule: Schedule) -> Step:
        """Lay the step out on the device, and start to compute the masks of its grammars."""
        inputs = self.runner.prepare(schedule)
        sequences = [entry.sequence for entry in inputs.logit_rows]
        flags = self.sampler.prepare(sequences, inputs.num_logits, schedule.reused)
        self.constraints.start_masks(sequences)
        return Step(schedule, inputs, sequences, flags)

    def prepare_rows(self, inputs: PreparedStep, rows: Rows) -> SamplingFlags:
        """The sampler's part of `prepare` where a sequence has several rows of logits, or none is drawn from some of them."""
        flags = self.sampler.prepare(rows, inputs.num_logits)
        self.constraints.start_masks(list(dict.fromkeys(sequence for sequence in rows if sequence is not None)))
        return flags

    def draw_rows(self, inputs: PreparedStep, rows: Rows, logits: Logits, flags: SamplingFlags) -> tuple[list[int], Failures]:
        """The tokens of the rows as last prepared, and the sequences for which that failed."""
        failures = self.constraints.apply(logits.logits, rows)
        use_best = not self.constraints.edit_logits(rows)
        (tokens,) = draw_tokens(self.runner, self.sampler, inputs, logits, flags, 1, use_best=use_best, advance=False)
        return tokens[0, : len(rows)].tolist(), failures

    def draws_by_turns(self, sequence: Sequence) -> bool:
        """Whether a token of the sequence changes what the next one is drawn with: it has one row in a draw."""
        return self.sampler.changes_with_tokens(sequence) or self.constraints.need_host([sequence])

    def launch(self, step: Step, num_steps: int = 1) -> Logits:
        """Start the forward pass. The scheduler counts the tokens of all `num_steps` as computed."""
        self.observer.phase_ended("prepare")
        self.observer.step_launched(step.schedule, self.requests.owners, num_steps)
        if self.marks is not None and self.marks.phases:
            self.marks += (LAUNCH_STARTED, time.perf_counter())
        logits = self.runner.launch(step.inputs)
        if self.marks is not None and self.marks.phases:
            self.marks += (LAUNCH_ENDED, time.perf_counter())
        self.scheduler.advance(step.schedule, num_steps)
        return logits

    def announce(self, schedule: Schedule) -> AnnouncedStep:
        """Let the other processes of a pipeline run a schedule. Its draw is prepared later."""
        inputs = self.runner.prepare(schedule)
        self.observer.phase_ended("prepare")
        self.observer.step_launched(schedule, self.requests.owners, 1)
        announced = self.runner.announce(inputs)
        self.scheduler.advance(schedule)
        return AnnouncedStep(schedule, inputs, [entry.sequence for entry in inputs.logit_rows], announced)

    def prepare_draw(self, announced: AnnouncedStep) -> Step:
        """The sampler's part of `prepare`, once the tokens of all earlier steps are known. None is drawn for sequences that have ended."""
        rows = [None if sequence.finished else sequence for sequence in announced.sequences]
        return Step(announced.schedule, announced.inputs, announced.sequences, self.prepare_rows(announced.inputs, rows))

    def finish(self, step: Step, announced: Announced) -> Logits:
        """Run this process's part of a step that others have run."""
        if self.marks is not None and self.marks.phases:
            self.marks += (LAUNCH_STARTED, time.perf_counter())
        logits = self.runner.finish(step.inputs, announced)
        if self.marks is not None and self.marks.phases:
            self.marks += (LAUNCH_ENDED, time.perf_counter())
        return logits

    def draw(self, step: Step, logits: Logits) -> None:
        """Draw the tokens of a step that has run, and append them, as `prepare_draw` has prepared it."""
        rows = [None if sequence.finished else sequence for sequence in step.sequences]
        if not any(rows):
            self.observer.phase_ended("run")
            return
        tokens, failures = self.draw_rows(step.inputs, rows, logits, step.flags)
        self.append(step, logits, np.array([tokens]), failures)

    def launch_whole(self, step: Step) -> Reading:
        """Start forward pass, draw and advance of a step of decodes as one launch; its tokens [B] are read later."""
        inputs, flags = step.inputs, step.flags
        if self.marks is not None and self.marks.phases:
            self.marks += (LAUNCH_STARTED, time.perf_counter())
        tokens = self.runner.decode(inputs, self.sampler.step(inputs.num_logits, flags), flags, plain=not flags)
        if self.marks is not None and self.marks.phases:
            self.marks += (LAUNCH_ENDED, time.perf_counter())
        self.sampler.mark_drawn(inputs.num_logits, flags, 1)
        self.observer.step_launched(step.schedule, self.requests.owners, 1)
        self.scheduler.advance(step.schedule)
        self.observer.phase_ended("prepare")
        return tokens

    def constrain(self, step: Step, logits: Logits) -> Failures:
        """Send the masks and run the logits processors; the sequences for which that failed, and why."""
        return self.constraints.apply(logits.logits, step.sequences)

    def sample(self, step: Step, logits: Logits, num_steps: int = 1) -> Iterator[np.ndarray]:
        """Draw the tokens of the step, and of `num_steps` - 1 more that the device runs by itself: tokens [n, B] as they come."""
        edited = self.constraints.edit_logits(step.sequences)
        stays = not step.inputs.decodes or self.requests.has_beams(step.sequences)
        return draw_tokens(self.runner, self.sampler, step.inputs, logits, step.flags, num_steps, use_best=not edited, advance=not stays)

    def append(self, step: Step, logits: Logits, tokens: np.ndarray, failures: Failures) -> None:
        """Append the tokens [1, B] of one step to their sequences, with the log-probabilities that requests want."""
        self.observer.phase_ended("run")
        drawn = tokens[0, : len(step.sequences)].tolist()
        logprobs = self.sampler.logprobs(logits.logits, step.sequences, drawn)
        self.observer.phase_ended("sample")
        for sequence, token, logprob in zip(step.sequences, drawn, logprobs, strict=True):
            if sequence.sequence_id in failures:
                self.requests.finish(sequence, "error", failures[sequence.sequence_id])
            else:
                self.requests.append(sequence, token, logprob)

    def pass_states(self, inputs: PreparedStep, logits: Logits) -> None:
        """Hand out the hidden states of a step whose tokens are appended."""
        if self.on_states is not None and logits.states is not None:
            self.on_states(inputs, logits.states)

    def append_rounds(self, step: Step, tokens: np.ndarray) -> None:
        """Append the tokens [n, B] of several steps. Those after the end of a sequence are surplus: the device could not know of it."""
        for b, sequence in enumerate(step.sequences):
            for token in tokens[:, b].tolist():
                if not sequence.finished:
                    self.requests.append(sequence, token, None)

    def needs_host(self, sequences: list[Sequence]) -> bool:
        """Whether the host has something to do between a token of these sequences and the next."""
        return (
            bool(self.scoring)
            or self.sampler.withholds(sequences)
            or self.constraints.need_host(sequences)
            or any(s.logprobs is not None for s in sequences)
        )
