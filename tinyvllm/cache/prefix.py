"""Which cached block holds the keys and values of which prefix. Integers and digests only: knows no tensors and no text.

A full block is known by a keyed hash of the hash before it and of its tokens, so that one lookup identifies the whole prefix; the chain
begins with the hash of a salt. The chaining is that of vLLM's automatic prefix caching; BLAKE2b (RFC 7693) is keyed, so that two prefixes
that collide cannot be made without the key. Not thread-safe.

Where layers form several groups, each block of a row of a table is cached by itself: its hash is that of the row with the group's number as
the last byte, and the chain of rows is that of group 0.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from hashlib import blake2b

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.listener import CacheListener
from tinyvllm.errors import ArgumentError, FormatError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.windows import BlockGroups, Window

HASH_BYTES = 16
KEY_BYTES = 64  # the longest key of BLAKE2b


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached block: its hash and that of the block before it (or of the salt), and its `block_size` tokens, int32 little-endian."""

    hash: bytes
    parent: bytes
    tokens: bytes
    block: int


@dataclass(frozen=True)
class Explanation:
    """How far a prompt is cached, and where it leaves the cached sequence of the same owner that agrees with it longest.

    hit_blocks        leading blocks that are found
    evicted_blocks    blocks after them that were cached once and have been evicted since
    first_difference  index of the first token that differs; None if nothing of this owner differs after the hit
    ours, theirs      token ids from there to the end of that block, of the prompt and of the cached sequence
    """

    hit_blocks: int
    evicted_blocks: int
    first_difference: int | None = None
    ours: list[int] = field(default_factory=list)
    theirs: list[int] = field(default_factory=list)


class PrefixCache:
    """The index over a pool's cached blocks; the pool's callback removes what it evicts.

    A block belongs to the owner whose sequence computed it; one that came from disk, or from an unknown caller, has no owner (None).
    A prefix is found if the blocks of all `groups` are cached that the query after it sees; without `groups` there is one, which sees all.
    What is found is a table (`BlockGroups`), with the scratch block in place of those before the window.
    A block of 16 tokens takes about 250 bytes of host memory here, and each of the `remembered` hashes of evicted blocks about 220.
    `queries` and `hits` count tokens, `evictions` blocks; none of them ever falls.
    """

    def __init__(self, pool: BlockPool, key: bytes, remembered: int = 65536, groups: BlockGroups | None = None) -> None:
        if len(key) > KEY_BYTES:
            raise ArgumentError(f"PrefixCache: the key must be at most {KEY_BYTES} bytes, got {len(key)}")
        assert pool.on_evict is None, "PrefixCache: the pool has one already"
        pool.on_evict = self._evicted
        self.pool, self.groups = pool, groups or BlockGroups(Window(0, pool.block_size))
        self._numbers = [bytes([group]) for group in range(self.groups.count)] if self.groups.count > 1 else []  # last bytes of hashes
        self.on_insert: Callable[[bytes], None] | None = None  # called with the hash of every block that becomes findable
        self.listener: CacheListener | None = None
        self.queries = self.hits = self.evictions = 0
        self._key = key
        self._keyed = blake2b(key=key, digest_size=HASH_BYTES)  # copied for each block: half the time of a new one
        self._packing = struct.Struct(f"<{pool.block_size}i")
        self._blocks: dict[bytes, int] = {}
        # of each block of the pool, where it is cached
        self._hashes: list[bytes] = [b""] * pool.num_blocks
        self._parents: list[bytes] = [b""] * pool.num_blocks
        self._tokens: list[bytes] = [b""] * pool.num_blocks
        self._owners: list[str | None] = [None] * pool.num_blocks
        self._adapters: list[str | None] = [None] * pool.num_blocks
        self._begins = bytearray(pool.num_blocks)  # whether it is the first of a chain: its parent is the hash of a salt
        self._no_salt = self._root(None)
        self._remembered = remembered
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # hashes that were evicted, the oldest first

    def hash_blocks(self, token_ids: Sequence[int], salt: str | None = None) -> list[bytes]:
        """The hashes of all full blocks of `token_ids`; a part of a block at the end has none."""
        hashes: list[bytes] = []
        self.extend(hashes, lambda start, stop: token_ids[start:stop], len(token_ids) // self.pool.block_size, salt)
        return hashes

    def extend(
        self, hashes: list[bytes], tokens_of: Callable[[int, int], Sequence[int]], num_full_blocks: int, salt: str | None = None
    ) -> None:
        """Append to the hashes of a sequence those of its next blocks, up to `num_full_blocks`; `tokens_of(start, stop)` are its tokens."""
        if len(hashes) >= num_full_blocks:
            return
        size, pack, keyed, numbers = self.pool.block_size, self._packing.pack, self._keyed.copy, self._numbers
        parent = hashes[-1] if hashes else self._root(salt)
        for start in range(len(hashes) * size, num_full_blocks * size, size):
            hash = keyed()
            hash.update(parent + pack(*tokens_of(start, start + size)))
            parent = hash.digest()
            if numbers:
                parent = parent[:-1] + numbers[0]
            hashes.append(parent)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The table of the longest prefix that is cached, each block with one reference more but those before the window."""
        blocks = self.find(hashes)
        self.pool.pin(self.held(blocks))
        return blocks

    def held(self, found: list[int]) -> list[int]:
        """Of the blocks that `match` has given, those that have a reference more."""
        return self.groups.held(found, self.groups.window.first_block(self.groups.num_tokens(len(found))))

    def known(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of each group `match` would find."""
        return self.groups.num_rows(self.find(hashes))

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The table that `match` would give; takes no reference and leaves the order of eviction as it is."""
        groups = self.groups
        if not groups.window.tokens:
            return self._leading([hashes])[0]
        full = self._leading([self._in_group(hashes, group) for group in range(groups.full)])
        reach = hashes[: len(full[0])] if full else hashes
        if not self._numbers:
            return self._find_within_window([reach])[0]
        windowed = self._find_within_window([self._in_group(reach, group) for group in range(groups.full, groups.count)])
        return [block for row in zip(*full, *windowed) for block in row]  # as long as the windowed ones

    def _leading(self, hashes: list[Sequence[bytes]]) -> list[list[int]]:
        """The leading blocks of groups that see all tokens, by each group's hashes: as many as all of them have."""
        get, found = self._blocks.get, list[list[int]]()
        for each in hashes:
            blocks: list[int] = []
            for digest in each[: len(found[-1])] if found else each:
                if (block := get(digest)) is None:
                    break
                blocks.append(block)
            found.append(blocks)
        return [blocks[: len(found[-1])] for blocks in found]

    def _find_within_window(self, hashes: list[Sequence[bytes]]) -> list[list[int]]:
        """From the right, as vLLM does: where a block is missing that the query after a prefix sees, the prefix must end before it. By each
        windowed group's hashes, the scratch block in place of those before the window.
        """
        get, size, first_block = self._blocks.get, self.pool.block_size, self.groups.window.first_block
        stop = at = len(hashes[0])
        first = first_block(stop * size)
        while at > first:
            at -= 1
            for each in hashes:
                if each[at] not in self._blocks:
                    stop, first = at, first_block(at * size)
                    break
        before = [self.pool.scratch_block] * first
        return [before + [get(digest, 0) for digest in each[first:stop]] for each in hashes]

    def _in_group(self, hashes: Sequence[bytes], group: int) -> Sequence[bytes]:
        """The hashes of rows in one of several groups."""
        return [digest[:-1] + self._numbers[group] for digest in hashes] if group else hashes

    def _group_of(self, digest: bytes) -> int | None:
        return digest[-1] if self._numbers else None

    def _of_group_0(self, digest: bytes) -> bytes:
        return digest[:-1] + self._numbers[0] if self._numbers else digest

    def count(self, queried: int, hit: int) -> None:
        """`hit` of `queried` tokens of a request were found. Apart from `match`, since one that comes back counts once."""
        self.queries += queried
        self.hits += hit

    def publish(
        self,
        hashes: Sequence[bytes],
        table: Sequence[int],
        start: int,
        stop: int,
        tokens_of: Callable[[int, int], Sequence[int]],
        salt: str | None = None,
        owner: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Rows start..stop of a held table, computed whole, can be found from now on; where a hash is known its older block stays. The
        scratch block is in the place of what was not computed.

        `tokens_of(start, stop)` are the sequence's tokens and `salt` its salt, as they were for `extend`; `owner` may read the tokens
        in an explanation, and `adapter` is the name of the adapter that computed them.
        """
        if start >= stop:
            return
        size, pack, blocks = self.pool.block_size, self._packing.pack, self._blocks
        parents = [hashes[start - 1] if start else self._root(salt), *hashes[start : stop - 1]]
        rows = hashes[start:stop]
        for group in range(self.groups.count):
            for i, digest, parent in zip(range(start, stop), self._in_group(rows, group), self._in_group(parents, group), strict=True):
                block = table[i * self.groups.count + group]
                if digest not in blocks and block != self.pool.scratch_block:
                    self.pool.keep(block)
                    self._insert(digest, parent, pack(*tokens_of(i * size, (i + 1) * size)), block, owner, adapter, begins=i == 0)

    def adopt(self, hash: bytes, parent: bytes, tokens: bytes) -> int | None:
        """A free block for an entry of an earlier cache, cached without a reference and older than all others; the caller fills it.

        None where every block is held or cached, or the hash is known already. FormatError where hash, parent and tokens do not belong
        together under this cache's key.
        """
        if len(tokens) != self._packing.size or not self._belongs(hash, parent, tokens):
            raise FormatError("PrefixCache: an entry's hash is not that of its tokens under this key; start with an empty cache folder")
        if hash in self._blocks or (block := self.pool.adopt()) is None:
            return None
        begins = self._of_group_0(parent) == self._no_salt  # which hashes are salts, no file says
        self._insert(hash, parent, tokens, block, None, None, begins)
        return block

    def entry(self, hash: bytes) -> Entry | None:
        """The block that is cached under a hash, if there is one."""
        block = self._blocks.get(hash)
        return None if block is None else Entry(hash, self._parents[block], self._tokens[block], block)

    def entries(self) -> Iterator[Entry]:
        """All cached blocks, each after its parent, otherwise the most recently used first. The cache must not change meanwhile.

        An entry whose parent was evicted is included: it is found again as soon as that parent is computed again.
        """
        seen: set[int] = set()
        for newest in self.pool.cached_blocks():
            chain: list[int] = []
            block: int | None = newest
            while block is not None and block not in seen:
                seen.add(block)
                chain.append(block)
                block = self._blocks.get(self._parents[block])
            for block in reversed(chain):
                yield Entry(self._hashes[block], self._parents[block], self._tokens[block], block)

    def drop(self, block: int) -> None:
        """A cached block is no longer found, held or not: its contents are not those of its hash."""
        digest = self._hashes[block]
        self._forget(block)
        if self.listener is not None:
            self.listener.removed(digest, self._group_of(digest))

    def reset(self) -> None:
        """Forget every block, also those that are held, and what was evicted; the counters stay."""
        for block in list(self._blocks.values()):
            self._forget(block)
        self._gone.clear()
        if self.listener is not None:
            self.listener.cleared()

    def describe(self, listener: CacheListener) -> None:
        """Report every cached block to `listener` as stored, each after its parent if that is cached, too."""
        for entry in self.entries():
            self._report(listener, entry.hash, entry.block)

    def explain(self, token_ids: Sequence[int], salt: str | None = None, owner: str | None = None) -> Explanation:
        """Why `token_ids` are cached as far as they are. Looks at every cached block once: for questions, not for each step.

        Only blocks of `owner` are compared: even the position of a difference would let a caller guess the prompt of another, token
        by token. Without an owner nothing is compared.
        """
        hashes = self.hash_blocks(token_ids, salt)
        hit = self.known(hashes)
        evicted = sum(any(self._in_group([digest], g)[0] in self._gone for g in range(self.groups.count)) for digest in hashes[hit:])
        parent = hashes[hit - 1] if hit else self._root(salt)
        start = hit * self.pool.block_size
        ours = list(token_ids[start : start + self.pool.block_size])
        theirs: list[int] = []
        longest = -1
        for block in () if owner is None else self._blocks.values():
            if self._parents[block] == parent and self._owners[block] == owner:
                tokens = list(self._packing.unpack(self._tokens[block]))
                same = next((i for i, (a, b) in enumerate(zip(ours, tokens)) if a != b), len(ours))
                if same > longest:
                    theirs, longest = tokens, same
        if not theirs or longest == len(ours):
            return Explanation(hit, evicted)
        return Explanation(hit, evicted, start + longest, ours[longest:], theirs[longest:])

    def _insert(
        self, digest: bytes, parent: bytes, tokens: bytes, block: int, owner: str | None, adapter: str | None, begins: bool
    ) -> None:
        self._blocks[digest] = block
        self._owners[block], self._adapters[block] = owner, adapter
        self._begins[block] = begins
        self._hashes[block], self._parents[block], self._tokens[block] = digest, parent, tokens
        self._gone.pop(digest, None)
        if self.on_insert is not None:
            self.on_insert(digest)
        if self.listener is not None:
            self._report(self.listener, digest, block)

    def _report(self, listener: CacheListener, digest: bytes, block: int) -> None:
        parent, begins = self._parents[block], self._begins[block]
        salt = parent if begins and self._of_group_0(parent) != self._no_salt else None
        listener.stored(digest, None if begins else parent, self._tokens[block], salt, self._adapters[block], self._group_of(digest))

    def _forget(self, block: int) -> None:
        self.pool.forget(block)
        del self._blocks[self._hashes[block]]
        self._clear(block)

    def _evicted(self, block: int) -> None:
        digest = self._hashes[block]
        del self._blocks[digest]
        self._clear(block)
        self.evictions += 1
        self._gone[digest] = None
        if len(self._gone) > self._remembered:
            self._gone.popitem(last=False)
        if self.listener is not None:
            self.listener.removed(digest, self._group_of(digest))

    def _clear(self, block: int) -> None:
        self._hashes[block] = self._parents[block] = self._tokens[block] = b""
        self._owners[block] = self._adapters[block] = None

    def _root(self, salt: str | None) -> bytes:
        # marked as a salt: or one of a block's length could be made equal to a block's parent and tokens
        text = (salt or "").encode("utf-8", "surrogatepass")
        return self._of_group_0(blake2b(text, key=self._key, digest_size=HASH_BYTES, person=b"salt").digest())

    def _belongs(self, hash: bytes, parent: bytes, tokens: bytes) -> bool:
        """Whether a hash is that of tokens after a parent, in the same group."""
        digest = self._keyed.copy()
        digest.update(self._of_group_0(parent) + tokens)
        expected = digest.digest()
        if self._numbers:
            group = hash[-1:]
            return group in self._numbers and parent[-1:] == group and expected[:-1] + group == hash
        return expected == hash
