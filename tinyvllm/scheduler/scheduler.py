"""Chooses steps. Integers and times only: no text, no tensors, no meaning of tokens.

Continuous batching (Orca; Yu et al., 2022) with chunked prefill under one token budget (Sarathi; Agrawal et al., 2023), a prefix cache of
blocks, and preemption by recompute or by swap. `running` is in order of rank (queue.rank_of), and a sequence is preempted only for one that
ranks before it. So no sequence starves: the first in rank gets tokens in every step.
"""

from __future__ import annotations

import bisect
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.cache.snapshots import StateSnapshots
from tinyvllm.request import Sequence, Status
from tinyvllm.scheduler.admission import AdmissionControl
from tinyvllm.scheduler.borrowing import BorrowedBlocks
from tinyvllm.scheduler.chunk_budget import chunk_budget
from tinyvllm.scheduler.deadlines import Deadlines
from tinyvllm.scheduler.decode_reuse import ReusableDecode
from tinyvllm.scheduler.forks import BlockCopies, Siblings
from tinyvllm.scheduler.preemption import HostSwap, PausedSequences
from tinyvllm.scheduler.prefixes import SequencePrefixes
from tinyvllm.scheduler.queue import WaitingQueue, rank_of
from tinyvllm.scheduler.rates import Rates
from tinyvllm.scheduler.recurrent import SequenceStates
from tinyvllm.scheduler.schedule import Schedule, Scheduled, SchedulerLimits
from tinyvllm.scheduler.tables import BlockTables

_SHARE = 4  # 1/4 of a step's tokens is kept from long prefills if other sequences want it


class Scheduler:
    """The caller's loop: `schedule`, move blocks, run, `advance`, append a token per entry with logits, `finish` sequences that ended.

    `prefix` caches blocks for equal prompt prefixes, `snapshots` copies of recurrent states for them, `host` counts blocks of host memory
    for swaps; None does without. A running sequence without a token to compute (a beam that waits for others) is passed over.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        prefix: PrefixCache | None = None,
        host: BlockPool | None = None,
        clock: Callable[[], float] = time.monotonic,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.limits, self.pool, self.prefix, self.host = limits, pool, prefix, host
        self.tables = BlockTables(pool, limits.groups(pool.block_size), limits.max_batched_tokens)
        assert prefix is None or prefix.groups == self.tables.groups, "Scheduler: the prefix cache has other groups"
        self.rates = Rates()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by rank
        self.num_swaps = 0
        self.max_admissions: int | None = None  # a step, from the queue; None sets no limit
        self.groups = 1  # into which decodes are divided, so that as many steps can be in flight
        self.in_flight = 0  # steps; their sequences are not preempted
        self.considered: Sequence | None = None  # the one that `schedule` looks at, or looked at when it raised
        self.pinned: Counter[int] = Counter()  # blocks that segments hold, and how many segments hold each
        self.borrowed = BorrowedBlocks(pool)
        self.deadlines = Deadlines(clock)
        self.states = SequenceStates(snapshots, pool.block_size)
        self.prefixes = SequencePrefixes(prefix, self.tables.groups, self.states)
        self._free_rows = list(range(limits.max_num_seqs))  # a heap
        self._siblings = Siblings()
        self._copies = BlockCopies(self.tables)
        self._swap = HostSwap(self.tables, host)
        self._paused = PausedSequences()
        self._reusable: ReusableDecode | None = None  # the last step, as long as it can be reused

    # ---- steps ----

    def schedule(self) -> Schedule:
        """Choose the next step, allocate its blocks, and preempt sequences if there are too few."""
        reused = self._reuse(unseen=0)
        if reused is not None:
            return reused
        self.considered = None
        self._copies.release_sources()
        for sequence in self._paused.take_ready():
            self.waiting.push(sequence)
        plan = Schedule()
        for sequence in self.deadlines.late():
            self.finish(sequence, "deadline")
            plan.expired.append(sequence)
        self._make_way(plan)
        num_preempted = len(plan.preempted)
        chunks: list[Scheduled] = []
        budget = self._continue_running(plan, chunks)
        num_running = len(chunks)
        if len(plan.preempted) == num_preempted:  # else blocks just proved scarce: an admitted sequence would be the next to be preempted
            budget = self._admit(plan, chunks, budget)
        self._extend_chunks(chunks, num_running, budget)
        plan.entries += chunks
        self.states.plan_copies(plan.entries)
        stuck = plan.empty and self.waiting.has_next and self.running and not self.in_flight
        if stuck and not (plan.preempted or plan.exhausted or plan.expired):
            self._preempt(self.running[-1], plan)  # all wait for one that has no room
        plan.copies = self._copies.launch()
        if not plan.moves and ReusableDecode.fits(plan, self.running):
            self._reusable = ReusableDecode(plan, self.pool.block_size)
        return plan

    def follow(self, schedule: Schedule) -> Schedule | None:
        """The step after one of decodes that has been advanced and whose tokens are not known yet: every sequence one position further.

        None if a sequence has ended, could be admitted, or would need blocks or room that are not free: then the tokens must be read first.
        """
        reusable = self._reusable
        if reusable is None or reusable.schedule is not schedule or reusable.max_start + 2 >= self.limits.max_model_len:
            return None
        return self._reuse(unseen=1)

    def reserve(self, schedule: Schedule, rounds: int) -> int:
        """Blocks for up to `rounds` tokens of each decode of a schedule, without preemption; returns how many rounds got blocks."""
        entries, tables = schedule.entries, self.tables
        while rounds > 1:
            missing = [tables.lacking(entry.sequence, entry.start + rounds) for entry in entries]
            if sum(missing) <= self.pool.num_free:
                for entry, count in zip(entries, missing, strict=True):
                    if count:
                        entry.sequence.block_table += self.pool.allocate(count)
                        schedule.changed.append(entry)
                return rounds
            # the free blocks, shared by all, and what the last blocks still hold
            left = min(tables.room(entry.sequence) - entry.start for entry in entries)
            rounds = min(rounds - 1, left + tables.groups.num_tokens(self.pool.num_free // len(entries)))
        return 1

    def advance(self, schedule: Schedule, rounds: int = 1) -> None:
        """The step has run `rounds` times: its keys and values are in the cache. Finished sequences are passed over.

        Drafts do not count: see drafts.py.
        """
        for entry in schedule.entries:
            sequence = entry.sequence
            if sequence.status is Status.RUNNING:
                self.states.launched(sequence)
                assert sequence.num_computed == entry.start, f"Scheduler: a step of {sequence.sequence_id} was advanced twice"
                sequence.num_computed += (entry.num_tokens - len(entry.drafts)) * rounds
                if self._siblings and entry.num_logits:
                    for sibling in self._siblings.take(sequence):
                        self.fork(sequence, sibling)

    # ---- sequences ----

    def add(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> None:
        """Queue a sequence. RequestError if it can never run, BusyError if it must not wait or would be late; nothing is changed then.

        `siblings` have the same prompt: they are forked from `sequence` once that prompt is computed.
        """
        assert sequence.status is Status.WAITING and not sequence.block_table, f"Scheduler: {sequence.sequence_id} was added before"
        self._admission().check(sequence)
        siblings = list(siblings)
        try:
            self._siblings.add(sequence, siblings)
            self.deadlines.add([sequence, *siblings])
            self.waiting.push(sequence)
        except Exception:
            self._siblings.take(sequence)
            for one in (sequence, *siblings):
                self.deadlines.discard(one)
            raise

    def predicted_wait(self, sequence: Sequence | None = None) -> float:
        """Seconds until the first token of `sequence` (or of a short prompt), if it were added now, by the rates of the last steps."""
        return self._admission().predicted_wait(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` starts from what `parent` has computed of the tokens that they share, all but the child's last.

        It shares the parent's full blocks and gets a copy of the next row before the next step. If there is no room for it, or where
        states are recurrent (the parent's is one token ahead), it waits, and what the prefix cache does not have is computed again.
        """
        position = min(parent.num_computed, len(child) - 1)
        full, part = divmod(position, self.pool.block_size)
        freed = self.tables.window.first_block(position) < parent.num_freed
        copied = self.tables.groups.count if part else 0
        if self.limits.recurrent and parent.status is Status.RUNNING:
            self.prefixes.publish(parent)
        alone = parent.status is not Status.RUNNING or self.limits.recurrent
        if alone or freed or not self._free_rows or self.pool.num_free < copied:
            self.waiting.push(child)
            self.deadlines.add([child])
            return
        child.block_table, child.num_freed = self._copies.share(parent, full, part > 0), parent.num_freed
        child.num_computed = full * self.pool.block_size + part
        child.block_hashes, child.num_published = parent.block_hashes[:full], min(parent.num_published, full)
        self._start(child)
        self.deadlines.add([child])

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in any state and free its blocks and row. Later calls keep the first reason."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            if reason != "error":  # broken keys and values must not be found again
                self.prefixes.publish(sequence)
            self._stop(sequence)
        elif not self._paused.remove(sequence) and not self._siblings.remove(sequence):
            self.prefixes.inflight.discard(sequence)
            self.waiting.remove(sequence)
        for sibling in self._siblings.take(sequence):
            self.waiting.push(sibling)  # its prompt will not be computed for it
        self._swap.drop(sequence)
        self.deadlines.discard(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _admission(self) -> AdmissionControl:
        return AdmissionControl(self.limits, self.tables, self.prefixes, self.waiting, self.running, self.pinned, self.rates)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._paused)

    # ---- the parts of a step ----

    def _reuse(self, unseen: int) -> Schedule | None:
        """The last step again if nothing that it depends on has changed; `unseen` tokens of each sequence are not known yet.

        None if the queue, a deadline, or a lack of blocks requires a new schedule.
        """
        reusable = self._reusable
        if reusable is None or self._paused or self._could_admit() or self.deadlines.late():
            return None
        crossed = reusable.advance(unseen)
        tables, row = self.tables, self.tables.groups.count
        growing = [entry for entry in crossed or () if entry.start >= tables.room(entry.sequence)]
        if crossed is None or len(growing) * row > self.pool.num_free:
            self._reusable = None
            return None
        for entry in crossed:
            self.considered = entry.sequence
            self.prefixes.publish(entry.sequence)
            tables.free_passed(entry.sequence)
        blocks = iter(self.pool.allocate(len(growing) * row))
        for entry in growing:
            entry.sequence.block_table += islice(blocks, row)
        self.states.plan_copies(crossed)
        for key, count in reusable.tokens_by_key.items():
            self.waiting.serve(key, count)
        reusable.schedule.reused, reusable.schedule.changed = not reusable.was_interrupted, crossed
        reusable.was_interrupted = False
        return reusable.schedule

    def _could_admit(self) -> bool:
        """Whether a row is free for the first in the queue, or could be taken from a sequence of lower priority."""
        if not self.waiting.has_next:
            return False
        return bool(self._free_rows) or self.waiting.first().options.priority < self.running[-1].options.priority

    def _make_way(self, plan: Schedule) -> None:
        """Take rows and blocks from sequences of lower priority for the first in the queue."""
        if not self.waiting.has_next or not self.running or self.in_flight:
            return
        first = self.waiting.first()
        lower = [s for s in self.running if s.options.priority > first.options.priority]
        needed = self.tables.most_blocks(len(first)) + self.tables.groups.count
        if needed > self.pool.num_free + sum(len(self.tables.held(s)) for s in lower):
            return
        while lower and (not self._free_rows or needed > self.pool.num_free):
            self._preempt(lower.pop(), plan)

    def _continue_running(self, plan: Schedule, chunks: list[Scheduled]) -> int:
        """Decodes and unfinished prefills, by rank; returns the rest of the token budget.

        Long prefills leave a share to those that are nearly done and to waiting ones, or a short prompt would wait for all long ones.
        """
        remaining = [len(sequence) - sequence.num_computed for sequence in self.running]
        num_decodes = most_decodes = min(remaining.count(1), -(-len(self.running) // self.groups))
        pending = len(self.waiting) > 0 or any(left > 1 for left in remaining)
        budget, plan.max_chunk_tokens = chunk_budget(self.limits, self.rates, num_decodes, pending)
        share = (num_decodes + budget) // _SHARE
        contended = (self.waiting.has_next and self._free_rows) or any(1 < left <= share for left in remaining)
        kept = min(share, budget // 2) if contended else 0
        block_size, row = self.pool.block_size, self.tables.groups.count
        # By rank, so a preempted sequence is the current one or one not yet reached, and no entry is ever taken back.
        for sequence, left in zip(tuple(self.running), remaining, strict=True):
            if sequence.status is not Status.RUNNING:
                break  # preempted for one before it, as were all after it
            self.considered = sequence
            if sequence.num_computed >= (sequence.num_published + 1) * block_size:
                self.prefixes.publish(sequence)
                self.tables.free_passed(sequence)
            if not left or (left == 1 and not most_decodes):
                continue
            count = 1 if left == 1 else min(left, budget - kept if left > share else budget)
            if count < 1:
                continue
            start = sequence.num_computed
            if start + count > len(sequence.block_table) // row * block_size and not self._grow(sequence, start + count, plan):
                continue
            if left == 1:
                plan.entries.append(Scheduled(sequence, start, 1, num_logits=1))
                most_decodes -= 1
            else:
                chunks.append(Scheduled(sequence, start, count, int(count == left)))
                budget -= count
            self.waiting.serve(sequence.options.key, count)
        return budget

    def _admit(self, plan: Schedule, chunks: list[Scheduled], budget: int) -> int:
        """Admit from the head of the queue, never past it, while rows, budget and blocks last; returns the rest of the budget."""
        for sequence in self.prefixes.inflight.ready():
            self.waiting.bring_back(sequence)
        num_admitted, groups = 0, self.tables.groups
        while self.waiting.has_next and self._free_rows and budget and num_admitted != self.max_admissions:
            self.considered = sequence = self.waiting.first()
            found = self.prefixes.match(sequence)
            waits = not sequence.num_swapped and not self.limits.recurrent
            if waits and self.prefixes.inflight.wait_for(sequence, groups.num_rows(found)):
                self.prefixes.give_back(found)
                self.waiting.defer(sequence)
                continue
            needed, missing = self.tables.most_blocks(len(sequence)), self.tables.missing(sequence, found)
            if needed > self.pool.num_blocks or (not self.running and not self.borrowed.num_held and missing > self.pool.num_free):
                self.prefixes.give_back(found)
                self._exhaust(sequence, plan)
                continue
            # All of the known tokens must fit, not this chunk alone, and one more row, or others would soon be preempted for the
            # rest. Without others, insisting on that row would keep out for ever a sequence that just fits the pool.
            if missing + (groups.count + self.borrowed.num_wanted if self.running else 0) > self.pool.num_free:
                self.prefixes.give_back(found)
                break
            num_admitted += 1
            self.waiting.remove(sequence)
            self.prefixes.begin(sequence, found)
            self._swap.swap_in(sequence, plan)
            self._start(sequence)
            self.prefixes.inflight.register(sequence)
            start, left = sequence.num_computed, len(sequence) - sequence.num_computed
            count = min(left, budget)
            self._grow(sequence, start + count, plan)
            (plan.entries if left == 1 else chunks).append(Scheduled(sequence, start, count, int(count == left)))
            self.waiting.serve(sequence.options.key, count)
            budget -= count
        return budget

    def _extend_chunks(self, chunks: list[Scheduled], num_running: int, budget: int) -> None:
        """Give the rest of the budget to unfinished prompts, by rank, as far as blocks are free.

        The first `num_running` chunks are of sequences that ran before, by rank; they stay so.
        """
        chunk_of = {chunk.sequence.sequence_id: chunk for chunk in chunks} if budget else {}
        for sequence in self.running if budget else ():
            chunk = chunk_of.get(sequence.sequence_id)
            start = sequence.num_computed if chunk is None else chunk.start + chunk.num_tokens
            room = self.tables.groups.num_tokens(len(sequence.block_table) + self.pool.num_free)
            end = min(start + budget, len(sequence), room)
            if end - start < (2 if chunk is None else 1):
                continue  # a decode has its token
            sequence.block_table += self.pool.allocate(self.tables.lacking(sequence, end))
            if chunk is None:
                chunk = Scheduled(sequence, start, 0, num_logits=0)
                bisect.insort(chunks, chunk, hi=num_running, key=lambda other: rank_of(other.sequence))
                num_running += 1
            chunk.num_tokens += end - start
            chunk.num_logits = int(end == len(sequence))
            self.waiting.serve(sequence.options.key, end - start)
            budget -= end - start
            if not budget:
                return

    def _grow(self, sequence: Sequence, num_tokens: int, plan: Schedule) -> bool:
        """Make the table of a running sequence cover `num_tokens`, preempting the last in rank for it; False if it was itself preempted."""
        missing, groups = self.tables.lacking(sequence, num_tokens), self.tables.groups
        needed = groups.blocks_for(num_tokens) - groups.windowed * sequence.num_freed
        while missing > self.pool.num_free:
            if self.in_flight:
                return False
            last = self.running[-1]
            alone = last is self.running[0] and not self.borrowed.num_held
            if needed > self.pool.num_blocks or alone:  # preempting others, or itself, would not help
                self._exhaust(sequence, plan)
                return False
            self._preempt(last, plan)
            if last is sequence:
                return False
        sequence.block_table += self.pool.allocate(missing)
        return True

    # ---- what becomes of a sequence ----

    def _start(self, sequence: Sequence) -> None:
        """It runs: it gets a row and its place by rank."""
        self._reusable = None
        bisect.insort(self.running, sequence, key=rank_of)
        sequence.status = Status.RUNNING
        sequence.row = heapq.heappop(self._free_rows)

    def _stop(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and row back; only what the prefix cache keeps of it remains."""
        self._reusable = None
        self.prefixes.withdraw(sequence)
        self.states.stop(sequence)
        self.running.remove(sequence)
        self._copies.cancel(self.tables.held(sequence))
        self.tables.release(sequence)
        sequence.num_computed = sequence.num_published = 0
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = -1

    def _preempt(self, sequence: Sequence, plan: Schedule) -> None:
        self.prefixes.publish(sequence)
        if self._swap.pays_off(sequence, self.limits, self.rates):
            self._swap.swap_out(sequence, plan, self._copies)
            self.num_swaps += 1
        idle = sequence.num_computed == len(sequence)
        self._stop(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        if idle:
            self._paused.add(sequence)
        else:
            self.waiting.push(sequence)
        plan.preempted.append(sequence)

    def _exhaust(self, sequence: Sequence, plan: Schedule) -> None:
        """It has outgrown the whole cache."""
        self.finish(sequence, "length")
        plan.exhausted.append(sequence)
