"""Hugging Face folders: tokenizer.json against the library `tokenizers`, the small files around it, and folders that cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, processors

from tests.text.vocabularies import NASTY, SPECIALS, byte_level, llama2_json, metaspace_json, sentencepiece_model, write_folder
from tinyvllm.errors import TokenizerError
from tinyvllm.text.load import load_tokenizer


def library(name: str) -> Tokenizer:
    if name == "byte_level":
        return byte_level()
    return metaspace_json() if name == "metaspace" else llama2_json(sentencepiece_model(), legacy=name == "llama2")


@pytest.mark.parametrize("name", ["byte_level", "llama2", "llama2_first", "metaspace"])
def test_equals_the_library(name: str, tmp_path: Path) -> None:
    reference = library(name)
    tokenizer = load_tokenizer(write_folder(tmp_path, reference))
    assert tokenizer.vocab_size == reference.get_vocab_size()
    for text in (*NASTY, *(f"{a}{special}{b}" for special in SPECIALS for a, b in (("x ", " y"), ("", "")))):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_byte_level_round_trip(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level()))
    for text in NASTY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False))) == text.encode()


def test_readable_form_of_one_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, llama2_json(sentencepiece_model())))
    backend = llama2_json(sentencepiece_model())
    assert tokenizer.token_text(backend.token_to_id("▁the")) == " the"
    assert tokenizer.token_text(backend.token_to_id("<0xE2>")) == "\ufffd"
    assert tokenizer.token_bytes(backend.token_to_id("<0xE2>")) == b"\xe2"
    assert tokenizer.token_text(1) == "<s>"
    assert [tokenizer.token_text(i) for i in (-1, 10**6, 2**40)] == ["", "", ""]
    assert all(isinstance(tokenizer.token_text(i), str) for i in range(tokenizer.vocab_size))


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    reference = Tokenizer.from_str(byte_level().to_str())
    reference.enable_truncation(4)
    reference.enable_padding(length=64)
    text = "the quick brown fox jumps over the lazy dog"
    assert load_tokenizer(write_folder(tmp_path, reference)).encode(text) == byte_level().encode(text).ids


def test_settings_of_the_folder(tmp_path: Path) -> None:
    backend = byte_level()
    begin, end, turn, message = map(backend.token_to_id, SPECIALS)
    folder = write_folder(
        tmp_path,
        backend,
        tokenizer_config={"bos_token": {"content": SPECIALS[0]}, "eos_token": SPECIALS[2], "chat_template": "{{ messages }}"},
        special_tokens_map={"eos_token": SPECIALS[1], "pad_token": SPECIALS[1]},
        config={"eos_token_id": end},
        generation_config={"eos_token_id": [end, message]},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id == begin
    assert tokenizer.eos_ids == (turn, end, message)
    assert tokenizer.special_ids == {begin, end, turn, message}
    assert tokenizer.special_tokens == {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2], "pad_token": SPECIALS[1]}
    assert tokenizer.chat_templates == {"default": "{{ messages }}"}


@pytest.mark.parametrize(
    ("template", "flags", "prefix", "suffix"),
    [
        (True, {}, 1, 0),
        (True, {"add_bos_token": False, "add_eos_token": True}, 1, 0),  # tokenizer.json takes precedence
        (False, {}, 0, 0),
        (False, {"add_bos_token": True}, 1, 0),
        (False, {"add_bos_token": False, "add_eos_token": True}, 0, 1),
    ],
)
def test_bos_and_eos_rules(template: bool, flags: dict[str, bool], prefix: int, suffix: int, tmp_path: Path) -> None:
    backend = Tokenizer.from_str(byte_level().to_str())
    if not template:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, tokenizer_config=names | flags))
    begin, end = backend.token_to_id(SPECIALS[0]), backend.token_to_id(SPECIALS[1])
    bare = backend.encode("the fox", add_special_tokens=False).ids
    assert tokenizer.encode("the fox") == [begin] * prefix + bare + [end] * suffix
    assert tokenizer.encode("") == [begin] * prefix + [end] * suffix
    assert tokenizer.encode("the fox", add_special_tokens=False) == bare


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    added = {str(size): {"content": "<think>", "special": False}, str(size + 1): {"content": "<|tool|>", "special": True, "rstrip": True}}
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": added}))
    ids = tokenizer.encode("a<think>b<|tool|>  c", add_special_tokens=False)
    assert size in ids and size + 1 in ids
    assert tokenizer.decode(ids) == "a<think>bc"
    assert tokenizer.vocab_size == size + 2


def test_named_special_token_that_is_an_ordinary_one(tmp_path: Path) -> None:
    backend = byte_level()
    word = "Ġthe"
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, tokenizer_config={"eos_token": word}))
    assert tokenizer.eos_ids == (backend.token_to_id(word),)
    assert backend.token_to_id(word) in tokenizer.special_ids


def test_named_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert load_tokenizer(folder).chat_templates == {"default": "plain", "tool_use": "tools"}
    (folder / "chat_template.jinja").write_text("from a file, ü", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert load_tokenizer(folder).chat_templates == {"default": "from a file, ü", "tool_use": "tools", "rag": "rag"}
    assert load_tokenizer(write_folder(tmp_path / "none", byte_level())).chat_templates == {}


def test_vocabulary_with_holes(tmp_path: Path) -> None:
    description = json.loads(byte_level().to_str())
    vocab = description["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    vocab[last] = 5000
    description["added_tokens"] = []
    description["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 5001
    assert tokenizer.token_text(4000) == ""
    assert tokenizer.decode([4000, 5000]) == tokenizer.token_text(5000) != ""


@pytest.mark.parametrize("text", ["\ud800", "half \udc00 pair", "\ud83d"])
def test_lone_surrogates_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate"):
        load_tokenizer(write_folder(tmp_path, byte_level())).encode(text)


def test_invalid_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="token ids must be integers"):
        load_tokenizer(write_folder(tmp_path, byte_level())).decode([-1])


class TestBadFolders:
    def refused(self, folder: Path, match: str) -> None:
        with pytest.raises(TokenizerError, match=match) as caught:
            load_tokenizer(folder)
        assert "\n" not in str(caught.value)

    def test_no_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "absent", "is not a folder")

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "neither tokenizer.json nor tokenizer.model")

    @pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
    def test_corrupt_tokenizer_json(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_bytes(content)
        self.refused(tmp_path, "tokenizer.json cannot be read")

    def test_truncated_tokenizer_json(self, tmp_path: Path) -> None:
        write_folder(tmp_path, byte_level())
        text = (tmp_path / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2])
        self.refused(tmp_path, "tokenizer.json cannot be read")

    @pytest.mark.parametrize("name", ["tokenizer_config", "config", "generation_config", "special_tokens_map"])
    @pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
    def test_corrupt_settings(self, name: str, content: bytes, tmp_path: Path) -> None:
        write_folder(tmp_path, byte_level(), **{f"{name}.json": content})
        self.refused(tmp_path, f"{name}.json")

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
            ({"chat_template": 3}, "chat_template must be"),
            ({"chat_template": [{"name": "x"}]}, "chat_template must be"),
            ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder must"),
            ({"added_tokens_decoder": {"7": "a"}}, "added_tokens_decoder must"),
            ({"added_tokens_decoder": {"7": {"content": "<new>"}}}, "belong to different models"),
        ],
    )
    def test_invalid_settings(self, settings: dict[str, object], match: str, tmp_path: Path) -> None:
        self.refused(write_folder(tmp_path, byte_level(), tokenizer_config=settings), match)

    @pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Strip(" ", 1, 1), None])
    def test_unknown_decoder(self, decoder: object, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_str(byte_level().to_str())
        tokenizer.decoder = decoder
        self.refused(write_folder(tmp_path, tokenizer), "decoder")


def test_special_token_objects_survive(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True, special=True, normalized=False)])
    loaded = load_tokenizer(write_folder(tmp_path, tokenizer, tokenizer_config={"eos_token": "<|user|>"}))
    assert loaded.encode("<|user|>\n the", add_special_tokens=False) == tokenizer.encode("<|user|>\n the", add_special_tokens=False).ids


def test_importing_is_cheap() -> None:
    code = (
        "import sys, tinyvllm.text.tokenizer, tinyvllm.text.chat, tinyvllm.text.detokenize;"
        "print(*{'tokenizers', 'tiktoken', 'sentencepiece', 'jinja2', 'tinygrad', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
