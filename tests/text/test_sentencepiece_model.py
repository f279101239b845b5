"""tokenizer.model of sentencepiece against sentencepiece itself, and against its conversion for `tokenizers`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import normalizers

from tests.text.vocabularies import NASTY, llama2_json, processor, sentencepiece_model, without, write_folder
from tinyvllm.errors import TokenizerError
from tinyvllm.text.load import load_tokenizer
from tinyvllm.text.sentencepiece_model import message, number
from tinyvllm.text.tokenizer import Tokenizer

MODELS = {
    "bpe": {},
    "bpe without fallback": {"byte_fallback": False},
    "unigram": {"kind": "unigram"},
    "unigram without fallback": {"kind": "unigram", "byte_fallback": False},
    "nfkc, extra spaces removed": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "no space in front": {"add_dummy_prefix": False},
    "user-defined symbols": {"user_defined_symbols": ("<think>", "▁▁▁▁"), "control_symbols": ("<ctl>",)},
}


def load(folder: Path, model: bytes, **config: object) -> Tokenizer:
    return load_tokenizer(write_folder(folder, **{"tokenizer.model": model, "tokenizer_config": config}))


@pytest.mark.parametrize("name", MODELS)
def test_equals_sentencepiece(name: str, tmp_path: Path) -> None:
    model = sentencepiece_model(**MODELS[name])
    reference = processor(model)
    tokenizer = load(tmp_path, model)
    for text in NASTY:
        if any(special in text for special in ("<s>", "<pad>")):
            continue  # sentencepiece does not match special tokens in texts
        ids = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [reference.bos_id(), *ids]
        ids = without(ids, reference.unk_id())
        assert tokenizer.decode(ids) == tokenizer.decode([1, *ids, 2]) == reference.decode(ids)


@pytest.mark.parametrize("name", MODELS)
def test_decodes_random_ids_as_sentencepiece(name: str, tmp_path: Path) -> None:
    model = sentencepiece_model(**MODELS[name])
    reference, tokenizer, dice = processor(model), load(tmp_path, model), random.Random(5)
    byte_ids = [i for i in range(reference.vocab_size()) if reference.is_byte(i)]
    for _ in range(300):
        ids = [dice.choice(byte_ids) if byte_ids and dice.random() < 0.5 else dice.randrange(reference.vocab_size()) for _ in range(8)]
        ids = without(ids, reference.unk_id())
        assert tokenizer.decode(ids) == reference.decode(ids), ids


def test_control_tokens_end_a_run_of_bytes(tmp_path: Path) -> None:
    reference, tokenizer = processor(sentencepiece_model()), load(tmp_path, sentencepiece_model())
    first, *rest = (reference.piece_to_id(f"<0x{byte:02X}>") for byte in "é".encode())
    assert tokenizer.decode([first, *rest]) == "é"
    assert tokenizer.decode([first, 1, *rest]) == reference.decode([first, 1, *rest]) == "\ufffd\ufffd"


def test_unset_flags_are_on(tmp_path: Path) -> None:
    """A model without normalizer settings: a leading space is added and extra ones are removed, sentencepiece's defaults."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1), ("▁a", 1)]
    model = b"".join(message(1, message(1, piece.encode()) + number(3, kind)) for piece, kind in pieces)
    model += message(2, number(3, 2)) + message(3, message(1, b"identity"))
    tokenizer = load(tmp_path, model)
    assert tokenizer.encode("  a   a ", add_special_tokens=False) == processor(model).encode("  a   a ") == [4, 4]
    for ids in ([3, 3, 4], [4, 3], [1, 3, 4, 4]):
        assert tokenizer.decode(ids) == processor(model).decode(ids)


def test_settings(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_model())
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.vocab_size == processor(sentencepiece_model()).vocab_size()
    assert [tokenizer.token_bytes(i) for i in (-1, tokenizer.vocab_size)] == [b"", b""]
    assert tokenizer.token_text(0) == "<unk>"


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, True, True),
        ({"tokenizer_class": "Ernie4_5_Tokenizer"}, False, False),
    ],
)
def test_bos_and_eos_rules(config: dict[str, object], before: bool, after: bool, tmp_path: Path) -> None:
    ids = load(tmp_path, sentencepiece_model(), **config).encode("the fox")
    assert (ids[0] == 1, ids[-1] == 2) == (before, after)


@pytest.mark.parametrize("legacy", [True, False])
def test_special_tokens_in_the_text_as_in_tokenizers(legacy: bool, tmp_path: Path) -> None:
    reference = llama2_json(sentencepiece_model(), legacy)
    tokenizer = load(tmp_path, sentencepiece_model(), legacy=legacy)
    for text in ("<s>the fox</s> the dog<s>", "</s></s>the", "a <s> b", "<s>", "the<unk>dog", "<s", "no special"):
        assert tokenizer.encode(text) == reference.encode(text).ids, text
        for skip in (True, False):
            assert tokenizer.decode(tokenizer.encode(text), skip) == reference.decode(reference.encode(text).ids, skip_special_tokens=skip)


def test_equals_its_conversion(tmp_path: Path) -> None:
    reference, tokenizer = llama2_json(sentencepiece_model()), load(tmp_path, sentencepiece_model(), legacy=True)
    for text in NASTY:
        if text:  # Prepend does not change an empty text, as in sentencepiece
            assert tokenizer.encode(text) == reference.encode(text).ids, text


def test_add_prefix_space_false(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_model(), add_prefix_space=False)
    reference = llama2_json(sentencepiece_model())
    reference.normalizer = normalizers.Replace(" ", "▁")
    for text in ("the fox", " the fox"):
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_added_tokens(tmp_path: Path) -> None:
    size = processor(sentencepiece_model()).vocab_size()
    added = {
        str(size): {"content": "<|user|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "<|mask|>", "special": True, "lstrip": True},
        str(size + 2): {"content": "<think>", "special": False},
        str(size + 3): {"content": "<think>ing", "special": False},
        str(size + 4): {"content": "word", "special": False, "single_word": True},
    }
    tokenizer = load(tmp_path, sentencepiece_model(), added_tokens_decoder=added, legacy=False)

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert tokenizer.vocab_size == size + 5
    assert plain("<|user|> \n the") == [size, *plain("<s>the")[1:]]
    assert plain("the \t<|mask|>") == [*plain("the"), size + 1]
    assert plain("<think>ing<think>") == [size + 3, size + 2]
    assert size + 4 in plain("a word here") and size + 4 not in plain("swords wordy")
    assert tokenizer.decode(plain("<|user|>the <think>")) == "the <think>"
    assert tokenizer.decode(plain("<|user|>the"), skip_special_tokens=False) == "<|user|>the"
    assert tokenizer.token_bytes(size + 2) == b"<think>"


def test_plain_added_tokens_file(tmp_path: Path) -> None:
    size = processor(sentencepiece_model()).vocab_size()
    folder = write_folder(tmp_path, **{"tokenizer.model": sentencepiece_model(), "added_tokens": {"<extra>": size}})
    assert load_tokenizer(folder).encode("<extra>", add_special_tokens=False) == [size]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100, b"version https://example.org\nsize 3\n"])
def test_not_a_model(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.model") as caught:
        load(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_whitespace_as_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="treat_whitespace_as_suffix"):
        load(tmp_path, sentencepiece_model(treat_whitespace_as_suffix=True))
