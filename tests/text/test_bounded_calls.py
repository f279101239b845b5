"""Texts that a regular expression of a tokenizer.json never finishes: an error of their request, and no more."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.text.vocabularies import byte_level, write_folder
from tinyvllm.errors import TokenizerError
from tinyvllm.text import bounded_calls
from tinyvllm.text.bounded_calls import MAX_OVERDUE, BoundedCalls
from tinyvllm.text.load import load_tokenizer
from tinyvllm.text.tokenizer import Tokenizer

BACKTRACKING = ("a" * 16 + " ") * 1000  # 2 s: each word takes 2 ** 16 steps


def backtracking(tmp_path: Path) -> Tokenizer:
    value = json.loads(byte_level().to_str())
    value["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"(a+)+b|\s+|\S+"
    return load_tokenizer(write_folder(tmp_path, **{"tokenizer.json": json.dumps(value).encode()}))


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "tinyvllm-tokenizer":
            thread.join()


def test_calls_that_take_too_long_are_given_up_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_calls, "MAX_SECONDS", 0.0)
    calls, ends = BoundedCalls("the pattern"), threading.Event()
    for _ in range(MAX_OVERDUE):
        with pytest.raises(TokenizerError, match="the pattern takes more than 0 seconds for 5 characters; shorten them"):
            calls.run(ends.wait, 5)
    monkeypatch.setattr(bounded_calls, "MAX_SECONDS", 60.0)
    with pytest.raises(TokenizerError, match=f"{MAX_OVERDUE} earlier texts still occupy it"):
        calls.run(lambda: 1, 5)
    ends.set()
    join_threads()
    assert calls.run(lambda: 1, 5) == 1


def test_what_a_call_raises_is_raised() -> None:
    class PanicException(BaseException):
        pass

    def fail() -> None:
        raise PanicException("as the library does")

    with pytest.raises(PanicException, match="as the library does"):
        BoundedCalls("the pattern").run(fail, 5)


def test_a_pattern_that_backtracks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = backtracking(tmp_path)
    plain = load_tokenizer(write_folder(tmp_path, byte_level()))
    assert not tokenizer.is_quick and plain.is_quick
    assert tokenizer.encode("one two") and tokenizer.encode("a" * 100 + "b")
    monkeypatch.setattr(bounded_calls, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(bounded_calls, "CHARACTERS", 10**9)
    with pytest.raises(TokenizerError, match=r"the text splitting of .*tokenizer.json takes more than 0 seconds for 17000 characters"):
        tokenizer.encode(BACKTRACKING)
    assert plain.encode(BACKTRACKING), "another model is not affected"
    monkeypatch.setattr(bounded_calls, "MAX_SECONDS", 60.0)
    assert tokenizer.encode("one two"), "nor is another text"
    join_threads()


def test_a_pattern_that_exceeds_the_steps_of_the_library(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TokenizerError, match="failed on a text: .*retry-limit-in-match over"):
        backtracking(tmp_path).encode("a" * 40)
    capfd.readouterr()  # the library's own backtrace
