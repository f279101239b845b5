"""What bounds foreign files: sizes, numbers of values, depth; and messages of one printable line, whatever they quote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinyvllm import foreign
from tinyvllm.errors import MAX_MESSAGE, FormatError, ModelError, TokenizerError, one_line
from tinyvllm.foreign import MAX_JSON_VALUES, parse_json, quoted, read_bounded


@pytest.mark.parametrize("error", [ModelError, FormatError, TokenizerError])
def test_messages_about_files_are_one_short_printable_line(error: type[Exception]) -> None:
    text = "speaker: wrong " + "x\n\x1b[31m\ud800" * 500_000 + "; try again"
    message = str(error(text))
    assert len(message) == MAX_MESSAGE and message.isprintable() and message.encode()
    assert message.startswith("speaker: wrong x") and message.endswith("; try again")
    assert str(error("a short one")) == "a short one"


def test_one_line_keeps_what_it_can() -> None:
    assert one_line(" a\n b\t") == "a b"
    assert one_line("\ud800é\u202e", 20) == "\\ud800é\\u202e"
    assert one_line("abcdefghijklmnopqrstuvwxyz", 20) == "abcdefghijklm ... yz"


def test_quoted_does_not_depend_on_the_size_of_the_value() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, list(range(10**6)), {"k": ["v" * 10**6] * 10**5}, b"\0" * 10**6, 10**4000):
        assert len(quoted(value)) <= 60
    assert [quoted(value) for value in ("a", 3, None, ["a", 1.5])] == ["'a'", "3", "None", "['a', 1.5]"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff", "utf-8"),
        (b"{", "Expecting"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b'["a", "\\ud800"]', r"a lone surrogate, '\\ud800'"),
        (b'{"\\udfff": 1}', "a lone surrogate"),
        (b"9" * 5000, "digits"),
        (b"[" + b"1," * MAX_JSON_VALUES + b"1]", f"up to {MAX_JSON_VALUES + 1} values, and at most {MAX_JSON_VALUES} are read"),
    ],
)
def test_json_is_refused_by_a_value_error(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_json(data)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


def test_json_that_is_read() -> None:
    assert parse_json(b'{"a": [1, "\\u00e9\\ud83d\\ude00"]}') == {"a": [1, "é😀"]}


def test_files_are_regular_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(ValueError, match="it has 5 bytes, and at most 4 are read"):
        read_bounded(path, 4)
    with pytest.raises(ValueError, match="not a regular file"):
        read_bounded(Path(os.devnull), 4)
    with pytest.raises(OSError):
        read_bounded(tmp_path / "none", 4)


def test_limits_are_above_what_is_published() -> None:
    """A model of 235 billion parameters in 94 layers of 128 experts; the index of DeepSeek-V3; the vocabulary of Gemma 3."""
    assert foreign.MAX_TENSORS > 94 * (128 * 3 + 8) and foreign.MAX_JSON_BYTES > 9e6 and foreign.MAX_VOCABULARY_BYTES > 35e6
