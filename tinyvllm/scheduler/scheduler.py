"""Chooses steps. Integers and times only: knows no token's meaning, no text and no tensors.

Continuous batching (Orca; Yu et al., 2022) with chunked prefill under one token budget (Sarathi; Agrawal et al., 2023), a prefix cache of
blocks, and preemption by recompute or by swap. `running` is in order of rank (queue.rank_of): whoever is preempted for a sequence ranks
behind it, so nothing starves: the first in rank gets tokens in every step.
"""

from __future__ import annotations

import bisect
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.request import Sequence, Status
from tinyvllm.scheduler.admission import AdmissionControl
from tinyvllm.scheduler.decode_reuse import ReusableDecode
from tinyvllm.scheduler.inflight_prefix import InflightPrefixes
from tinyvllm.scheduler.queue import WaitingQueue, rank_of
from tinyvllm.scheduler.rates import Rates
from tinyvllm.scheduler.schedule import Schedule, Scheduled, SchedulerLimits

_SHARE = 4  # part of a step's tokens that long prefills leave to others that want it


class Scheduler:
    """The caller's loop: `schedule()`, move blocks, run, `advance()`, append a token to each entry that samples, `finish()` who is done.

    `prefix` keeps blocks for equal beginnings, `host` counts blocks of host memory for swaps; None goes without. A running sequence
    without a token to compute (a beam that waits for others) is passed over.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        prefix: PrefixCache | None = None,
        host: BlockPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.pool, self.prefix, self.host = limits, pool, prefix, host
        self.rates = Rates()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by rank
        self.num_swaps = 0
        self.pinned: Counter[int] = Counter()  # blocks that are held for good, and how many chunks hold each
        self._free_rows = list(range(limits.max_num_seqs))  # a heap
        self._siblings: dict[int, list[Sequence]] = {}  # by the id of the sequence whose prompt they wait for
        self._paused: dict[Sequence, int] = {}  # preempted with nothing to compute; how long each was then
        self._copies: dict[int, int] = {}  # blocks of forks and what is copied there before the next step; that is held
        self._copied: list[int] = []  # blocks of the last schedule's copies, held until they have run
        self._lent = self._wanted = 0  # blocks that somebody outside holds, and waits for
        self._timed: set[Sequence] = set()  # those with deadlines
        self._admission = AdmissionControl(self)
        self._inflight = InflightPrefixes(pool.block_size)
        self._reusable: ReusableDecode | None = None  # the last step, as long as it can go on as it is
        self._clock = clock

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._paused)

    def add(self, sequence: Sequence, siblings: Many[Sequence] = ()) -> None:
        """To the queue. RequestError for what could never run, BusyError for what must not wait or would be late; nothing is changed then.

        `siblings` have the same prompt: they are forked from `sequence` once that is computed.
        """
        assert sequence.status is Status.WAITING and not sequence.block_table, f"Scheduler: {sequence.sequence_id} was added before"
        self._admission.check(sequence)
        if siblings:
            self._siblings[sequence.sequence_id] = list(siblings)
        if sequence.due < math.inf:
            self._timed.update((sequence, *siblings))
        self.waiting.push(sequence)

    def predicted_wait(self, sequence: Sequence | None = None) -> float:
        """Seconds until the first token of `sequence` (or of a short prompt), if it were added now, by the rates of the last steps."""
        return self._admission.predicted_wait(sequence)

    def known_hashes(self, sequence: Sequence) -> list[bytes]:
        """The hashes of all blocks of a waiting sequence that could be found. Its last token is always left to compute."""
        return self._hashes(sequence, (len(sequence) - 1) // self.pool.block_size) if self.prefix is not None else []

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def schedule(self) -> Schedule:
        """Choose the next step, give it its blocks, and preempt where there are too few."""
        reused = self._reuse(unseen=0)
        if reused is not None:
            return reused
        self.pool.release(self._copied)
        self._copied = []
        self._resume()
        plan = Schedule()
        self._expire(plan)
        self._make_way(plan)
        making_way = len(plan.preempted)
        chunks: list[Scheduled] = []
        budget = self._continue_running(plan, chunks)
        if len(plan.preempted) == making_way:  # else blocks just proved scarce: whoever came in now would be the next to go
            running = len(chunks)
            self._stretch(chunks, running, self._admit(plan, chunks, budget))
        plan.entries += chunks
        if plan.empty and self.waiting.has_next and self.running and not (plan.preempted or plan.exhausted or plan.expired):
            self._preempt(self.running[-1], plan)  # everybody waits for one that has no room
        plan.copies = [(source, block) for block, source in self._copies.items()]
        self._copied = list(self._copies.values())
        self._copies.clear()
        if not plan.moves and ReusableDecode.fits(plan, self.running):
            self._reusable = ReusableDecode(plan, self.pool.block_size)
        return plan

    def _reuse(self, unseen: int) -> Schedule | None:
        """The last step once more, where all that it was made of is as it was; `unseen` tokens of each sequence are not known yet.

        None where the queue, a deadline, or want of blocks asks for more than that.
        """
        reusable = self._reusable
        if reusable is None or self._paused or self._could_come_in() or self._late():
            return None
        filled = reusable.advance(unseen)
        size = self.pool.block_size
        growing = [entry for entry in filled or () if entry.start >= len(entry.sequence.block_table) * size]
        if filled is None or len(growing) > self.pool.num_free:
            self._reusable = None
            return None
        for entry in filled:
            self._publish(entry.sequence)
        for entry, block in zip(growing, self.pool.allocate(len(growing)), strict=True):
            entry.sequence.block_table.append(block)
        for key, count in reusable.keys.items():
            self.waiting.serve(key, count)
        reusable.schedule.reused, reusable.schedule.changed = True, filled
        return reusable.schedule

    def reserve(self, schedule: Schedule, rounds: int) -> int:
        """Blocks for up to `rounds` tokens of each decode of a schedule, without preempting anybody; for how many there are enough."""
        size, tables = self.pool.block_size, [(entry.start, entry.sequence.block_table) for entry in schedule.entries]
        while rounds > 1:
            missing = [max(0, self.pool.blocks_for(start + rounds) - len(table)) for start, table in tables]
            if sum(missing) <= self.pool.num_free:
                for entry, count in zip(schedule.entries, missing, strict=True):
                    if count:
                        entry.sequence.block_table += self.pool.allocate(count)
                        schedule.changed.append(entry)
                return rounds
            # what is free, shared by all, and what their last blocks still hold
            rounds = min(rounds - 1, min(len(table) * size - start for start, table in tables) + self.pool.num_free // len(tables) * size)
        return 1

    def follow(self, schedule: Schedule) -> Schedule | None:
        """The step behind one of decodes that has been advanced and whose tokens are not known yet: everybody one position on.

        None where somebody has ended, could be admitted, or would need blocks or room that are not free: then the tokens must be looked at
        first.
        """
        reusable = self._reusable
        if reusable is None or reusable.schedule is not schedule or reusable.longest + 2 >= self.limits.max_model_len:
            return None
        return self._reuse(unseen=1)

    def _could_come_in(self) -> bool:
        """Whether the queue needs a look: a row is free, or could be taken from somebody of lower priority."""
        if not self.waiting.has_next:
            return False
        return bool(self._free_rows) or self.waiting.first().options.priority < self.running[-1].options.priority

    def advance(self, schedule: Schedule, rounds: int = 1) -> None:
        """The step has run, `rounds` times over: its keys and values lie in the cache. Finished sequences are passed over."""
        for entry in schedule.entries:
            sequence = entry.sequence
            if sequence.status is Status.RUNNING:
                assert sequence.num_computed == entry.start, f"Scheduler: a step of {sequence.sequence_id} was advanced twice"
                sequence.num_computed += entry.num_tokens * rounds
                if self._siblings and entry.num_logits:
                    for sibling in self._siblings.pop(sequence.sequence_id, ()):
                        self.fork(sequence, sibling)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` starts from what `parent` has computed of the tokens that they share, all but the child's last.

        It shares the parent's full blocks and gets a copy of the one behind them before the next step. Where there is no room for it, it
        waits, and computes again what the prefix cache does not have.
        """
        if child.due < math.inf:
            self._timed.add(child)
        S = self.pool.block_size
        full, part = divmod(min(parent.num_computed, len(child) - 1), S)
        if parent.status is not Status.RUNNING or not self._free_rows or self.pool.num_free < (part > 0):
            self.waiting.push(child)
            return
        child.block_table = parent.block_table[:full]
        self.pool.share(child.block_table)
        if part:
            source = parent.block_table[full]
            source = self._copies.get(source, source)  # the parent's own may be one that is still to be copied
            self.pool.share([source])
            child.block_table += self.pool.allocate(1)
            self._copies[child.block_table[full]] = source
        child.num_computed = full * S + part
        child.block_hashes, child.num_published = parent.block_hashes[:full], min(parent.num_published, full)
        self._seat(child)

    def lend(self, count: int) -> list[int] | None:
        """`count` blocks for somebody outside, who gives them back soon and to nobody's cost: nobody is ended for want of them.

        None where they are not free; then nobody is admitted before they have been, so that they come free. One borrower at a time.
        """
        assert not self._lent, "Scheduler: blocks are lent already"
        if count > self.pool.num_free:
            self._wanted = count
            return None
        self._wanted, self._lent = 0, count
        return self.pool.allocate(count)

    def give_back(self, blocks: list[int]) -> None:
        """What was lent is free again; an empty list says that what was wanted is not wanted any more."""
        self.pool.release(blocks)
        self._wanted = self._lent = 0

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Whatever state it is in, `sequence` is over and its blocks and row are free. Later calls keep the first reason."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            if reason != "error":  # what is broken must not be found again
                self._publish(sequence)
            self._vacate(sequence)
        elif self._paused.pop(sequence, None) is None and not self._is_sibling(sequence):
            self._inflight.leave(sequence)
            self.waiting.remove(sequence)
        for sibling in self._siblings.pop(sequence.sequence_id, ()):
            self.waiting.push(sibling)  # its prompt will not be computed for it
        self._drop_swapped(sequence)
        self._timed.discard(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _is_sibling(self, sequence: Sequence) -> bool:
        """Whether it waited for another's prompt; it does not any more."""
        for siblings in self._siblings.values():
            if sequence in siblings:
                siblings.remove(sequence)
                return True
        return False

    def _late(self) -> bool:
        if not self._timed:
            return False
        now = self._clock()
        return any(self._is_late(sequence, now) for sequence in self._timed)

    def _is_late(self, sequence: Sequence, now: float) -> bool:
        options = sequence.options
        if options.deadline_ms is not None and now > sequence.arrival + options.deadline_ms / 1000:
            return True
        first = options.ttft_deadline_ms
        return first is not None and not sequence.output_token_ids and now > sequence.arrival + first / 1000

    def _expire(self, plan: Schedule) -> None:
        if self._timed:
            now = self._clock()
            for sequence in [s for s in self._timed if self._is_late(s, now)]:
                self.finish(sequence, "deadline")
                plan.expired.append(sequence)

    def _make_way(self, plan: Schedule) -> None:
        """Take rows and blocks from those of lower priority for the first in the queue."""
        if not self.waiting.has_next or not self.running:
            return
        first = self.waiting.first()
        lower = [s for s in self.running if s.options.priority > first.options.priority]
        needed = self.pool.blocks_for(len(first)) + 1
        if needed > self.pool.num_free + sum(len(s.block_table) for s in lower):
            return
        while lower and (not self._free_rows or needed > self.pool.num_free):
            self._preempt(lower.pop(), plan)

    def _continue_running(self, plan: Schedule, chunks: list[Scheduled]) -> int:
        """Decodes and unfinished prefills, by rank; returns the tokens that the budget has left.

        Long prefills leave a share to those that are nearly done and to those that wait, or a short prompt would wait for all long ones.
        """
        remaining = [len(sequence) - sequence.num_computed for sequence in self.running]
        budget = self.limits.max_batched_tokens - remaining.count(1)  # decodes come first: their tokens are set aside
        share = self.limits.max_batched_tokens // _SHARE
        wanted = (self.waiting.has_next and self._free_rows) or any(1 < left <= share for left in remaining)
        kept = min(share, budget // 2) if wanted else 0
        block_size = self.pool.block_size
        # Going by rank, whoever is preempted is the sequence at hand or one not yet reached, so that no entry is ever taken back.
        for sequence, left in zip(tuple(self.running), remaining, strict=True):
            if sequence.status is not Status.RUNNING:
                break  # preempted for one before it, as was everyone behind it
            if sequence.num_computed >= (sequence.num_published + 1) * block_size:
                self._publish(sequence)
            if not left:
                continue
            count = 1 if left == 1 else min(left, budget - kept if left > share else budget)
            if count < 1:
                continue
            start = sequence.num_computed
            if start + count > len(sequence.block_table) * block_size and not self._grow(sequence, start + count, plan):
                continue
            if left == 1:
                plan.entries.append(Scheduled(sequence, start, 1, num_logits=1))
            else:
                chunks.append(Scheduled(sequence, start, count, int(count == left)))
                budget -= count
            self.waiting.serve(sequence.options.key, count)
        return budget

    def _admit(self, plan: Schedule, chunks: list[Scheduled], budget: int) -> int:
        """From the head of the queue and never around it, while rows, budget and blocks last; the tokens that are left then."""
        for sequence in self._inflight.ready():
            self.waiting.bring_back(sequence)
        while self.waiting.has_next and self._free_rows and budget:
            sequence = self.waiting.first()
            found = self._match(sequence)
            if not sequence.num_swapped and self._inflight.follow(sequence, len(found)):
                self.pool.release(found)
                self.waiting.set_aside(sequence)
                continue
            needed = self.pool.blocks_for(len(sequence))
            missing = needed - len(found)
            if needed > self.pool.num_blocks or (not self.running and not self._lent and missing > self.pool.num_free):
                self.pool.release(found)
                self._exhaust(sequence, plan)
                continue
            # All of the known tokens must fit, not this chunk alone, and a block more, or others would soon be preempted for the
            # rest. Alone there are no others, and insisting on the block would keep out for ever what just fits the pool.
            if missing + (1 + self._wanted if self.running else 0) > self.pool.num_free:
                self.pool.release(found)
                break
            self.waiting.remove(sequence)
            self._start_from(sequence, found, plan)
            self._seat(sequence)
            self._inflight.lead(sequence)
            start, left = sequence.num_computed, len(sequence) - sequence.num_computed
            count = min(left, budget)
            self._grow(sequence, start + count, plan)
            (plan.entries if left == 1 else chunks).append(Scheduled(sequence, start, count, int(count == left)))
            self.waiting.serve(sequence.options.key, count)
            budget -= count
        return budget

    def _stretch(self, chunks: list[Scheduled], running: int, budget: int) -> None:
        """What nobody else wants goes to prompts that are not at their end, by rank, as far as blocks are free.

        The first `running` chunks are of sequences that ran before, by rank; so they stay.
        """
        known = {chunk.sequence.sequence_id: chunk for chunk in chunks} if budget else {}
        for sequence in self.running if budget else ():
            chunk = known.get(sequence.sequence_id)
            start = sequence.num_computed if chunk is None else chunk.start + chunk.num_tokens
            room = (len(sequence.block_table) + self.pool.num_free) * self.pool.block_size
            end = min(start + budget, len(sequence), room)
            if end - start < (2 if chunk is None else 1):
                continue  # a decode has its token
            sequence.block_table += self.pool.allocate(max(0, self.pool.blocks_for(end) - len(sequence.block_table)))
            if chunk is None:
                chunk = Scheduled(sequence, start, 0, num_logits=0)
                bisect.insort(chunks, chunk, hi=running, key=lambda other: rank_of(other.sequence))
                running += 1
            chunk.num_tokens += end - start
            chunk.num_logits = int(end == len(sequence))
            self.waiting.serve(sequence.options.key, end - start)
            budget -= end - start
            if not budget:
                return

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached blocks of a waiting sequence's beginning, held for it."""
        return self.prefix.match(self.known_hashes(sequence)) if self.prefix is not None else []

    def _hashes(self, sequence: Sequence, blocks: int) -> list[bytes]:
        assert self.prefix is not None
        if len(sequence.block_hashes) < blocks:
            self.prefix.extend(sequence.block_hashes, sequence.token_ids, blocks, sequence.options.cache_salt)
        return sequence.block_hashes[:blocks]

    def _start_from(self, sequence: Sequence, found: list[int], plan: Schedule) -> None:
        """An admitted sequence begins behind its cached blocks, or behind what was swapped out, if that is more."""
        S = self.pool.block_size
        sequence.block_table, sequence.num_computed, sequence.num_published = found, len(found) * S, len(found)
        if self.prefix is not None and not sequence.num_preemptions:
            sequence.num_cached = sequence.num_computed
            self.prefix.count(len(sequence), sequence.num_computed)
        if sequence.num_swapped > sequence.num_computed:
            hosted = sequence.host_table[len(found) :]
            sequence.block_table = found + self.pool.allocate(len(hosted))
            plan.swap_in += zip(hosted, sequence.block_table[len(found) :], strict=True)
            sequence.num_computed = sequence.num_swapped
        self._drop_swapped(sequence)

    def _drop_swapped(self, sequence: Sequence) -> None:
        if sequence.host_table and self.host is not None:
            self.host.release(sequence.host_table)
            sequence.host_table, sequence.num_swapped = [], 0

    def _seat(self, sequence: Sequence) -> None:
        """It runs: a row, and its place by rank."""
        self._reusable = None
        bisect.insort(self.running, sequence, key=rank_of)
        sequence.status = Status.RUNNING
        sequence.row = heapq.heappop(self._free_rows)

    def _publish(self, sequence: Sequence) -> None:
        """Make its full blocks of known tokens findable."""
        full = min(sequence.num_computed, len(sequence)) // self.pool.block_size
        if self.prefix is not None and full > sequence.num_published:
            hashes, tokens_of, salt = self._hashes(sequence, full), sequence.token_ids, sequence.options.cache_salt
            self.prefix.publish(hashes, sequence.block_table, sequence.num_published, full, tokens_of, salt)
            self._inflight.passed(sequence, sequence.num_published, full)
        sequence.num_published = max(full, sequence.num_published)

    def _grow(self, sequence: Sequence, num_tokens: int, plan: Schedule) -> bool:
        """Make the table of a running sequence cover `num_tokens`, preempting the last in rank for it; False if it had to go itself."""
        needed = self.pool.blocks_for(num_tokens)
        missing = needed - len(sequence.block_table)
        while missing > self.pool.num_free:
            last = self.running[-1]
            alone = last is self.running[0] and not self._lent
            if needed > self.pool.num_blocks or alone:  # preempting others, or itself, would not help
                self._exhaust(sequence, plan)
                return False
            self._preempt(last, plan)
            if last is sequence:
                return False
        sequence.block_table += self.pool.allocate(missing)
        return True

    def _exhaust(self, sequence: Sequence, plan: Schedule) -> None:
        self.finish(sequence, "length")
        plan.exhausted.append(sequence)

    def _preempt(self, sequence: Sequence, plan: Schedule) -> None:
        self._publish(sequence)
        if self._worth_swapping(sequence):
            self._swap_out(sequence, plan)
        idle = sequence.num_computed == len(sequence)
        self._vacate(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        if idle:  # in the queue it would come in again before the one that it waits for
            self._paused[sequence] = len(sequence)
        else:
            self.waiting.push(sequence)
        plan.preempted.append(sequence)

    def _resume(self) -> None:
        """Those that were preempted with nothing to compute and have a token now."""
        for sequence in [s for s, length in self._paused.items() if len(s) > length]:
            del self._paused[sequence]
            self.waiting.push(sequence)

    def _worth_swapping(self, sequence: Sequence) -> bool:
        """Whether two copies of its blocks are cheaper than its tokens once more, and fit."""
        blocks = self.pool.blocks_for(sequence.num_computed)
        if self.host is None or not blocks or blocks > self.host.num_free or self.limits.preemption == "recompute":
            return False
        if self.limits.preemption == "swap":
            return True
        again = sequence.num_computed * (self.rates.prefill_token or 0.0)
        return 2 * blocks * self.limits.block_bytes / self.rates.copy_bandwidth < again

    def _swap_out(self, sequence: Sequence, plan: Schedule) -> None:
        assert self.host is not None
        known = min(sequence.num_computed, len(sequence) - 1)
        blocks = self.pool.blocks_for(known)
        sequence.host_table, sequence.num_swapped = self.host.allocate(blocks), known
        filled = [self._copies.get(block, block) for block in sequence.block_table[:blocks]]  # a fork's last may be still to be copied
        plan.swap_out += zip(filled, sequence.host_table, strict=True)
        self.num_swaps += 1
        sequence.num_swaps += 1

    def _vacate(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and row back; what the prefix cache does not keep of it is gone."""
        self._reusable = None
        self._inflight.passed(sequence, sequence.num_published, len(sequence.block_hashes))
        self.running.remove(sequence)
        if self._copies:  # none may come behind, into a block that is somebody else's by then
            self.pool.release([source for block in sequence.block_table if (source := self._copies.pop(block, None)) is not None])
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_published = 0
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = -1
