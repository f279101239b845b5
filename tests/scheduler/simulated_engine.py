"""An engine of integers around a scheduler, and a model of the cache that knows the right contents of every slot.

The contents of a slot represent keys and values: a number for the salt and all tokens up to there, so that a block that is shared wrongly,
copied too late, swapped into the wrong place or overwritten while others can find it shows in the step that reads it. Each group of layers
has its own number.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.errors import BusyError, RequestError
from tinyvllm.request import RequestOptions, SamplingParams, Sequence, Status
from tinyvllm.scheduler import Schedule, Scheduled, Scheduler, SchedulerLimits
from tinyvllm.scheduler.drafts import add_drafts, count_confirmed
from tinyvllm.scheduler.queue import rank_of

VOCAB = 3  # few tokens, so that random texts have beginnings in common
PARAMS = SamplingParams(max_tokens=8)
Plain = RequestOptions()


@dataclass
class Search:
    """Beams: a round is over when each has been heard."""

    width: int
    beams: list[Sequence]
    heard: set[int] = field(default_factory=set)


@dataclass
class Loan:
    """A borrower outside the schedule that wants blocks for some steps."""

    blocks: int
    steps: int
    held: list[int] | None = None


class SimulatedEngine:
    """Decodes get fewer than `drafts` drafts. `rounds` decode steps run back to back where they may, `ahead` launches the next one before
    the last one's tokens are known.
    """

    def __init__(
        self,
        rows: int,
        budget: int,
        longest: int,
        blocks: int,
        size: int,
        hosted: int = 0,
        caching: bool = False,
        preemption: str | None = None,
        rounds: int = 1,
        drafts: int = 0,
        ahead: bool = False,
        window: int = 0,
        groups: tuple[int, int] = (0, 1),
        seed: int = 0,
    ) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)
        limits = SchedulerLimits(rows, max(rows, budget), longest, None, None, 1000, preemption, None, window, *groups)
        pool = BlockPool(blocks, size)
        self.groups = limits.groups(size)
        prefix = PrefixCache(pool, b"key", groups=self.groups) if caching else None
        host = BlockPool(hosted, size) if hosted else None
        self.scheduler = Scheduler(limits, pool, prefix, host, clock=lambda: self.now)
        self.scheduler.prefixes.inflight.min_blocks = 1  # texts are short here
        self.rounds, self.ahead, self.drafts = rounds, ahead, drafts
        self.cache: list[int] = [-1] * (blocks * size)
        self.host: list[int] = [-1] * (hosted * size)
        self.numbers: dict[tuple[object, int], int] = {}  # (what is before, token) -> contents of the slot
        self.meaning: dict[bytes, list[int]] = {}  # hash of a block -> its right contents
        self.truth: dict[int, list[int]] = {}  # by sequence id: contents of its slots
        self.drawn: dict[int, list[int]] = {}  # tokens that the device has and the host has not read
        self.living: dict[int, Sequence] = {}
        self.siblings: dict[int, list[Sequence]] = {}  # all of a request, by the id of each
        self.searches: dict[int, Search] = {}
        self.wanted: dict[int, int] = {}  # output tokens
        self.launched: tuple[Schedule, list[Sequence]] | None = None
        self.loan: Loan | None = None
        self.seen: Counter[str] = Counter()
        self.count = 0
        self.empty_steps = 0

    # ---- arrivals and ends ----

    def sequence(self, tokens: list[int], options: RequestOptions, output: list[int] | None = None) -> Sequence:
        self.count += 1
        due = self.now + min((d for d in (options.deadline_ms, options.ttft_deadline_ms) if d is not None), default=math.inf) / 1000
        return Sequence(
            self.count - 1, f"r{self.count - 1}", tokens, PARAMS, output_token_ids=output or [], options=options, arrival=self.now, due=due
        )

    def text(self, tokens: int) -> list[int]:
        return [self.random.randrange(VOCAB) if i % 7 == 6 else 0 for i in range(tokens)]

    def add(self, tokens: int, wanted: int, options: RequestOptions = Plain, width: int = 1, beams: bool = False) -> None:
        """A request of `width` continuations, or a beam search of that width."""
        scheduler, limits, pool = self.scheduler, self.scheduler.limits, self.scheduler.pool
        room = scheduler.tables.most_blocks(tokens + 1) <= pool.num_blocks
        family = [self.sequence(self.text(tokens), options)]
        family += [self.sequence(family[0].prompt_token_ids, options) for _ in range(0 if beams else width - 1)]
        fits = 0 < tokens < limits.max_model_len and room
        waited = len(scheduler.waiting), scheduler.waiting.num_tokens
        try:
            scheduler.add(family[0], family[1:])
        except RequestError:
            assert not fits
        except BusyError as error:
            self.refused(error, options, tokens)
            assert waited == (len(scheduler.waiting), scheduler.waiting.num_tokens)
        else:
            assert fits
            if beams:
                self.searches[family[0].sequence_id] = Search(width, family)
            for sequence in family:
                self.siblings[sequence.sequence_id] = family
                self.wanted[sequence.sequence_id] = wanted
                self.begin(sequence)

    def refused(self, error: BusyError, options: RequestOptions, tokens: int) -> None:
        limits, waiting = self.scheduler.limits, self.scheduler.waiting
        self.seen[error.reason] += 1
        if error.reason == "deadline":
            assert options.deadline_ms is not None or options.ttft_deadline_ms is not None
            assert error.retry_after > 0
        elif error.reason == "max_num_queued_reqs":
            assert limits.max_queued_reqs is not None and len(waiting) >= limits.max_queued_reqs
        else:
            assert limits.max_queued_tokens is not None and waiting.num_tokens + tokens > limits.max_queued_tokens

    def begin(self, sequence: Sequence) -> None:
        self.living[sequence.sequence_id] = sequence
        self.truth[sequence.sequence_id] = self.meant(sequence)
        self.drawn[sequence.sequence_id] = []

    def meant(self, sequence: Sequence) -> list[int]:
        numbers: list[int] = []
        for token in sequence.token_ids(0, len(sequence)):
            numbers.append(self.number(numbers, sequence, token))
        return numbers

    def number(self, before: list[int], sequence: Sequence, token: int) -> int:
        key = (before[-1] if before else sequence.options.cache_salt, token)
        return self.numbers.setdefault(key, len(self.numbers))

    def abort(self, which: int) -> None:
        """A request with all its continuations or beams."""
        if self.living:
            chosen = [*self.living.values()][which % len(self.living)]
            family = self.searches[chosen.sequence_id].beams if chosen.sequence_id in self.searches else self.siblings[chosen.sequence_id]
            for sequence in list(family):
                if not sequence.finished:
                    self.finish(sequence, "abort")

    def finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)
        self.over(sequence)

    def over(self, sequence: Sequence) -> None:
        assert sequence.finished and sequence.block_table == [] and sequence.row == -1 and sequence.host_table == []
        number = sequence.sequence_id
        self.seen[str(sequence.finish_reason)] += 1
        self.learn(sequence)
        for table in (self.living, self.truth, self.drawn, self.siblings, self.wanted):
            table.pop(number)
        search = self.searches.pop(number, None)
        if search is not None and sequence.finish_reason != "stop":  # all beams end together
            for other in list(search.beams):
                if not other.finished:
                    self.finish(other, str(sequence.finish_reason))

    def learn(self, sequence: Sequence) -> None:
        """What the blocks of its known tokens must hold, for sequences that find them."""
        prefix, size = self.scheduler.prefix, self.scheduler.pool.block_size
        if prefix is not None:
            truth = self.truth[sequence.sequence_id]
            for i, digest in enumerate(prefix.hash_blocks(sequence.token_ids(0, len(sequence)), sequence.options.cache_salt)):
                for group, each in enumerate(self.in_groups(digest)):
                    self.meaning[each] = [number * 8 + group for number in truth[i * size : (i + 1) * size]]

    def in_groups(self, digest: bytes) -> list[bytes]:
        """The hashes of a row's blocks."""
        count = self.groups.count
        return [digest] if count == 1 else [digest[:-1] + bytes([group]) for group in range(count)]

    # ---- a step ----

    def step(self, abort_inside: int | None = None, checked: bool = True) -> None:
        self.repay()
        if self.launched is not None and self.follow():
            return
        self.borrow()
        before = {s.sequence_id: s.num_preemptions for s in self.scheduler.running}
        plan = self.scheduler.schedule()
        self.seen["preempted"] += len(plan.preempted)
        self.seen["swapped"] += len({host for _, host in plan.swap_out}) > 0
        self.settle(plan)
        if checked:
            self.check_plan(plan, before)
        plan.entries = [entry for entry in plan.entries if not entry.sequence.finished]
        self.move(plan)
        if checked:
            self.check()
        idle = plan.empty and not (plan.preempted or plan.exhausted or plan.expired or self.loan)
        self.empty_steps = self.empty_steps + 1 if idle and self.scheduler.has_work() else 0
        assert self.empty_steps < 2, "there is work, and no step does any"
        if not plan.empty:
            self.run(plan, abort_inside)
        if checked:
            self.check_contents()

    def settle(self, plan: Schedule) -> None:
        pool, tables = self.scheduler.pool, self.scheduler.tables
        for sequence in plan.exhausted:
            assert sequence.finish_reason == "length" and tables.most_blocks(len(sequence)) > pool.num_blocks, "ended, and it had room"
            if sequence.sequence_id in self.living:
                self.over(sequence)
        for sequence in plan.expired:
            assert sequence.finish_reason == "deadline"
            if (search := self.searches.get(sequence.sequence_id)) is not None:
                assert all(beam in plan.expired for beam in search.beams), "one beam is late and the others are not"
            if sequence.sequence_id in self.living:
                self.over(sequence)

    def move(self, plan: Schedule) -> None:
        size = self.scheduler.pool.block_size
        for block, host in plan.swap_out:
            self.host[host * size : (host + 1) * size] = self.cache[block * size : (block + 1) * size]
        for host, block in plan.swap_in:
            self.cache[block * size : (block + 1) * size] = self.host[host * size : (host + 1) * size]
        targets = [block for _, block in plan.copies]
        assert not set(targets) & {source for source, _ in plan.copies} and len(set(targets)) == len(targets), "copies run at the same time"
        for source, block in plan.copies:
            self.cache[block * size : (block + 1) * size] = self.cache[source * size : (source + 1) * size]

    def run(self, plan: Schedule, abort_inside: int | None) -> None:
        scheduler = self.scheduler
        decodes = all(entry.num_tokens == entry.num_logits == 1 for entry in plan.entries)
        looks = any(entry.sequence.sequence_id in self.searches for entry in plan.entries)
        if self.drafts and not looks and (drafted := self.with_drafts(plan)) is not plan:
            self.check_drafts(drafted, abort_inside)
            return
        if decodes and not looks and self.ahead:
            self.launch(plan)
            return
        rounds = 1
        if decodes and not looks and self.rounds > 1 and not scheduler.waiting:
            room = min(scheduler.limits.max_model_len - len(entry.sequence) for entry in plan.entries)
            rounds = scheduler.reserve(plan, max(1, min(self.rounds, room)))
        for turn in range(rounds):
            self.compute(plan, turn)
            self.draw(plan)
        if abort_inside is not None:
            self.abort(abort_inside)
        scheduler.advance(plan, rounds)
        self.take([entry.sequence for entry in plan.entries if entry.num_logits], rounds)

    def with_drafts(self, plan: Schedule) -> Schedule:
        """Some of the decodes get drafts, which may be right: what a drafter guesses is known after the step only."""
        counts = {entry.sequence.sequence_id: self.random.randrange(self.drafts) for entry in plan.entries}
        wanted = {number: [self.random.randrange(VOCAB) for _ in range(count)] for number, count in counts.items()}
        free, limits = self.scheduler.pool.num_free, self.scheduler.limits
        drafted = add_drafts(self.scheduler, plan, wanted)
        assert drafted is plan or drafted.num_tokens <= limits.max_batched_tokens
        kept = len(self.scheduler.running) * self.groups.count
        assert self.scheduler.pool.num_free >= min(free, kept), "blocks for the others' next tokens stay free"
        for entry in drafted.entries:
            assert [*entry.drafts] == wanted[entry.sequence.sequence_id][: len(entry.drafts)]
            assert entry.start + entry.num_tokens < limits.max_model_len or not entry.drafts
        return drafted

    def check_drafts(self, plan: Schedule, abort_inside: int | None) -> None:
        """The drafts are written after what is known, and read; then tokens are drawn until one is not the draft."""
        rows: list[list[int]] = []  # contents of the slots of each entry's rows
        for entry in plan.entries:
            before = self.truth[entry.sequence.sequence_id][: entry.start + entry.num_tokens - len(entry.drafts)]
            for token in entry.drafts:
                before.append(self.number(before, entry.sequence, token))
            rows.append(before)
            for position in range(entry.start, len(before)):
                self.write(entry.sequence, position, before[position])
        for entry, before in zip(plan.entries, rows, strict=True):
            self.check_reads(entry.sequence, entry.start, before)
        if abort_inside is not None:
            self.abort(abort_inside)
        self.scheduler.advance(plan)
        for entry in plan.entries:
            if entry.num_logits:
                self.draw_drafted(entry)
        self.seen["drafts"] += 1

    def draw_drafted(self, entry: Scheduled) -> None:
        sequence = entry.sequence
        for draft in (*entry.drafts, None):
            if sequence.finished:
                return
            token = draft if draft is not None and self.random.random() < 0.6 else self.random.randrange(VOCAB)
            truth = self.truth[sequence.sequence_id]
            truth.append(self.number(truth, sequence, token))
            self.drawn[sequence.sequence_id].append(token)
            self.append(sequence)
            count_confirmed(entry)
            self.check_contents()
            if token != draft:
                return
            self.seen["accepted"] += 1

    def launch(self, plan: Schedule) -> None:
        self.compute(plan, 0)
        self.draw(plan)
        self.scheduler.advance(plan)
        self.launched = plan, [entry.sequence for entry in plan.entries]

    def follow(self) -> bool:
        assert self.launched is not None
        plan, sequences = self.launched
        following = self.scheduler.follow(plan)
        self.launched = None
        if following is not None:
            self.seen["ahead"] += 1
            self.launch(following)
        self.take(sequences, 1)
        return following is not None

    def slot(self, sequence: Sequence, position: int, group: int) -> int:
        size = self.scheduler.pool.block_size
        return sequence.block_table[position // size * self.groups.count + group] * size + position % size

    def write(self, sequence: Sequence, position: int, number: int) -> None:
        pool = self.scheduler.pool
        for group in range(self.groups.count):
            slot = self.slot(sequence, position, group)
            assert not pool._cached[slot // pool.block_size], "a block that others can find is written"
            self.cache[slot] = number * 8 + group

    def check_reads(self, sequence: Sequence, start: int, numbers: list[int]) -> None:
        """What the query at `start` and those after it see of the first len(numbers) tokens."""
        for group in range(self.groups.count):
            first = 0 if group < self.groups.full else self.first_seen(start)
            held = [self.cache[self.slot(sequence, position, group)] for position in range(first, len(numbers))]
            assert held == [number * 8 + group for number in numbers[first:]], f"{sequence.sequence_id} reads what is not its own"

    def compute(self, plan: Schedule, turn: int) -> None:
        """What attention does: every token of the step is written, then every one before it is read."""
        for entry in plan.entries:
            truth = self.truth[entry.sequence.sequence_id]
            for position in range(entry.start + turn, entry.start + turn + entry.num_tokens):
                self.write(entry.sequence, position, truth[position])
        for entry in plan.entries:
            start = entry.start + turn
            self.check_reads(entry.sequence, start, self.truth[entry.sequence.sequence_id][: start + entry.num_tokens])
            self.seen["freed"] += entry.sequence.num_freed > 0

    def first_seen(self, position: int) -> int:
        """The first token that a query at `position` sees."""
        window = self.scheduler.limits.window
        return max(0, position - window + 1) if window else 0

    def draw(self, plan: Schedule) -> None:
        for entry in plan.entries:
            if entry.num_logits:
                sequence, token = entry.sequence, self.random.randrange(VOCAB)
                truth = self.truth[sequence.sequence_id]
                if sequence.sequence_id not in self.searches:
                    self.drawn[sequence.sequence_id].append(token)
                    truth.append(self.number(truth, sequence, token))

    def take(self, sequences: list[Sequence], rounds: int) -> None:
        """The host looks at the tokens."""
        for sequence in sequences:
            for _ in range(rounds):
                if not sequence.finished:
                    self.append(sequence)

    def append(self, sequence: Sequence) -> None:
        number = sequence.sequence_id
        if number in self.searches:
            search = self.searches[number]
            search.heard.add(number)
            if len(search.heard) == len(search.beams):
                self.turn(search)
            return
        sequence.output_token_ids.append(self.drawn[number].pop(0))
        if len(sequence.output_token_ids) >= self.wanted[number]:
            self.finish(sequence, "stop")
        elif len(sequence) == self.scheduler.limits.max_model_len:
            self.finish(sequence, "length")

    def turn(self, search: Search) -> None:
        """Random parents continue, some of them several times."""
        search.heard.clear()
        first = search.beams[0]
        wanted = self.wanted[first.sequence_id]
        if len(first.output_token_ids) + 1 >= wanted or len(first) + 1 == self.scheduler.limits.max_model_len:
            for beam in list(search.beams):
                self.finish(beam, "stop")
            return
        parents = Counter(self.random.choices(range(len(search.beams)), k=search.width))
        onward: list[tuple[Sequence, int]] = []
        made: list[Sequence] = []
        for index, count in parents.items():
            parent = search.beams[index]
            onward.append((parent, self.random.randrange(VOCAB)))
            for _ in range(count - 1):
                tokens = [*parent.output_token_ids, self.random.randrange(VOCAB)]
                child = self.sequence(parent.prompt_token_ids, parent.options, tokens)
                child.arrival, child.due = parent.arrival, parent.due
                self.siblings[child.sequence_id], self.wanted[child.sequence_id] = [], wanted
                self.searches[child.sequence_id] = search
                self.begin(child)
                self.scheduler.fork(parent, child)
                made.append(child)
        kept = [parent for parent, _ in onward]
        over = [beam for beam in search.beams if beam not in kept]
        search.beams = kept + made
        for parent, token in onward:
            truth = self.truth[parent.sequence_id]
            parent.output_token_ids.append(token)
            truth.append(self.number(truth, parent, token))
        for beam in over:
            self.finish(beam, "stop")

    # ---- blocks borrowed from outside the schedule ----

    def borrow(self) -> None:
        if self.loan is not None and self.loan.held is None:
            self.loan.held = self.scheduler.borrowed.take(self.loan.blocks)
            assert self.loan.held is not None or self.scheduler.running, "nothing runs, and there are no blocks to borrow"
            for block in self.loan.held or ():
                size = self.scheduler.pool.block_size
                self.cache[block * size : (block + 1) * size] = [-2] * size

    def repay(self) -> None:
        if self.loan is not None and self.loan.held is not None:
            self.loan.steps -= 1
            if self.loan.steps <= 0:
                self.seen["lent"] += 1
                self.scheduler.borrowed.give_back(self.loan.held)
                self.loan = None

    # ---- what must hold ----

    def check_plan(self, plan: Schedule, before: dict[int, int]) -> None:
        scheduler, pool, limits = self.scheduler, self.scheduler.pool, self.scheduler.limits
        chosen = [entry.sequence for entry in plan.entries]
        assert plan.num_tokens == sum(entry.num_tokens for entry in plan.entries) <= limits.max_batched_tokens
        assert len({id(sequence) for sequence in chosen}) == len(chosen)
        for entry in plan.entries:
            sequence, end = entry.sequence, entry.start + entry.num_tokens
            if sequence.finished:
                assert sequence in plan.expired or sequence.finish_reason == "length"  # a beam of which another had no room
                continue
            assert sequence.status is Status.RUNNING and entry.start == sequence.num_computed and entry.num_tokens >= 1
            assert end <= len(sequence) and entry.num_logits == (end == len(sequence))
            assert end <= scheduler.tables.room(sequence)
        self.check_order(plan, before)
        assert not any(self.late(sequence) for sequence in self.living.values())
        ran = [s for s in scheduler.running if s.sequence_id in before and s.num_preemptions == before[s.sequence_id]]
        if ran and len(ran[0]) > ran[0].num_computed:
            assert ran[0] in chosen, "the first in rank gets tokens in every step"
        for sequence in plan.preempted:
            if sequence.status is Status.WAITING:
                assert all(rank_of(sequence) > rank_of(other) for other in ran)
        spent = plan.num_tokens + len(plan.preempted) + len(plan.exhausted) >= limits.max_batched_tokens
        if not spent:  # no sequence idles without a reason
            spare = limits.max_batched_tokens - plan.num_tokens - len(plan.preempted)  # a decode that was preempted had its token
            for sequence in scheduler.running:
                if sequence not in chosen and len(sequence) > sequence.num_computed:
                    room = self.groups.num_tokens(len(sequence.block_table) + pool.num_free) - sequence.num_computed
                    assert min(spare, room) < 2, "tokens and blocks, and a prompt gets nothing"
            # a beam that is exhausted ends the others, whose blocks are free since `settle`
            if scheduler.waiting.has_next and scheduler._free_rows and not plan.preempted and not plan.exhausted:
                self.check_no_room()

    def check_order(self, plan: Schedule, before: dict[int, int]) -> None:
        """Decodes, then chunks; of each those that ran before, by rank, and then the admitted ones."""

        def place(entry: Scheduled) -> tuple[object, ...]:
            old = entry.sequence.sequence_id in before and entry.sequence not in plan.preempted
            return entry.num_tokens > 1 or not entry.num_logits, not old, rank_of(entry.sequence) if old else ()

        assert [place(entry) for entry in plan.entries] == sorted(map(place, plan.entries))

    def check_no_room(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        first = scheduler.waiting.first()
        found = scheduler.prefixes.match(first)
        needed = scheduler.tables.missing(first, found) + self.groups.count + scheduler.borrowed.num_wanted
        assert needed > pool.num_free, "a row and room, and none is admitted"
        scheduler.prefixes.give_back(found)

    def check_followers(self) -> None:
        """A deferred sequence waits for a running one before it that has not computed the prefix yet."""
        scheduler, inflight = self.scheduler, self.scheduler.prefixes.inflight
        assert set(scheduler.waiting._deferred) == set(inflight._waiting)
        for block, leader in inflight._computing.items():
            assert leader in scheduler.running and block in leader.block_hashes[leader.num_published :]
        for follower, block in inflight._waiting.items():
            self.seen["followers"] += 1
            if block in inflight._computing:  # else it is brought back in the next step
                assert rank_of(inflight._computing[block]) < rank_of(follower)

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        waiting = list(scheduler.waiting)
        asleep = [*scheduler._siblings]
        unfinished = [*scheduler.running, *waiting, *scheduler._paused, *asleep]
        assert Counter(s.sequence_id for s in unfinished) == Counter(self.living.keys()), "lost, or in two places"
        assert scheduler.has_work() == bool(self.living) and len(waiting) == len(scheduler.waiting)
        assert scheduler.waiting.num_tokens == sum(map(len, waiting))
        self.check_followers()
        assert scheduler.running == sorted(scheduler.running, key=rank_of)
        full, count = self.groups.full, self.groups.count
        held = Counter(b for s in scheduler.running for i, b in enumerate(s.block_table) if i % count < full or i // count >= s.num_freed)
        self.check_windows()
        held += Counter(scheduler._copies) + Counter((self.loan and self.loan.held) or ())
        assert [pool.reference_count(block) for block in range(pool.num_blocks)] == [held[block] for block in range(pool.num_blocks)]
        assert pool.num_free + len(held) == pool.num_blocks
        rows = [sequence.row for sequence in scheduler.running]
        assert sorted([*rows, *scheduler._free_rows]) == list(range(scheduler.limits.max_num_seqs))
        for sequence in scheduler.running:
            assert sequence.status is Status.RUNNING and not sequence.host_table
            assert sequence.num_computed <= scheduler.tables.room(sequence) and not len(sequence.block_table) % count
        for sequence in (*waiting, *scheduler._paused, *asleep):
            assert sequence.status is Status.WAITING
            assert sequence.block_table == [] and sequence.row == -1 and sequence.num_computed == 0
        if scheduler.host is not None:
            hosted = Counter(block for s in unfinished for block in s.host_table)
            assert [scheduler.host.reference_count(b) for b in range(scheduler.host.num_blocks)] == [
                hosted[b] for b in range(scheduler.host.num_blocks)
            ]

    def check_windows(self) -> None:
        """No sequence holds more than its window and a step fill, and two blocks; without a window nothing is freed."""
        scheduler, window, size = self.scheduler, self.scheduler.limits.window, self.scheduler.pool.block_size
        step = max(scheduler.limits.max_batched_tokens, self.rounds, self.drafts)
        for sequence in scheduler.running:
            held = len(sequence.block_table) // self.groups.count - sequence.num_freed
            assert not sequence.num_freed if not window else held <= -(-(window + step) // size) + 2, "blocks that left the window are held"

    def late(self, sequence: Sequence) -> bool:
        options, age = sequence.options, (self.now - sequence.arrival) * 1000
        whole = options.deadline_ms is not None and age > options.deadline_ms
        return whole or (options.ttft_deadline_ms is not None and not sequence.output_token_ids and age > options.ttft_deadline_ms)

    def check_contents(self) -> None:
        """Whatever can be found holds what its hash says."""
        prefix, size = self.scheduler.prefix, self.scheduler.pool.block_size
        if prefix is None:
            return
        for sequence in self.living.values():
            self.learn(sequence)
        for entry in prefix.entries():
            held = self.cache[entry.block * size : (entry.block + 1) * size]
            assert held == self.meaning[entry.hash], f"block {entry.block} is not what its hash says"

    def drain(self, checked: bool = True) -> None:
        """Every request ends: the first in rank computes a token in each step, and is never more than max_model_len of them away."""
        for _ in range(3 * (len(self.living) + 2) * (self.scheduler.limits.max_model_len + 4)):
            if not self.scheduler.has_work() and self.loan is None and self.launched is None:
                break
            self.step(checked=checked)
        assert not self.scheduler.has_work() and not self.living
        self.scheduler.schedule()  # what held the sources of copies lets go of them
        self.check()
        scheduler = self.scheduler
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert scheduler.host is None or scheduler.host.num_free == scheduler.host.num_blocks
        assert not (scheduler.deadlines or scheduler._siblings or scheduler._paused or [*scheduler._copies])
