"""PrefixCache and BlockPool under random traffic, against a model that knows every block's contents, references and last use."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.windows import BlockGroups, Window

PROMPTS = st.lists(st.integers(0, 1), max_size=10)
WHICH = st.integers(0, 1 << 30)  # of those that hold blocks, modulo their number
REMEMBERED = 5
OWNER = "me"
SALTS = st.sampled_from([None, "salt"])
Prefix = tuple[str | None, tuple[int, ...]]  # all that a block's contents depend on


class Held:
    """A sequence that holds blocks: its tokens, all of them computed."""

    def __init__(self, tokens: list[int], salt: str | None) -> None:
        self.tokens, self.salt = tokens, salt
        self.table: list[int] = []
        self.freed = 0  # leading places of the table that name the scratch block
        self.hashes: list[bytes] = []
        self.published = 0

    def token_ids(self, start: int, stop: int) -> list[int]:
        return self.tokens[start:stop]


class Traffic(RuleBasedStateMachine):
    @initialize(blocks=st.integers(2, 12), size=st.integers(1, 3), window=st.sampled_from((0, 0, 1, 2, 5)))
    def build(self, blocks: int, size: int, window: int) -> None:
        self.size, self.window = size, window
        self.pool = BlockPool(blocks, size)
        self.cache = PrefixCache(self.pool, b"key", remembered=REMEMBERED, groups=BlockGroups(Window(window, size)))
        self.held: list[Held] = []
        self.contents: dict[int, Prefix] = {}  # of every block ever written
        self.cached: dict[Prefix, int] = {}
        self.idle: list[int] = []  # cached without references, the first to go first
        self.evictions = 0
        self.gone: list[Prefix] = []  # evicted and not come back, the oldest first

    def prefix(self, sequence: Held, block: int) -> Prefix:
        return sequence.salt, tuple(sequence.tokens[: (block + 1) * self.size])

    def references(self, block: int) -> int:
        return sum(sequence.table.count(block) for sequence in self.held)

    def first_seen(self, blocks: int) -> int:
        """The block of the first token that the query after N blocks sees."""
        return max(0, blocks * self.size - self.window + 1) // self.size if self.window else 0

    def longest(self, prefixes: list[Prefix]) -> int:
        """The number of leading blocks of which those are cached that the query after them sees."""
        cached = [prefix in self.cached for prefix in prefixes]
        return max(n for n in range(len(prefixes) + 1) if all(cached[self.first_seen(n) : n]))

    def take(self, sequence: Held, count: int) -> bool:
        """Blocks for a sequence, as the model says they must come; False where there are too few."""
        free = [block for block in range(self.pool.num_blocks) if not self.references(block)]
        if count > len(free):
            return False
        blocks = self.pool.allocate(count)
        uncached = set(free) - set(self.idle)
        expected_evicted = self.idle[: max(0, count - len(uncached))]
        assert len(set(blocks)) == count and set(blocks) <= set(free)
        assert set(blocks) & set(self.idle) == set(expected_evicted)
        del self.idle[: len(expected_evicted)]
        self.evictions += len(expected_evicted)
        self.gone += [prefix for block in expected_evicted for prefix, at in self.cached.items() if at == block]
        del self.gone[:-REMEMBERED]
        self.cached = {prefix: block for prefix, block in self.cached.items() if block not in expected_evicted}
        sequence.table += blocks
        return True

    def compute(self, sequence: Held, first: int) -> None:
        for i in range(first, len(sequence.tokens) // self.size):
            assert sequence.table[i] not in self.cached.values(), "a cached block was written to"
            self.contents[sequence.table[i]] = self.prefix(sequence, i)

    def finish(self, sequence: Held) -> None:
        self.pool.release(sequence.table[sequence.freed :])
        self.held.remove(sequence)
        for block in reversed(sequence.table[sequence.freed :]):
            if not self.references(block) and block in self.cached.values():
                self.idle.append(block)

    def publish(self, sequence: Held) -> None:
        full = len(sequence.tokens) // self.size
        self.cache.extend(sequence.hashes, sequence.token_ids, full, sequence.salt)
        assert sequence.hashes[:full] == self.cache.hash_blocks(sequence.tokens, sequence.salt)
        self.cache.publish(sequence.hashes, sequence.table, sequence.published, full, sequence.token_ids, sequence.salt, OWNER)
        for i in range(sequence.published, full):
            self.cached.setdefault(self.prefix(sequence, i), sequence.table[i])
            self.gone = [prefix for prefix in self.gone if prefix not in self.cached]
        sequence.published = full

    @rule(tokens=PROMPTS, salt=SALTS, published=st.booleans())
    def admit(self, tokens: list[int], salt: str | None, published: bool) -> None:
        """The first to come goes until there is room."""
        sequence = Held(tokens, salt)
        self.cache.extend(sequence.hashes, sequence.token_ids, len(tokens) // self.size, salt)
        longest = self.longest([self.prefix(sequence, i) for i in range(len(sequence.hashes))])
        assert self.cache.known(sequence.hashes) == longest
        sequence.table, sequence.freed = self.cache.match(sequence.hashes), self.first_seen(longest)
        assert sequence.table[: sequence.freed] == [self.pool.scratch_block] * sequence.freed
        seen = range(sequence.freed, longest)
        assert [self.contents[block] for block in sequence.table[sequence.freed :]] == [self.prefix(sequence, i) for i in seen]
        assert self.cache.held(sequence.table) == sequence.table[sequence.freed :]
        self.idle = [block for block in self.idle if block not in sequence.table]
        self.held.append(sequence)
        while not self.take(sequence, self.pool.blocks_for(len(tokens)) - longest):
            self.finish(self.held[0])
            if sequence not in self.held:
                return
        sequence.published = longest
        self.compute(sequence, longest)
        if published:
            self.publish(sequence)

    @precondition(lambda self: self.held)
    @rule(which=WHICH, tokens=PROMPTS)
    def decode(self, which: int, tokens: list[int]) -> None:
        sequence = self.held[which % len(self.held)]
        for token in tokens:
            if len(sequence.tokens) == len(sequence.table) * self.size and not self.take(sequence, 1):
                break
            sequence.tokens = [*sequence.tokens, token]
            if len(sequence.tokens) % self.size == 0:
                self.compute(sequence, len(sequence.tokens) // self.size - 1)
        self.publish(sequence)

    @precondition(lambda self: self.held)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        """All full blocks are shared; the one after them is not."""
        parent = self.held[which % len(self.held)]
        full = len(parent.tokens) // self.size
        child = Held(parent.tokens[: full * self.size], parent.salt)
        child.table, child.hashes, child.published = parent.table[:full], parent.hashes[:full], min(parent.published, full)
        child.freed = parent.freed
        self.pool.share(child.table[child.freed :])
        self.held.append(child)

    @precondition(lambda self: self.held)
    @rule(which=WHICH, count=st.integers(1, 4))
    def leave(self, which: int, count: int) -> None:
        for _ in range(min(count, len(self.held))):
            self.finish(self.held[which % len(self.held)])

    @rule(tokens=PROMPTS, salt=SALTS)
    def explain(self, tokens: list[int], salt: str | None) -> None:
        told = self.cache.explain(tokens, salt, OWNER)
        start = told.hit_blocks * self.size
        prefixes = [(salt, tuple(tokens[:stop])) for stop in range(self.size, len(tokens) + 1, self.size)]
        assert told.hit_blocks == self.longest(prefixes)
        assert told.evicted_blocks == sum(prefix in self.gone for prefix in prefixes[told.hit_blocks :])
        begun = tuple(tokens[:start])
        nearest = [prefix for of, prefix in self.cached if of == salt and len(prefix) == start + self.size and prefix[:start] == begun]
        agree = [next((i for i, (a, b) in enumerate(zip(tokens, prefix)) if a != b), None) for prefix in nearest]
        if None in agree or not agree:
            assert told.first_difference is None and not told.ours and not told.theirs
        else:
            at = told.first_difference
            assert at == max(agree)
            assert told.ours == tokens[at : start + self.size]
            assert (*tokens[:at], *told.theirs) in nearest and told.theirs[0] != told.ours[0]

    @rule(dice=st.integers(0, 5))
    def reset(self, dice: int) -> None:
        if dice == 5:
            self.cache.reset()
            self.cached.clear()
            self.idle.clear()
            self.gone.clear()

    def teardown(self) -> None:
        """A restart: a second cache takes over the entries, finds the same in its own blocks, and evicts in the same order."""
        if not hasattr(self, "cache"):
            return
        other = PrefixCache(BlockPool(self.pool.num_blocks, self.size), b"key")
        moved = {entry.block: other.adopt(entry.hash, entry.parent, entry.tokens) for entry in self.cache.entries()}
        assert sorted(moved) == sorted(self.cached.values()) and None not in moved.values()
        assert list(other.pool.cached_blocks()) == list(moved.values())
        assert [entry.block for entry in other.entries()] == list(moved.values())

    @invariant()
    def agrees(self) -> None:
        counts = [self.references(block) for block in range(self.pool.num_blocks)]
        assert [self.pool.reference_count(block) for block in range(self.pool.num_blocks)] == counts
        assert self.pool.num_free == counts.count(0)
        assert self.pool.num_cached == len(self.cached)
        assert self.cache.evictions == self.evictions
        everything = list(self.pool.cached_blocks())
        busy = len(everything) - len(self.idle)
        assert everything[busy:] == self.idle[::-1] and all(counts[block] for block in everything[:busy])
        entries = list(self.cache.entries())
        assert {entry.block for entry in entries} == set(everything) == set(self.cached.values())
        place = {entry.hash: i for i, entry in enumerate(entries)}
        assert all(place.get(entry.parent, -1) < i for i, entry in enumerate(entries))
        for (salt, tokens), block in self.cached.items():
            assert self.contents[block] == (salt, tokens)


Traffic.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True, database=None)
TestTraffic = Traffic.TestCase
