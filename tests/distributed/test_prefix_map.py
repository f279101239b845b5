"""Hashes of prompts of tokens, and which replica a prompt goes to."""

from __future__ import annotations

from tinyvllm.distributed.prefix_map import MAX_PIECES, PrefixMap, chained_hashes, token_hashes

LONG = "a prompt of some length, " * 40


def hashes(text: str) -> list[bytes]:
    return chained_hashes(text.encode(), b"")


def test_hashes_of_tokens() -> None:
    """They agree as far as the tokens do, in pieces of 64, and with another salt not at all."""
    first, second = token_hashes([*range(200), 1], None), token_hashes([*range(200), 2, 3], None)
    assert len(first) == len(second) == 3 and first == second
    assert token_hashes([*range(150), *range(200)], None)[:2] == first[:2] != token_hashes([*range(1, 201)], None)[:2]
    assert not {*first} & {*token_hashes([*range(200)], "salt")}
    assert len(token_hashes([5], None)) == 1 and token_hashes([], None) == [] and len(token_hashes([1] * 100_000, None)) == MAX_PIECES
    assert token_hashes([1 << 40], None) == []  # no token of any model: the engine says so


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    prefixes, loads = PrefixMap(), {"a": 0, "b": 0, "c": 0}
    one, two = hashes(LONG + "x" * 600), hashes(LONG + "y" * 600)
    first = prefixes.rank(one, loads)[0]
    prefixes.routed(one, first)
    assert prefixes.rank(two, loads)[0] == first and sorted(prefixes.rank(two, loads)) == ["a", "b", "c"]
    other = next(name for name in loads if name != first)
    prefixes.routed(two, other)
    assert prefixes.rank(two, loads)[0] == other and prefixes.rank(one, loads)[0] == first


def test_a_busy_replica_passes_its_prefix_on() -> None:
    prefixes = PrefixMap(max_excess=4)
    one = hashes(LONG)
    prefixes.routed(one, "a")
    assert prefixes.rank(one, {"a": 4, "b": 0})[0] == "a"
    assert prefixes.rank(one, {"a": 5, "b": 0}) == ["b", "a"]
    assert prefixes.rank([], {"a": 1, "b": 0}) == ["b", "a"] and prefixes.rank(one, {}) == []


def test_unknown_prompts_are_spread_and_stay_where_they_are_when_a_replica_comes() -> None:
    """Two routers without a common state agree; a fourth replica takes a quarter."""
    prompts = [hashes(f"{i} {LONG}") for i in range(400)]
    three, four = dict.fromkeys("abc", 0), dict.fromkeys("abcd", 0)
    before, after = [PrefixMap().rank(one, three)[0] for one in prompts], [PrefixMap().rank(one, four)[0] for one in prompts]
    assert min(before.count(name) for name in three) > 90
    moved = [(old, new) for old, new in zip(before, after) if old != new]
    assert 60 < len(moved) < 140 and {new for _, new in moved} == {"d"}


def test_large_prefixes_do_not_share_a_replica_while_others_have_none() -> None:
    """As many as replicas: each has one, whatever their hashes prefer; then the shares stay within a quarter of the mean."""
    prefixes, loads = PrefixMap(), dict.fromkeys("abc", 0)
    homes = []
    for i in range(60):
        one = hashes(f"{i} {LONG}")
        homes.append(prefixes.rank(one, loads)[0])
        prefixes.routed(one, homes[-1])
        assert prefixes.rank(one, loads)[0] == homes[-1]
    assert {*homes[:3]} == {"a", "b", "c"} and {*homes[3:6]} == {"a", "b", "c"}
    assert max(homes.count(name) for name in loads) <= 25


def test_a_share_shrinks_with_what_is_forgotten() -> None:
    prefixes, loads = PrefixMap(max_entries=2 * len(hashes(LONG))), {"a": 0, "b": 0}
    for i in range(50):
        prefixes.routed(hashes(f"{i} {LONG}"), "a")
    prefixes.keep({"a", "b"})
    assert {prefixes.rank(hashes(f"x{i} {LONG}"), loads)[0] for i in range(9)} == {"b"}
    for i in range(2):
        prefixes.routed(hashes(f"b{i} {LONG}"), "b")
    assert {prefixes.rank(hashes(f"x{i} {LONG}"), loads)[0] for i in range(9)} == {"a"}


def test_replicas_that_are_gone_are_forgotten_and_the_map_is_bounded() -> None:
    prefixes = PrefixMap(max_entries=10)
    one, two = hashes(LONG), hashes("z" + LONG)
    prefixes.routed(one, "a")
    prefixes.routed(one, "b")
    prefixes.routed(two, "a")
    prefixes.keep({"b"})
    assert len(prefixes) == len(one)
    for i in range(20):
        prefixes.routed(hashes(f"{i}{LONG}"), "b")
    assert len(prefixes) == 10
