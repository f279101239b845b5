"""Llama 3's kind of tokenizer.model against the BPE that it was written from."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer

from tests.text.vocabularies import LLAMA3_PATTERN, NASTY, byte_level, tiktoken_lines, write_folder
from tinyvllm.errors import TokenizerError
from tinyvllm.text.load import load_tokenizer


def ranked() -> Tokenizer:
    """The tiny BPE with its ids in the order of its merges, as a tiktoken file needs them. Bytes come first."""
    return byte_level()


def load(folder: Path, content: bytes | None = None, **files: object):  # noqa: ANN201
    return load_tokenizer(write_folder(folder, **{"tokenizer.model": tiktoken_lines(ranked()) if content is None else content, **files}))


def test_equals_the_bpe_it_was_written_from(tmp_path: Path) -> None:
    tokenizer, reference = load(tmp_path), ranked()
    for text in NASTY:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "<|begin_of_text" not in text:
            assert ids == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == [tokenizer.bos_id, *ids]


def test_equals_tiktoken(tmp_path: Path) -> None:
    lines = tiktoken_lines(ranked()).split(b"\n")[:-1]
    ranks = {base64.b64decode(line.split()[0]): i for i, line in enumerate(lines)}
    reference = tiktoken.Encoding("reference", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    tokenizer = load(tmp_path)
    for text in NASTY:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
    for ids in ([0xE2 - 33], [255, 254, 128], list(range(len(ranks)))):
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_special_tokens_of_llama3(tmp_path: Path) -> None:
    tokenizer, count = load(tmp_path), len(tiktoken_lines(ranked()).splitlines())
    places = {
        "<|begin_of_text|>": 0,
        "<|end_of_text|>": 1,
        "<|reserved_special_token_0|>": 2,
        "<|reserved_special_token_2|>": 5,
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "<|eom_id|>": 8,
        "<|eot_id|>": 9,
        "<|python_tag|>": 10,
        "<|reserved_special_token_3|>": 11,
        "<|reserved_special_token_247|>": 255,
    }
    for token, place in places.items():
        assert tokenizer.encode(token, add_special_tokens=False) == [count + place], token
    assert tokenizer.vocab_size == count + 256
    assert tokenizer.special_ids == set(range(count, count + 256))
    assert tokenizer.bos_id == count
    assert tokenizer.eos_ids == (count + 1, count + 8, count + 9)
    assert tokenizer.decode([count, 10, count + 9]) == tokenizer.decode([10])
    assert tokenizer.decode([count], skip_special_tokens=False) == "<|begin_of_text|>"


def test_names_and_ends_of_the_folder(tmp_path: Path) -> None:
    count = len(tiktoken_lines(ranked()).splitlines())
    added = {str(count): {"content": "<go>", "special": True}, str(count + 5): {"content": "<halt>", "special": True}}
    config = {"added_tokens_decoder": added, "bos_token": "<go>", "eos_token": "<halt>", "add_eos_token": True}
    tokenizer = load(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [count + 5, 3]}, config={"model_type": "llama"})
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (count, (count + 5, 3))
    assert tokenizer.encode("") == [count, count + 5]
    assert tokenizer.token_text(count + 3) == ""
    assert tokenizer.decode([count + 3]) == ""


@pytest.mark.parametrize("character", [" ", "a", "\n"])
def test_runs_beyond_the_patterns_stack(character: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    text = "x" + character * 1_000_000 + "y"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda lines: lines[:1] + [b"??? 7"] + lines[2:], "line 2: expected base64"),
        (lambda lines: lines[:1] + [b"AAAA"] + lines[2:], "line 2: expected base64"),
        (lambda lines: lines[:5] + lines[6:], "not the ranks"),
        (lambda lines: lines[:300] + [lines[3]], "not the ranks"),
        (lambda lines: lines[:100], "no token for the byte"),
    ],
)
def test_corrupt(change, match: str, tmp_path: Path) -> None:  # noqa: ANN001
    content = b"\n".join(change(tiktoken_lines(ranked()).splitlines()))
    with pytest.raises(TokenizerError, match=match):
        load(tmp_path, content)


def test_contradictions(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="supported for Llama 3 only, but the model is 'qwen'"):
        load(tmp_path / "other", config={"model_type": "qwen"})
    added = json.loads('{"added_tokens_decoder": {"3": {"content": "<x>"}}}')
    with pytest.raises(TokenizerError, match="adds a token with the id 3"):
        load(tmp_path / "overlap", tokenizer_config=added)
