"""Who runs the next step, with how many tokens, in which blocks. Integers only: knows no token's meaning, no text and no tensors.

Continuous batching (Orca; Yu et al., 2022) with chunked prefill under one token budget (Sarathi; Agrawal et al., 2023) and
preemption by recompute. Sequences are served in order of arrival: `running` followed by `waiting` always is that order, because
admission takes the head of `waiting` and preemption puts the tail of `running` back in front of it. From this follows that nothing
starves: the oldest sequence gets tokens in every step, and only sequences younger than it give up their blocks for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.errors import ArgumentError, RequestError
from tinyvllm.request import Sequence, Status


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_num_seqs` sequences at a time, `max_batched_tokens` tokens a step, `max_model_len` tokens of prompt and output together."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ArgumentError(f"SchedulerLimits: max_num_seqs must be 1 or more, got {self.max_num_seqs}")
        if self.max_model_len < 2:
            raise ArgumentError(f"SchedulerLimits: max_model_len must leave room for a prompt and a token, got {self.max_model_len}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                f"SchedulerLimits: max_batched_tokens={self.max_batched_tokens} must give each of max_num_seqs={self.max_num_seqs} "
                "sequences a token a step; raise the one or lower the other"
            )


@dataclass(slots=True)
class Scheduled:
    """Tokens start..start+num_tokens of `sequence` are computed in this step; its block table covers them.

    `samples` is True when the last of them is the last known one: only then the logits of its row give a new token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass
class Schedule:
    """One step. `entries` holds first those that compute one token and sample, then the chunks of prompts, each in order of admission.

    `preempted` lost their blocks and rows and wait again. `exhausted` are finished, with reason "length": they have outgrown the whole
    cache, and it is for the caller to report them. Either may come without any entries: then there is nothing to run in this step.
    """

    entries: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def empty(self) -> bool:
        return not self.entries


class Scheduler:
    """The caller's loop: `schedule()`, run the step, `advance()` it, append a token to each entry that samples, `finish()` who is done."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission, the oldest first
        self._free_rows = list(range(limits.max_num_seqs))  # a heap

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """To the end of the queue. RequestError for what could never run, with nothing changed."""
        assert sequence.status is Status.WAITING and not sequence.block_table, f"Scheduler: {sequence.sequence_id} was added before"
        tokens, longest = len(sequence), self.limits.max_model_len - 1
        if not tokens:
            raise RequestError(f"request {sequence.request_id}: the prompt is empty; give it at least one token")
        if tokens > longest:
            raise RequestError(
                f"request {sequence.request_id}: a prompt of {tokens} tokens is beyond the {longest} that max_model_len="
                f"{self.limits.max_model_len} leaves it; shorten the prompt or raise max_model_len"
            )
        if self.pool.blocks_for(tokens + 1) > self.pool.num_blocks:
            raise RequestError(
                f"request {sequence.request_id}: a prompt of {tokens} tokens and one more need {self.pool.blocks_for(tokens + 1)} KV "
                f"blocks, the cache has {self.pool.num_blocks} of {self.pool.block_size} tokens; shorten the prompt or enlarge the cache"
            )
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step, give it its blocks, and preempt where there are too few."""
        plan = Schedule()
        chunks: list[Scheduled] = []
        budget = self._continue_running(plan, chunks)
        if not plan.preempted:  # blocks just proved scarce: whoever came in now would be the next to go
            self._admit(plan, chunks, budget)
        plan.entries += chunks
        return plan

    def reserve(self, schedule: Schedule, rounds: int) -> int:
        """Blocks for up to `rounds` tokens of each decode of a schedule, without preempting anybody; for how many there are enough."""
        size, tables = self.pool.block_size, [(entry.start, entry.sequence.block_table) for entry in schedule.entries]
        while rounds > 1:
            missing = [max(0, self.pool.blocks_for(start + rounds) - len(table)) for start, table in tables]
            if sum(missing) <= self.pool.num_free:
                for (_, table), count in zip(tables, missing, strict=True):
                    table += self.pool.allocate(count)
                return rounds
            # what is free, shared by all, and what their last blocks still hold
            rounds = min(rounds - 1, min(len(table) * size - start for start, table in tables) + self.pool.num_free // len(tables) * size)
        return 1

    def follow(self, schedule: Schedule) -> Schedule | None:
        """The step behind one of decodes that has been advanced and whose tokens are not known yet: everybody one position on.

        None where somebody has ended, could be admitted, or would need blocks or room that are not free: then the tokens must be looked at
        first.
        """
        entries = [Scheduled(entry.sequence, entry.sequence.num_computed, 1, True) for entry in schedule.entries]
        if (self.waiting and self._free_rows) or len(entries) != len(self.running):
            return None
        if any(entry.sequence.status is not Status.RUNNING for entry in entries):
            return None
        if any(entry.start + 1 >= self.limits.max_model_len for entry in entries):
            return None
        missing = [max(0, self.pool.blocks_for(entry.start + 1) - len(entry.sequence.block_table)) for entry in entries]
        if sum(missing) > self.pool.num_free:
            return None
        for entry, count in zip(entries, missing, strict=True):
            entry.sequence.block_table += self.pool.allocate(count)
        return Schedule(entries)

    def advance(self, schedule: Schedule, rounds: int = 1) -> None:
        """The step has run, `rounds` times over: its keys and values lie in the cache. Finished sequences are passed over."""
        for entry in schedule.entries:
            sequence = entry.sequence
            if sequence.status is Status.RUNNING:
                assert sequence.num_computed == entry.start, f"Scheduler: a step of {sequence.sequence_id} was advanced twice"
                sequence.num_computed += entry.num_tokens * rounds

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Whatever state it is in, `sequence` is over and its blocks and row are free. Later calls keep the first reason."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _continue_running(self, plan: Schedule, chunks: list[Scheduled]) -> int:
        """Decodes and unfinished prefills, the oldest first; returns the tokens that the budget has left."""
        remaining = [len(sequence) - sequence.num_computed for sequence in self.running]
        budget = self.limits.max_batched_tokens - remaining.count(1)  # decodes come first: their tokens are set aside
        block_size = self.pool.block_size
        # Going by age, whoever is preempted is the sequence at hand or one not yet reached, so that no entry is ever taken back.
        for sequence, left in zip(tuple(self.running), remaining, strict=True):
            if sequence.status is not Status.RUNNING:
                break  # preempted for an older one, as was everyone behind it
            assert left > 0, f"Scheduler: {sequence.sequence_id} has no token left to compute; append what was sampled first"
            count = min(left, budget) if left > 1 else 1
            if not count:
                continue
            start = sequence.num_computed
            if start + count > len(sequence.block_table) * block_size and not self._grow(sequence, start + count, plan):
                continue
            if left == 1:
                plan.entries.append(Scheduled(sequence, start, 1, True))
            else:
                chunks.append(Scheduled(sequence, start, count, count == left))
                budget -= count
        return budget

    def _admit(self, plan: Schedule, chunks: list[Scheduled], budget: int) -> None:
        """From the head of the queue and never around it, while rows, budget and blocks last."""
        while self.waiting and self._free_rows and budget:
            sequence = self.waiting[0]
            start, left = sequence.num_computed, len(sequence) - sequence.num_computed
            needed = self.pool.blocks_for(start + left)
            missing = needed - len(sequence.block_table)
            if needed > self.pool.num_blocks or (not self.running and missing > self.pool.num_free):
                self._exhaust(sequence, plan)
                continue
            # All of the known tokens must fit, not this chunk alone, and a block more, or others would soon be preempted for the
            # rest. Alone there are no others, and insisting on the block would keep out for ever what just fits the pool.
            if self.running and missing + 1 > self.pool.num_free:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = Status.RUNNING
            sequence.row = heapq.heappop(self._free_rows)
            count = min(left, budget)
            self._grow(sequence, start + count, plan)
            (plan.entries if left == 1 else chunks).append(Scheduled(sequence, start, count, count == left))
            budget -= count

    def _grow(self, sequence: Sequence, num_tokens: int, plan: Schedule) -> bool:
        """Make the table of a running sequence cover `num_tokens`, preempting the youngest for it; False if it had to go itself."""
        needed = self.pool.blocks_for(num_tokens)
        missing = needed - len(sequence.block_table)
        while missing > self.pool.num_free:
            youngest = self.running[-1]
            if needed > self.pool.num_blocks or youngest is self.running[0]:  # preempting others, or itself, would not help
                self._exhaust(sequence, plan)
                return False
            self._preempt(youngest)
            plan.preempted.append(youngest)
            if youngest is sequence:
                return False
        sequence.block_table += self.pool.allocate(missing)
        return True

    def _exhaust(self, sequence: Sequence, plan: Schedule) -> None:
        self.finish(sequence, "length")
        plan.exhausted.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and row back; what it had in the cache is gone."""
        self.running.remove(sequence)
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = -1
