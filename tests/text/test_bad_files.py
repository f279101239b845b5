"""Vocabularies that no program writes: refused by TokenizerErrors that name file and entry. Found by tests/test_mutated_files.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import fields_of
from tests.text.vocabularies import (
    byte_level,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    llama2_json,
    sentencepiece_model,
    tiktoken_lines,
    write_folder,
)
from tinyvllm.errors import TokenizerError
from tinyvllm.foreign import MAX_VOCABULARY_BYTES
from tinyvllm.text.folder import MAX_TEMPLATE_BYTES, MAX_TOKEN_ID
from tinyvllm.text.load import load_tokenizer, tokenizer_from_gguf
from tinyvllm.text.sentencepiece_model import message, number


def refusal(folder: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(folder)
    return str(caught.value)


@pytest.mark.parametrize("make", [lambda: gguf_of_byte_level(byte_level()), lambda: gguf_of_sentencepiece(sentencepiece_model())])
@pytest.mark.parametrize("value", [["gpt2"], [], 3, {"a": 1}, 0.5])
def test_lists_and_numbers_for_texts_of_gguf_metadata(make: Any, value: object) -> None:
    metadata = make()
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"):
        if key == "tokenizer.ggml.pre" and metadata["tokenizer.ggml.model"] == "llama":
            continue  # sentencepiece has no word pattern
        with pytest.raises(TokenizerError, match=rf"{key} must be a text, got "):
            tokenizer_from_gguf(metadata | {key: value})


@pytest.mark.parametrize("value", [[1], [True], 0.5, "1", True])
def test_lists_and_floats_for_ids_of_gguf_metadata(value: object) -> None:
    with pytest.raises(TokenizerError, match=r"bos_token_id is .*, outside the vocabulary of \d+ tokens"):
        tokenizer_from_gguf(gguf_of_byte_level(byte_level()) | {"tokenizer.ggml.bos_token_id": value})


def test_booleans_are_no_token_types() -> None:
    metadata = gguf_of_sentencepiece(sentencepiece_model())
    with pytest.raises(TokenizerError, match="token_type must be a list of int"):
        tokenizer_from_gguf(metadata | {"tokenizer.ggml.token_type": [True] * len(metadata["tokenizer.ggml.tokens"])})


@pytest.mark.parametrize("prefix", ['"0"', '"\\u0041"'])
@pytest.mark.parametrize("name", ["continuing_subword_prefix", "continuing\\u005fsubword_prefix", "\\u0063ontinuing_subword_prefix"])
def test_a_vocabulary_that_would_abort_the_process(tmp_path: Path, name: str, prefix: str) -> None:
    """With such a prefix the library cuts "(é" inside of a character; its error then aborts the process. Nothing may reach it."""
    value = json.loads(byte_level().to_str())
    value["model"]["merges"][0] = ["f", "é"]
    del value["model"]["continuing_subword_prefix"]
    text = json.dumps(value).replace('"model": {', f'"model": {{"{name}": {prefix}, ')
    folder = write_folder(tmp_path, **{"tokenizer.json": text.encode()})
    assert "continuing_subword_prefix must be null" in refusal(folder)


def test_escapes_of_control_characters_and_no_prefix_are_read(tmp_path: Path) -> None:
    value = json.loads(byte_level().to_str())
    assert value["model"]["continuing_subword_prefix"] is None
    value["added_tokens"].append(value["added_tokens"][0] | {"id": 424, "content": "\x1c \\u0061 \\"})
    value["model"]["continuing_subword_prefix"] = ""
    folder = write_folder(tmp_path, **{"tokenizer.json": json.dumps(value, indent=1).encode()})
    assert load_tokenizer(folder).encode("\x1c \\u0061 \\", add_special_tokens=False) == [424]


def test_a_panic_of_the_library_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    value = json.loads(byte_level().to_str())
    value["post_processor"]["special_tokens"] = {}
    folder = write_folder(tmp_path, **{"tokenizer.json": json.dumps(value).encode()})
    assert "failed on the special tokens around a text: no entry found for key" in refusal(folder)
    capfd.readouterr()  # its own backtrace


def test_pieces_that_are_not_utf8(tmp_path: Path) -> None:
    model = sentencepiece_model()
    at = next(i for i, (field, _, value) in enumerate(fields_of(model)) if field == 1 and value[:2] == b"\x0a\x03")
    parts = [message(field, value) for field, _, value in fields_of(model)]
    broken = fields_of(model)[at][2]
    parts[at] = message(1, broken[:2] + b"\xff\xc0\x80" + broken[5:])
    folder = write_folder(tmp_path, **{"tokenizer.model": b"".join(parts)})
    assert f"piece {at} is not UTF-8" in refusal(folder)


def test_protobuf_that_sentencepiece_itself_accepts(tmp_path: Path) -> None:
    group = b"\x9b\x06\x08\x01\x9c\x06"  # field 99, which it does not know
    assert "the wire type 3" in refusal(write_folder(tmp_path, **{"tokenizer.model": sentencepiece_model() + group}))


def test_too_many_control_tokens(tmp_path: Path) -> None:
    more = b"".join(message(1, message(1, b"<c%d>" % i) + number(3, 3)) for i in range(32_768))
    folder = write_folder(tmp_path, **{"tokenizer.model": sentencepiece_model() + more})
    assert "at most 32768 are supported" in refusal(folder)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"bos_token": 5}, "bos_token must be a text, or an object with content, got 5"),
    ({"eos_token": {"content": ["x"]}}, "eos_token must be a text"),
    ({"added_tokens_decoder": [1]}, "added_tokens_decoder must map ids to objects with content, got [1]"),
    ({"added_tokens_decoder": {"-1": {"content": "x"}}}, f"must map ids below {MAX_TOKEN_ID}"),
    ({"added_tokens_decoder": {"9" * 400: {"content": "x"}}}, f"must map ids below {MAX_TOKEN_ID}"),
    ({"added_tokens_decoder": {"424": {"content": ""}}}, "objects with content"),
    ({"added_tokens_decoder": {"424": {"content": "x", "special": "yes"}}}, "flags that are true or false"),
    ({"added_tokens_decoder": {"424": {"content": "\ud800"}}}, "a lone surrogate"),
    ({"chat_template": [{"name": ["x"], "template": "y"}]}, "chat_template must be a template or a list of objects"),
    ({"chat_template": [{"name": "x", "template": "y"}] * 2}, "each with another name"),
    ({"chat_template": 3}, "chat_template must be a template"),
    ({"tokenizer_class": {"a": 1}}, "tokenizer_class must be a text"),
    ({"add_bos_token": list(range(1000))}, "add_bos_token must be true or false, got [0, 1, 2, 3, ...]"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("kind", ["json", "sentencepiece", "tiktoken"])
def test_odd_values_in_tokenizer_config(tmp_path: Path, kind: str, config: dict[str, Any], words: str) -> None:
    files = {"sentencepiece": sentencepiece_model, "tiktoken": lambda: tiktoken_lines(byte_level())}
    folder = write_folder(tmp_path, llama2_json(sentencepiece_model()) if kind == "json" else None, tokenizer_config=config)
    if kind in files:
        (folder / "tokenizer.model").write_bytes(files[kind]())
    message = refusal(folder)
    assert words in message and "tokenizer_config.json" in message and len(message) <= 300


def test_files_beyond_their_size(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "chat_template.jinja").write_bytes(b"x" * (MAX_TEMPLATE_BYTES + 1))
    assert f"at most {MAX_TEMPLATE_BYTES} are read" in refusal(folder)
    (folder / "chat_template.jinja").unlink()
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(MAX_VOCABULARY_BYTES + 1)  # a hole: takes no disk
    assert f"at most {MAX_VOCABULARY_BYTES} are read" in refusal(folder)
