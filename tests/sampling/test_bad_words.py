"""Words as lines of tokens."""

from __future__ import annotations

import pytest

from tinyvllm.errors import RequestError
from tinyvllm.sampling.bad_words import BadWords


def test_a_token_is_banned_where_it_would_complete_a_line() -> None:
    words = BadWords([[5], [1, 2], [1, 2, 3], [2, 9], []])
    assert words.looks_back
    assert words.banned([]) == {5}
    assert words.banned([1]) == {5, 2}
    assert words.banned([1, 2]) == {5, 3, 9}
    assert words.banned([2, 1]) == {5, 2}
    assert words.banned([1, 2, 7]) == {5}
    assert not BadWords([[5]]).looks_back


def test_words_are_banned_with_and_without_a_space() -> None:
    def encode(text: str) -> list[int] | None:
        return None if "#" in text else [ord(letter) for letter in text]

    words = BadWords.of(["ab", "c"], encode)
    assert words.banned([ord("a")]) == {ord("b"), ord("c")}
    assert words.banned([ord(" "), ord("a")]) == {ord("b"), ord("c")}
    assert words.banned([ord(" ")]) == {ord("c")}
    with pytest.raises(RequestError, match="bad_words: the vocabulary has no tokens for '#'"):
        BadWords.of(["ab", "#"], encode)
