"""Texts are cut before they are encoded: as many tokens as are kept, and no more work than those need."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.text.test_detokenize import KINDS, tokenizer
from tinyvllm.server.core import prompts
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.prompts import Truncation, encode_texts, encode_truncated, text_size

WORDS = ["Once", "upon", "a", "time,", "there", "girl's", "dragon", "forest.", "12345", "\n\n", "été", "naïve", "你好", "🐉"]


class Watched:
    """A tokenizer that records the length of what it encodes."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def llm(tokenizer: Any, context: int = 4096) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, max_model_len=context)


@pytest.mark.parametrize("kind", KINDS)
def test_both_ends_of_a_text_have_the_tokens_of_the_whole_text(kind: str) -> None:
    """For every kind of tokenizer: with words, and with one long word."""
    watched = Watched(tokenizer(kind))
    draw = random.Random(5)
    words = " ".join(draw.choices(WORDS, k=20_000))
    for text in (words, "ab" * 30_000, words[:50]):
        whole = watched.encode(text)
        for keep in (0, 1, 7, 100):
            assert encode_truncated(llm(watched), text, True, Truncation(keep)) == (whole[-keep:] if keep else [])
            assert encode_truncated(llm(watched), text, True, Truncation(keep, "right")) == whole[:keep]
        assert encode_truncated(llm(watched, 200), text, True, Truncation(-1)) == whole[-199:]
        assert encode_truncated(llm(watched), text, False, None) == watched.encode(text, False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_many_spaces(kind: str) -> None:
    """Some tokenizers drop spaces, so the end is too short and the whole text is encoded; others merge them from the start of the run."""
    text = "Once upon a time " * 1000 + " " * 60_000
    whole, kept = tokenizer(kind).encode(text), encode_truncated(llm(tokenizer(kind)), text, True, Truncation(100))
    dropped = not tokenizer(kind).decode(whole).endswith(" " * 50)
    assert len(kept) == 100 and (kept == whole[-100:] if dropped else set(tokenizer(kind).decode(kept)) <= {" "})


def test_only_what_is_kept_is_encoded() -> None:
    watched = Watched(tokenizer("byte-level"))
    longest = max(len(watched.token_text(i)) for i in range(watched.vocab_size))
    for side in ("left", "right"):
        assert len(encode_truncated(llm(watched), "Once upon " * 100_000, True, Truncation(10, side))) == 10
    assert watched.lengths and max(watched.lengths) <= (10 + 64) * longest


def test_texts_beyond_the_context_are_refused_before_they_are_encoded() -> None:
    watched = Watched(tokenizer("byte-level"))
    with pytest.raises(Failure, match="at least") as failed:
        asyncio.run(encode_texts(llm(watched, 50), "Once upon " * 100_000, "prompt"))
    assert failed.value.code == "context_length_exceeded" and not watched.lengths
    assert asyncio.run(encode_texts(llm(watched, 50), "Once upon " * 100_000, "prompt", truncation=Truncation(-1)))[0].token_ids
    assert max(watched.lengths) < 10_000


def test_size_of_a_value() -> None:
    assert text_size({"a": ["bc", {"def": None}], "g": (1, 2.0, True)}) == 1 + 2 + 2 + 1 + 3 + 1 + 4 + 1 + 1 + 1 + 1 + 1
    assert 2**18 < text_size([["a"] * 1000] * 10_000) < 2**18 + 20


def test_a_huge_text_whose_thread_cannot_start_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    prompts._huge_texts.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            asyncio.run(prompts.run_aside(2**20, lambda: ran.append(1)))
    asyncio.run(prompts.run_aside(2**20, lambda: ran.append(2)))
    assert ran == [2]
