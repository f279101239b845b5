"""The loop that checks drafts: a step computes the last known token of a sequence and its drafts, and keeps what would have come anyway.

The token of every position is drawn as without drafts: from the same logits, by the same seed and position, after the same penalties,
masks and filters. So tokens and log-probabilities are those of PlainLoop (docs/decisions/0035-drafts-are-rows-of-decodes.md).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinyvllm.engine.constraints import Failures
from tinyvllm.engine.loop import StepLoop
from tinyvllm.engine.speculation import Drafts, Speculation
from tinyvllm.engine.stages import Stages, Step
from tinyvllm.host_memory import is_out_of_memory
from tinyvllm.request import Sequence
from tinyvllm.scheduler import Schedule, Scheduled
from tinyvllm.scheduler.drafts import add_drafts, count_confirmed, num_confirmed
from tinyvllm.speculate.policies import EXACT, Policy

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Logits
    from tinyvllm.sampling.sampler import Rows


MAX_FAILED_CHECKS = 3  # steps with drafts that raised, memory that ran out not counted; then there are no more drafts
TIMED = 4  # looks in vain, of which one's step is timed: drafts are weighed against what steps without them cost


class SpeculativeLoop:
    """Runs steps with drafts; `single` runs those without, at its own speed.

    A step that raises runs again without drafts (recovery.py): its sequences get none any more, and no others while it recovers. So a
    failure that drafts cause, by their rows or their memory, ends no request.
    """

    def __init__(self, stages: Stages, single: StepLoop, speculation: Speculation, policy: Policy = EXACT):
        self.stages, self.single, self.speculation, self.policy = stages, single, speculation, policy
        self._must_read = False  # the tokens of the step in flight may have drafts after them
        self._withheld: set[int] = set()  # ids of sequences that had drafts in a step that raised
        self._num_failed = self._num_vain = 0
        self._launched: float | None = None  # when the step in flight was launched, if the time from there to the next one is wanted

    @property
    def in_flight(self) -> bool:
        return self.single.in_flight

    def read(self) -> None:
        self._must_read, self._launched = False, None
        self.single.read()

    def discard(self) -> None:
        self._must_read, self._launched = False, None
        self.single.discard()

    def follow(self) -> bool:
        if not self.single.in_flight:
            return False
        speculation, schedule = self.speculation, self.stages.scheduled
        if self._must_read or schedule is None:
            self.read()
            return False
        rests = schedule.reused and len(speculation.rest_output) < speculation.rest_until
        if rests and self._launched is None:
            return self.single.follow()
        return self._follow(schedule, rests or speculation.rests(schedule))

    def _follow(self, schedule: Schedule, rests: bool) -> bool:
        """`follow` where the next step's time is wanted, or where drafts may follow the step in flight."""
        captures, start, self._launched = self.stages.runner.capture_work().count, self._launched, None
        if not self.single.follow():
            return False
        if start is not None:
            self._time(len(schedule.entries), 0, start, captures)
        if not rests or (start is None and self._is_timed()):
            self._launched = time.perf_counter()
        self._must_read = not rests and self.speculation.would_guess([entry.sequence for entry in schedule.entries])
        return True

    def _is_timed(self) -> bool:
        """Whether a step after a look in vain is timed."""
        self._num_vain += 1
        return self._num_vain % TIMED == 1

    def run(self, schedule: Schedule) -> None:
        speculation = self.speculation
        if schedule.reused and len(speculation.rest_output) < speculation.rest_until:  # most steps: nothing more is added to them
            self.single.run(schedule)
            return
        if speculation.rests(schedule):
            if self._is_timed():
                self._run_plain(schedule)
            else:
                self.single.run(schedule)
            return
        drafts = self._drafts(schedule)
        drafted = add_drafts(self.stages.scheduler, schedule, drafts) if drafts else schedule
        if drafted is schedule:
            self._run_plain(schedule)
        else:
            self._check(drafted)

    def _run_plain(self, schedule: Schedule) -> None:
        """Run a step without drafts, or several in a row. The controller compares what one takes with those that have drafts."""
        first, decodes = schedule.entries[0].sequence, schedule.entries[-1].is_decode  # parts of prompts would come last
        length, captures, start = len(first), self.stages.runner.capture_work().count, time.perf_counter()
        self.single.run(schedule)
        num_steps = len(first) - length  # 0: in flight, or a prompt
        if num_steps and decodes:
            self._time(len(schedule.entries), 0, start, captures, num_steps)

    def _time(self, num_sequences: int, num_drafts: int, start: float, captures: int, num_steps: int = 1) -> None:
        """Report steps since `start`, unless something was captured in them: there had been `captures` before."""
        if self.stages.runner.capture_work().count == captures:
            self.speculation.timed(num_sequences, num_drafts, (time.perf_counter() - start) / num_steps)

    def _drafts(self, schedule: Schedule) -> Drafts:
        recovers = self.stages.scheduler.max_admissions is not None
        if self.stages.scoring or recovers:
            return {}
        drafts = self.speculation.propose(schedule)
        return {number: tokens for number, tokens in drafts.items() if number not in self._withheld} if self._withheld else drafts

    def _check(self, schedule: Schedule) -> None:
        """Run a step with drafts, and remember if it raises."""
        try:
            self._run_check(schedule)
        except Exception as error:
            live = self.stages.requests.owners.keys()
            self._withheld = {n for n in self._withheld if n in live}
            self._withheld |= {entry.sequence.sequence_id for entry in schedule.entries if entry.drafts}
            self._num_failed += not is_out_of_memory(error)
            if self._num_failed >= MAX_FAILED_CHECKS and self.speculation.on:
                self.speculation.switch_off(f"{self._num_failed} steps that checked drafts", error)
            raise

    def _run_check(self, schedule: Schedule) -> None:
        """Sequences whose draws depend on their last token draw one row a round, all others in the first."""
        stages = self.stages
        stages.scheduled = schedule
        captures, start = stages.runner.capture_work().count, time.perf_counter()
        inputs = stages.runner.prepare(schedule)
        check = _Check(stages, inputs.logit_rows, self.policy)
        owners = [stages.requests.owners[entry.sequence.sequence_id] for entry in check.drafted]
        rows = check.first_rows()
        flags = stages.prepare_rows(inputs, rows)
        logits = stages.launch(Step(schedule, inputs, [entry.sequence for entry in schedule.entries], flags))
        while rows:
            tokens, failures = stages.draw_rows(inputs, rows, logits, flags)
            check.take(rows, logits, tokens, failures)
            if rows := check.next_rows():
                flags = stages.prepare_rows(inputs, rows)
        stages.pass_states(inputs, logits)
        for entry, owner in zip(check.drafted, owners, strict=True):
            accepted = num_confirmed(entry)
            self.speculation.checked(entry, accepted)
            stages.observer.drafts_checked(owner, len(entry.drafts), accepted)
        if len(check.rows) == schedule.num_tokens:
            num_sequences = len(schedule.entries)
            self._time(num_sequences, len(check.rows) - num_sequences, start, captures)


class _Check:
    """The draws of one step with drafts. `rows` has the entry of each row of logits, `first` the first row of each entry with drafts."""

    def __init__(self, stages: Stages, rows: list[Scheduled], policy: Policy):
        self.stages, self.rows, self.policy = stages, rows, policy
        drafted = [r for r, entry in enumerate(rows) if entry.drafts and (not r or rows[r - 1] is not entry)]
        self.drafted = [rows[r] for r in drafted]
        self._by_turns = [(r, rows[r]) for r in drafted if stages.draws_by_turns(rows[r].sequence)]
        turns = {r for r, _ in self._by_turns}
        self._at_once = [(r, rows[r]) for r in drafted if r not in turns]

    def first_rows(self) -> Rows:
        """The sequences that draw first: all, but of those by turns only the first row."""
        rows: list[Sequence | None] = [entry.sequence for entry in self.rows]
        for r, entry in self._by_turns:
            rows[r + 1 : r + 1 + len(entry.drafts)] = [None] * len(entry.drafts)
        return rows

    def next_rows(self) -> Rows:
        """Those by turns whose tokens so far are their drafts: the row of the last. Empty if there are none."""
        rows: list[Sequence | None] = [None] * len(self.rows)
        drawing = [(r, e) for r, e in self._by_turns if not e.sequence.finished and e.sequence.num_computed == len(e.sequence)]
        for r, entry in drawing:
            rows[r + len(entry.sequence) - 1 - entry.start] = entry.sequence
        return rows if drawing else []

    def take(self, rows: Rows, logits: Logits, drawn: list[int], failures: Failures) -> None:
        """Accept or replace drafts by what was drawn, and append the tokens, with the log-probabilities that requests want."""
        stages = self.stages
        stages.observer.phase_ended("run")
        tokens, kept = self._judge(rows, logits, drawn)
        logprobs = stages.sampler.logprobs(logits.logits, kept, tokens)
        stages.observer.phase_ended("sample")
        for r, sequence in enumerate(kept):
            if sequence is None or sequence.finished:
                continue
            if sequence.sequence_id in failures:
                stages.requests.finish(sequence, "error", failures[sequence.sequence_id])
            else:
                stages.requests.append(sequence, tokens[r], logprobs[r])
                count_confirmed(self.rows[r])

    def _judge(self, rows: Rows, logits: Logits, drawn: list[int]) -> tuple[list[int], Rows]:
        """The token of each row, and the rows again without those that follow a rejected draft.

        By turns, a draft is accepted if it was drawn: the next row is drawn only then (`next_rows`).
        """
        tokens, kept = drawn.copy(), list(rows)
        for r, entry in self._at_once:
            if rows[r] is None:
                continue
            end, policy = r + 1 + len(entry.drafts), self._policy_of(entry.sequence)
            values = self.stages.sampler.rows(logits.logits, range(r, end)) if policy.reads_logits else None
            accepted, token = policy.accept(entry.drafts, drawn[r:end], values)
            tokens[r : r + accepted + 1] = [*entry.drafts[:accepted], token]
            kept[r + accepted + 1 : end] = [None] * (len(entry.drafts) - accepted)
        return tokens, kept

    def _policy_of(self, sequence: Sequence) -> Policy:
        """A lossy policy judges the model's own logits, so where a mask or a bias changes them, drafts are accepted exactly."""
        flags = self.stages.sampler.flags([sequence])
        return EXACT if flags.masked or flags.biased else self.policy
