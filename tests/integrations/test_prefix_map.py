"""Hashes of prompts, and which replica a prompt goes to."""

from __future__ import annotations

import json

from tinyvllm.integrations.prefix_map import MAX_PIECES, PIECE_BYTES, PrefixMap, prompt_hashes

LONG = "a prompt of some length, " * 40


def hashes(text: str, **fields: object) -> list[bytes]:
    return prompt_hashes(json.dumps({"prompt": text, **fields}).encode())


def chat(*texts: str) -> list[bytes]:
    return prompt_hashes(json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode())


def test_hashes_agree_as_far_as_prompts_do() -> None:
    first, second = hashes(LONG + "x" * 600), hashes(LONG + "y" * 600)
    same = sum(a == b for a, b in zip(first, second))
    assert same == len(LONG) // PIECE_BYTES and first[same] != second[same] and len(first) == len(second) > same
    assert hashes(LONG, temperature=0.5, max_tokens=3) == hashes(LONG)
    turn = chat(LONG, "b")
    assert chat(LONG, "b", "c" * 300)[: len(turn)] == turn


def test_owners_and_salts_keep_prefixes_apart() -> None:
    body = json.dumps({"prompt": LONG}).encode()
    flat = [prompt_hashes(body)[0], prompt_hashes(body, b"Bearer a")[0], hashes(LONG, cache_salt="s")[0], hashes(LONG, model="m")[0]]
    assert len(set(flat)) == 4


def test_any_body_has_bounded_hashes() -> None:
    assert prompt_hashes(b"") == prompt_hashes(b"[" * 100_000) == prompt_hashes(b"[1]") == prompt_hashes(b"\xff") == []
    assert prompt_hashes(b'{"prompt": null}') == [] and prompt_hashes(b"{}") == []
    assert len(hashes("short")) == 1 and len(hashes("x" * 10_000_000)) == MAX_PIECES
    assert prompt_hashes(b'{"prompt": [1, 2, {"a": "\\ud800"}]}')


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
