"""PrefixCache: what is found, what is not, what it counts, and how it explains the rest."""

import struct
from hashlib import blake2b

import pytest

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import Entry, Explanation, PrefixCache
from tinyvllm.errors import ArgumentError, FormatError
from tinyvllm.windows import BlockGroups, Window

KEY = b"a key"


def cache_of(blocks: int, size: int = 2, **more) -> PrefixCache:
    return PrefixCache(BlockPool(blocks, size), KEY, **more)


def publish(cache: PrefixCache, tokens: list[int], salt: str | None = None, owner: str | None = "me") -> list[int]:
    """The held table of a sequence that has computed `tokens` without looking for them."""
    hashes = cache.hash_blocks(tokens, salt)
    table = cache.pool.allocate(cache.pool.blocks_for(len(tokens)))
    cache.publish(hashes, table, 0, len(hashes), lambda start, stop: tokens[start:stop], salt, owner)
    return table


def test_a_hash_is_that_of_parent_and_tokens_under_a_key():
    root = blake2b(b"mine", key=KEY, digest_size=16, person=b"salt").digest()
    first = blake2b(root + struct.pack("<2i", 1, 70000), key=KEY, digest_size=16).digest()
    second = blake2b(first + struct.pack("<2i", 3, 4), key=KEY, digest_size=16).digest()
    assert cache_of(1).hash_blocks([1, 70000, 3, 4, 5], "mine") == [first, second]


def test_other_parents_salts_and_keys_give_other_hashes():
    cache = cache_of(1)
    hashes = [cache.hash_blocks([1, 2, 1, 2]), cache.hash_blocks([1, 2], "a"), cache.hash_blocks([1, 2], "b")]
    hashes.append(PrefixCache(BlockPool(1, 2), b"another").hash_blocks([1, 2]))
    flat = [digest for each in hashes for digest in each]
    assert len(flat) == len(set(flat)) == 5


def test_hashes_are_appended_as_tokens_come():
    cache, tokens, asked = cache_of(1), list(range(7)), []

    def tokens_of(start: int, stop: int) -> list[int]:
        asked.append(start)
        return tokens[start:stop]

    hashes: list[bytes] = []
    for full in (1, 1, 3, 2):
        cache.extend(hashes, tokens_of, full)
    assert hashes == cache.hash_blocks(tokens) and asked == [0, 2, 4]


def test_a_key_that_is_too_long_is_refused():
    with pytest.raises(ArgumentError, match="at most 64 bytes, got 65"):
        PrefixCache(BlockPool(1, 2), bytes(65))


def test_a_prefix_is_found_live_and_after_its_owner_has_gone():
    cache = cache_of(6)
    table = publish(cache, [1, 2, 3, 4, 5])
    hashes = cache.hash_blocks([1, 2, 3, 4, 9, 9])
    assert cache.known(hashes) == 2 and cache.match(hashes) == table[:2]
    assert [cache.pool.reference_count(block) for block in table] == [2, 2, 1]
    cache.pool.release(table)
    cache.pool.release(table[:2])
    assert cache.pool.num_free == 6
    assert cache.match(hashes) == table[:2] and cache.pool.num_free == 4
    assert cache.match(cache.hash_blocks([9, 2, 3, 4])) == []
    assert cache.match(cache.hash_blocks([1, 2, 3, 4], "salt")) == []


def test_a_chain_is_found_up_to_its_first_gap():
    cache = cache_of(3)
    tokens = [1, 2, 3, 4, 5, 6]
    table = publish(cache, tokens)
    cache.drop(table[1])
    assert cache.match(cache.hash_blocks(tokens)) == table[:1]


def test_the_older_of_two_equal_blocks_is_the_one_that_is_found():
    cache = cache_of(4)
    first, second = publish(cache, [1, 2, 3, 4]), publish(cache, [1, 2, 3, 4])
    cache.pool.release(first)
    cache.pool.release(second)
    assert cache.pool.num_cached == 2
    assert cache.match(cache.hash_blocks([1, 2, 3, 4])) == first
    assert sorted(cache.pool.allocate(2)) == second  # was never cached, so nothing went for it
    assert cache.evictions == 0


def test_tails_are_evicted_before_their_prefix_and_the_oldest_first():
    cache = cache_of(4)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    cache.pool.release(publish(cache, old))
    cache.pool.release(publish(cache, new))
    found = []
    for _ in range(4):
        found.append((cache.known(cache.hash_blocks(old)), cache.known(cache.hash_blocks(new))))
        cache.pool.allocate(1)
    assert found == [(2, 2), (1, 2), (0, 2), (0, 1)]
    assert cache.evictions == 4 and cache.pool.num_cached == 0


def test_counts_are_what_was_counted():
    cache = cache_of(2)
    cache.count(10, 4)
    cache.count(5, 0)
    assert (cache.queries, cache.hits, cache.evictions) == (15, 4, 0)


def test_reset_forgets_what_is_held_and_what_is_not():
    cache = cache_of(4)
    held, gone = publish(cache, [1, 2]), publish(cache, [3, 4])
    cache.pool.release(gone)
    cache.reset()
    assert cache.pool.num_cached == 0 and cache.pool.num_free == 3
    assert not cache.match(cache.hash_blocks([1, 2])) and not list(cache.entries())
    cache.publish(cache.hash_blocks([1, 2]), held, 0, 1, lambda start, stop: [1, 2])
    assert cache.match(cache.hash_blocks([1, 2])) == held


def test_explain_finds_the_sequence_that_agrees_longest():
    cache = cache_of(8, size=4)
    publish(cache, [1, 2, 3, 4, 5, 9, 9, 9])
    publish(cache, [1, 2, 3, 4, 5, 6, 7, 9])
    publish(cache, [1, 2, 3, 4, 9, 9, 9, 9])
    assert cache.explain([1, 2, 3, 4, 5, 6, 8, 8, 1], owner="me") == Explanation(1, 0, 6, [8, 8], [7, 9])
    assert cache.explain([1, 2, 0], owner="me") == Explanation(0, 0, 2, [0], [3, 4])
    assert cache.explain([1, 2, 3], owner="me") == Explanation(0, 0)
    assert cache.explain([1, 2, 3, 4, 5, 6, 7, 9, 1], owner="me") == Explanation(2, 0)
    assert cache.explain([1, 2, 3, 4], "salt", "me") == Explanation(0, 0)
    assert cache.explain([], owner="me") == Explanation(0, 0)


def test_explain_compares_with_blocks_of_the_same_owner_only():
    """Not even the position of a difference is shown: from positions, a prompt can be guessed token by token."""
    cache = cache_of(8, size=4)
    publish(cache, [1, 2, 3, 4, 5, 6, 7, 8], owner="alice")
    publish(cache, [1, 2, 9, 9], owner="bob")
    publish(cache, [1, 2, 3, 3], owner=None)
    assert cache.explain([1, 2, 3, 9], owner="alice") == Explanation(0, 0, 3, [9], [4])
    assert cache.explain([1, 2, 3, 9], owner="bob") == Explanation(0, 0, 2, [3, 9], [9, 9])
    assert cache.explain([1, 2, 3, 9], owner="carol") == cache.explain([1, 2, 3, 9]) == Explanation(0, 0)
    assert cache.explain([1, 2, 3, 4, 5, 6, 9, 9], owner="bob") == Explanation(1, 0), "hits count, of whichever owner"


def test_blocks_of_another_process_have_no_owner():
    source, cache = cache_of(4), cache_of(4)
    publish(source, [1, 2], owner="key-1")
    for entry in source.entries():
        cache.adopt(entry.hash, entry.parent, entry.tokens)
    assert cache.known(cache.hash_blocks([1, 2])) == 1
    assert cache.explain([1, 3], owner="key-1") == Explanation(0, 0), "keys may have other names than in the process that wrote them"


def test_a_block_that_is_used_again_has_its_new_owner():
    cache = cache_of(1)
    cache.pool.release(publish(cache, [1, 2], owner="alice"))
    publish(cache, [1, 3], owner="bob")
    assert cache.explain([1, 4], owner="alice") == Explanation(0, 0)
    assert cache.explain([1, 4], owner="bob") == Explanation(0, 0, 1, [4], [3])


def test_explain_tells_evicted_from_never_seen():
    cache = cache_of(3)
    cache.pool.release(publish(cache, [1, 2, 3, 4, 5, 6]))
    taken = cache.pool.allocate(2)
    assert cache.explain([1, 2, 3, 4, 5, 6, 7, 8], owner="me") == Explanation(1, 2)
    cache.pool.release(taken)
    publish(cache, [1, 2, 3, 4])  # leaves one block free, so that [1, 2] goes as well and both come back
    assert cache.explain([1, 2, 3, 4, 5, 6], owner="me") == Explanation(2, 1)


def test_the_memory_of_what_was_evicted_is_bounded():
    cache = cache_of(3, remembered=2)
    cache.pool.release(publish(cache, [1, 2, 3, 4, 5, 6]))
    cache.pool.allocate(3)
    assert cache.explain([1, 2, 3, 4, 5, 6], owner="me").evicted_blocks == 2  # the tail went first and is forgotten


def test_entries_come_after_their_parents_the_latest_used_first():
    cache = cache_of(6)
    old, new, held = publish(cache, [1, 2, 3, 4]), publish(cache, [5, 6, 7, 8]), publish(cache, [1, 2, 9, 9])
    for table in (old, new):
        cache.pool.release(table)
    hashes = cache.hash_blocks([1, 2, 9, 9])
    assert [entry.block for entry in cache.entries()] == [old[0], held[1], *new, old[1]]
    assert list(cache.entries())[1] == Entry(hashes[1], hashes[0], struct.pack("<2i", 9, 9), held[1])


def test_adopted_entries_are_found_and_the_first_to_go():
    source = cache_of(4)
    publish(source, [1, 2, 3, 4])
    entries = list(source.entries())
    cache = cache_of(3)
    cache.pool.release(publish(cache, [7, 8]))
    blocks = [cache.adopt(entry.hash, entry.parent, entry.tokens) for entry in entries]
    assert None not in blocks and cache.pool.num_free == 3
    assert cache.adopt(entries[0].hash, entries[0].parent, entries[0].tokens) is None  # known
    cache.pool.allocate(1)
    assert cache.known(cache.hash_blocks([1, 2, 3, 4])) == 1 and cache.known(cache.hash_blocks([7, 8])) == 1


def test_adopt_takes_no_block_that_is_used_and_no_wrong_hash():
    source = cache_of(1)
    publish(source, [1, 2])
    (entry,) = source.entries()
    cache = cache_of(1)
    with pytest.raises(FormatError, match="under this key"):
        cache.adopt(entry.hash, entry.parent, struct.pack("<2i", 1, 3))
    with pytest.raises(FormatError, match="under this key"):
        PrefixCache(BlockPool(1, 2), b"another").adopt(entry.hash, entry.parent, entry.tokens)
    cache.pool.release(publish(cache, [3, 4]))
    assert cache.adopt(entry.hash, entry.parent, entry.tokens) is None
    assert cache.known(cache.hash_blocks([3, 4])) == 1


def test_what_came_back_and_was_evicted_again_is_remembered_as_the_latest():
    cache = cache_of(1, remembered=2)
    for tokens in ([1, 2], [3, 4], [1, 2], [5, 6], [7, 8]):
        cache.pool.release(publish(cache, tokens))
    assert [cache.explain(tokens, owner="me").evicted_blocks for tokens in ([1, 2], [3, 4], [5, 6])] == [1, 0, 1]


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def stored(self, *event: object) -> None:
        self.events.append(("stored", *(event[:-1] if event[-1] is None else event)))  # without a group

    def removed(self, hash: bytes, group: int | None = None) -> None:
        self.events.append(("removed", hash) if group is None else ("removed", hash, group))

    def cleared(self) -> None:
        self.events.append(("cleared",))


def test_a_listener_hears_every_change_once_and_in_order():
    cache, heard = cache_of(3), Heard()
    cache.listener = heard
    pack = struct.Struct("<2i").pack
    table = publish(cache, [1, 2, 3, 4])
    first, second = cache.hash_blocks([1, 2, 3, 4])
    assert heard.events == [("stored", first, None, pack(1, 2), None, None), ("stored", second, first, pack(3, 4), None, None)]
    again = publish(cache, [1, 2])  # known already
    cache.pool.release(again)
    cache.pool.release(table)
    heard.events.clear()
    publish(cache, [5, 6, 7, 8], "mine")
    (salted, after), root = cache.hash_blocks([5, 6, 7, 8], "mine"), cache._root("mine")
    assert heard.events == [
        ("removed", second),
        ("stored", salted, None, pack(5, 6), root, None),
        ("stored", after, salted, pack(7, 8), None, None),
    ]
    heard.events.clear()
    cache.drop(cache.find([salted])[0])
    cache.reset()
    assert heard.events == [("removed", salted), ("cleared",)]


def test_a_cache_describes_itself_to_a_listener():
    cache, heard = cache_of(4), Heard()
    cache.pool.release(publish(cache, [1, 2, 3, 4]))
    publish(cache, [5, 6], "mine")
    cache.describe(heard)
    (first, second), (salted,) = cache.hash_blocks([1, 2, 3, 4]), cache.hash_blocks([5, 6], "mine")
    pack = struct.Struct("<2i").pack
    expected = [("stored", first, None, pack(1, 2), None, None), ("stored", second, first, pack(3, 4), None, None)]
    assert heard.events == [("stored", salted, None, pack(5, 6), cache._root("mine"), None), *expected]


def test_a_listener_hears_of_adopted_blocks():
    cache, heard = cache_of(4), Heard()
    cache.listener = heard
    pack = struct.Struct("<2i").pack
    for salt, parent in ((None, None), ("mine", cache._root("mine"))):  # which hashes are salts, an adopted block does not say
        (hash,) = cache.hash_blocks([1, 2], salt)
        cache.adopt(hash, cache._root(salt), pack(1, 2))
        assert heard.events.pop() == ("stored", hash, parent, pack(1, 2), None, None) and not heard.events


GROUPS = BlockGroups(Window(3, 2), full=1, windowed=2)  # a query after full blocks sees one block of the windowed groups


def grouped(blocks: int = 40) -> tuple[PrefixCache, list[bytes], list[int]]:
    """A cache with three rows of a sequence, their hashes and the table."""
    cache = cache_of(blocks, groups=GROUPS)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    hashes, table = cache.hash_blocks(tokens), cache.pool.allocate(9)
    cache.publish(hashes, table, 0, 3, lambda start, stop: tokens[start:stop])
    return cache, hashes, table


def test_a_prefix_is_as_long_as_every_group_finds():
    cache, hashes, table = grouped()
    scratch = cache.pool.scratch_block
    assert cache.find(hashes) == [table[0], scratch, scratch, table[3], scratch, scratch, *table[6:]]
    assert cache.known(hashes) == 3 and cache.find(hashes[:1]) == table[:3]
    cache.drop(table[8])  # a windowed block of the last row
    assert cache.find(hashes) == [table[0], scratch, scratch, *table[3:6]]
    cache.drop(table[4])
    assert cache.known(hashes) == 1, "before the second row the query sees the first"
    cache.drop(table[0])
    assert cache.find(hashes) == []


def test_what_is_found_is_held_as_far_as_it_is_seen():
    cache, hashes, table = grouped()
    cache.pool.release(table)
    found = cache.match(hashes)
    assert cache.held(found) == [table[0], table[3], *table[6:]] and cache.pool.num_free == 40 - 5
    cache.pool.release(cache.held(found))


def test_a_block_that_was_not_computed_is_not_published():
    """As after a swap: the layers that see all have every block, those with windows only the last."""
    cache = cache_of(40, groups=GROUPS)
    tokens, scratch = [1, 2, 3, 4], cache.pool.scratch_block
    blocks = cache.pool.allocate(4)
    table = [blocks[0], scratch, scratch, *blocks[1:]]
    cache.publish(cache.hash_blocks(tokens), table, 0, 2, lambda start, stop: tokens[start:stop])
    assert cache.find(cache.hash_blocks(tokens)) == table and cache.pool.num_cached == 4
    assert cache.known(cache.hash_blocks(tokens[:2])) == 0


def test_a_listener_hears_of_each_group():
    cache, hashes, table = grouped()
    heard = cache.listener = Heard()
    cache.describe(heard)
    assert sorted(event[-1] for event in heard.events) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    parents = {event[1]: event[2] for event in heard.events}
    assert sum(parent is None for parent in parents.values()) == 3 and {*parents.values()} <= {None, *parents}, "a chain in each group"
    heard.events.clear()
    cache.drop(table[5])
    assert heard.events == [("removed", hashes[1][:-1] + b"\2", 2)]


def test_entries_of_groups_come_back_under_their_own_hashes():
    cache, hashes, table = grouped()
    entries = list(cache.entries())
    assert len({entry.hash for entry in entries}) == 9
    other = cache_of(9, groups=GROUPS)
    moved = {entry.block: other.adopt(entry.hash, entry.parent, entry.tokens) for entry in entries}
    assert other.find(hashes)[6:] == [moved[block] for block in table[6:]]
    with pytest.raises(FormatError, match="hash is not that of its tokens"):
        other.adopt(entries[0].hash[:-1] + b"\3", entries[0].parent, entries[0].tokens)
    with pytest.raises(FormatError, match="hash is not that of its tokens"):
        other.adopt(entries[0].hash, entries[0].parent[:-1] + b"\2", entries[0].tokens)
