"""Decoding token by token equals decoding at once, for every kind of tokenizer, all ids and cuts; stop strings across pieces."""

from __future__ import annotations

import random
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from tests.text.vocabularies import (
    NASTY,
    byte_level,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    llama2_json,
    metaspace_json,
    sentencepiece_model,
    tiktoken_lines,
    write_folder,
)
from tinyvllm.text.detokenize import IncrementalDetokenizer, StopAutomaton, StopStrings, stop_automaton
from tinyvllm.text.load import load_tokenizer, tokenizer_from_gguf
from tinyvllm.text.tokenizer import Tokenizer


def strip_two() -> Backend:
    backend = Backend.from_str(llama2_json(sentencepiece_model()).to_str())
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    return backend


def more_tokens() -> Backend:
    """Added tokens in characters that byte-level BPE does not use, and in one that it does use, for another byte."""
    backend = Backend.from_str(byte_level().to_str())
    backend.add_special_tokens(["<｜end▁of▁turn｜>"])
    backend.add_tokens([AddedToken("two words", normalized=False), AddedToken("<é>", normalized=False)])
    return backend


FOLDERS = {
    "byte-level": byte_level,
    "byte-level, added tokens": more_tokens,
    "byte fallback": lambda: llama2_json(sentencepiece_model()),
    "byte fallback, two spaces stripped": strip_two,
    "metaspace": metaspace_json,
}
FILES = {
    "tiktoken": lambda: tiktoken_lines(byte_level()),
    "sentencepiece": sentencepiece_model,
    "sentencepiece, extra spaces removed": lambda: sentencepiece_model(remove_extra_whitespaces=True),
    "sentencepiece without fallback": lambda: sentencepiece_model("unigram", False),
}
METADATA = {
    "gguf bpe": lambda: gguf_of_byte_level(byte_level()),
    "gguf sentencepiece": lambda: gguf_of_sentencepiece(sentencepiece_model()),
}
KINDS = [*FOLDERS, *FILES, *METADATA]


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind in METADATA:
        return tokenizer_from_gguf(METADATA[kind]())
    with TemporaryDirectory() as folder:
        if kind in FOLDERS:
            return load_tokenizer(write_folder(Path(folder), FOLDERS[kind]()))
        return load_tokenizer(write_folder(Path(folder), **{"tokenizer.model": FILES[kind]()}))


@cache
def interesting_ids(kind: str) -> list[int]:
    """Ids to draw often: bytes, single invalid bytes, spaces, special tokens, an id without a token."""
    one = tokenizer(kind)
    odd = [i for i in range(one.vocab_size) if one.is_byte(i) or "\ufffd" in one.token_text(i) or not one.token_text(i).strip(" ")]
    return [*odd, *one.special_ids, *range(one.vocab_size - 3, one.vocab_size), one.vocab_size + 3]


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.one_of(st.sampled_from(interesting_ids(kind)), st.integers(0, tokenizer(kind).vocab_size - 1)), max_size=12)


def shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_equals_the_whole_decode(kind: str, data: st.DataObject) -> None:
    one = tokenizer(kind)
    prompt, output = data.draw(ids_of(kind)), data.draw(ids_of(kind))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(one, prompt, skip)
    pieces, rest = [], output
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces.append(detokenizer.add(rest[:cut] if cut > 1 else rest[0]))
        rest = rest[cut:]
    pieces.append(detokenizer.finish())
    before, whole = one.decode(prompt, skip), one.decode(prompt + output, skip)
    assert "".join(pieces) == whole[shared(before, whole) :]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_output_of_real_texts(kind: str) -> None:
    one, dice = tokenizer(kind), random.Random(1)
    for text in NASTY:
        ids = one.encode(text)
        cut = dice.randrange(len(ids) + 1)
        detokenizer = IncrementalDetokenizer(one, ids[:cut])
        whole, before = one.decode(ids), one.decode(ids[:cut])
        pieces = [detokenizer.add(i) for i in ids[cut:]] + [detokenizer.finish()]
        assert "".join(pieces) == whole[shared(before, whole) :]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("metaspace", "sentencepiece without fallback")])
@given(text=st.text(st.characters(exclude_characters="\ufffd<", exclude_categories=("Cs",)), max_size=30))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_never_an_incomplete_character(kind: str, text: str) -> None:
    one = tokenizer(kind)
    detokenizer = IncrementalDetokenizer(one, [])
    pieces = [detokenizer.add(i) for i in one.encode(text)] + [detokenizer.finish()]
    assert all("\ufffd" not in piece for piece in pieces)
    if "removed" not in kind and "two spaces" not in kind:
        spaced = "sentencepiece" in kind or "fallback" in kind
        assert "".join(pieces) == (text.replace("▁", " ") if spaced else text)


def test_a_character_comes_with_its_last_token() -> None:
    for kind in ("byte-level", "sentencepiece", "tiktoken", "gguf sentencepiece"):
        one = tokenizer(kind)
        ids = one.encode("x👍y", add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(one, ids[:1])
        pieces = [detokenizer.add(i) for i in ids[1:]]
        start = pieces.index("👍") if "👍" in pieces else pieces.index("x👍")
        assert pieces[start + 1 :] == ["y"] and set(pieces[:start]) <= {"", "x"}


def test_the_prompt_costs_little() -> None:
    """Only the ends of a prompt are read, regardless of its length."""
    one = tokenizer("byte fallback")
    asked = []
    whole = one.encode("the quick brown fox " * 1000)

    class Watched(list):
        def __getitem__(self, index):  # noqa: ANN001, ANN204
            asked.append(index)
            return super().__getitem__(index)

    detokenizer = IncrementalDetokenizer(one, Watched(whole))
    assert len(asked) < 10
    assert detokenizer.add(one.encode("the", add_special_tokens=False)) == " the"


def test_broken_bytes_at_the_end() -> None:
    one = tokenizer("byte-level")
    broken = one.encode("👍", add_special_tokens=False)[:2]
    detokenizer = IncrementalDetokenizer(one, [])
    assert [detokenizer.add(i) for i in broken] == ["", ""]
    assert detokenizer.finish() == "\ufffd" == one.decode(broken)
    assert detokenizer.finish() == ""


def test_a_character_begun_in_the_prompt() -> None:
    one = tokenizer("byte-level")
    first, *rest = one.encode("👍", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(one, [*one.encode("so "), first])
    assert "".join(map(detokenizer.add, rest)) == "👍"


def fed(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    search, text = StopStrings(StopAutomaton(stops), include), ""
    for piece in pieces:
        new, matched = search.add(piece)
        text += new
        if matched is not None:
            return text + search.finish(), matched
    return text + search.finish(), None


class TestStopStrings:
    def test_cut_from_the_text_or_kept(self) -> None:
        assert fed(["END"], ["some EN", "D and more"]) == ("some ", "END")
        assert fed(["END"], ["some EN", "D and more"], include=True) == ("some END", "END")
        assert fed(["END"], ["some EN", "Dless? ", "EN"]) == ("some ", "END")
        assert fed(["END"], ["some EN", "d"]) == ("some ENd", None)
        assert fed([], ["a", "b"]) == ("ab", None)

    def test_holds_back_no_more_than_it_must(self) -> None:
        search = StopStrings(StopAutomaton(["\n\nUser:", "abab"]))
        assert search.add("text\n") == ("text", None)
        assert search.add("x") == ("\nx", None)
        assert search.add("aba") == ("", None)
        assert search.add("c") == ("abac", None)
        assert search.add("ab") == ("", None)
        assert search.add("abX") == ("", "abab")
        assert search.matched == "abab"
        assert search.add("later") == ("", "abab")
        assert search.finish() == ""

    def test_cost_is_linear_in_the_length_of_the_stop_strings(self) -> None:
        """A set of all prefixes took 1.5 GB for 60,000 characters. Here: the longest that a request may have, in a few megabytes."""
        stops = [chr(65 + i) + "ab" * 511 + "!" for i in range(16)]
        tracemalloc.start()
        automaton = StopAutomaton(stops)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(automaton.lengths) == 16 * 1024 + 1 and size < 2**23
        searches = [StopStrings(automaton) for _ in range(1024)]
        assert all(search.add("A" + "ab" * 511) == ("", None) for search in searches[:4])
        assert searches[0].add("!") == ("", stops[0]) and searches[1].add("?") == (stops[0][:-1] + "?", None)

    def test_requests_share_an_automaton(self) -> None:
        assert stop_automaton(("a", "b")) is stop_automaton(("a", "b"))

    def test_first_complete_then_longest(self) -> None:
        assert fed(["abcd", "bc"], ["abcd"]) == ("a", "bc")
        assert fed(["c", "bc", "abc"], ["xabc"]) == ("x", "abc")

    @given(
        text=st.text("abc", max_size=30),
        stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
        cuts=st.lists(st.integers(0, 30), max_size=6),
        include=st.booleans(),
    )
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_the_cut_into_pieces_does_not_matter(self, text: str, stops: list[str], cuts: list[int], include: bool) -> None:
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        pieces = [text[a:b] for a, b in zip(edges, edges[1:])]
        expected: tuple[str, str | None] = (text, None)
        for end in range(1, len(text) + 1):
            ending = max((one for one in stops if text[:end].endswith(one)), key=len, default=None)
            if ending is not None:
                expected = (text[: end if include else end - len(ending)], ending)
                break
        assert fed(stops, pieces, include) == expected
