"""The vocabulary inside a GGUF file against the tokenizer that it was taken from."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.text.vocabularies import (
    LLAMA3_PATTERN,
    NASTY,
    SPECIALS,
    TRAINING,
    byte_level,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    llama2_json,
    processor,
    sentencepiece_model,
    without,
)
from tinyvllm.errors import TokenizerError
from tinyvllm.text.load import tokenizer_from_gguf
from tinyvllm.text.word_rules import WORD_RULES


def test_bpe_equals_its_source() -> None:
    reference, tokenizer = byte_level(), tokenizer_from_gguf(gguf_of_byte_level(byte_level()))
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.special_ids == {reference.token_to_id(token) for token in SPECIALS}
    for text in (*NASTY, *(f"x{special} y" for special in SPECIALS)):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def cut_by(pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A BPE trained on whole lines, whose merges cross words: every wrong or missing cut changes the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [*TRAINING, "1234 5678 12 34 56", "a1b2 'll 'LL don't DON'T", "x\n\n\ny  \t z", "...!!! ??(( ))\n", *NASTY]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts * 2, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

O200K = "|".join(  # as tiktoken publishes it
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@pytest.mark.parametrize(
    ("pre", "pre_tokenizer", "normalizer"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        (
            "qwen2",
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]),
            normalizers.NFC(),
        ),
        (
            "dbrx",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
            ),
            None,
        ),
        (
            "gpt-4o",
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(O200K), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]),
            None,
        ),
        ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]), None),
    ],
)
def test_words_are_cut_as_by_the_models_own_tokenizers(pre: str, pre_tokenizer, normalizer) -> None:  # noqa: ANN001
    reference = cut_by(pre_tokenizer, normalizer)
    metadata = gguf_of_byte_level(reference, pre, bos_token_id=None, eos_token_id=None)
    tokenizer = tokenizer_from_gguf(metadata)
    for text in (*NASTY, *TRAINING, "1234 5678 12 34 56"):
        assert tokenizer.encode(text) == reference.encode(text).ids, text


def test_whole_words_before_merges() -> None:
    """A token that no merge produces: Llama 3 uses it for an equal word, GPT-2 never does."""
    metadata = gguf_of_byte_level(byte_level())
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"].append("Ġzqxj")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert tokenizer_from_gguf(metadata).encode("a zqxj")[-1] == size
    assert size not in tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("a zqxj")


@pytest.mark.parametrize("pre", sorted(pre for pre, rules in WORD_RULES.items() if not rules.pieces))
def test_every_pattern_compiles_and_loses_nothing(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(gguf_of_byte_level(byte_level(), pre))
    for text in NASTY:
        expected = text if pre not in ("qwen2", "command-r") else __import__("unicodedata").normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)).endswith(expected)


@pytest.mark.parametrize(("pre", "words"), [
    ("afmoe", "a|1|234|567| |12| |345| |6½"),
    ("tiny_aya", "a|1|234|567| |12| |345| |123|4|x"),
    ("superbpe", "a|1|234|567| |12| |345"),
    ("spark2_5", "1|2|3|4"),
    ("youtu", "漢字|、|カナ|한국|1|2"),
    ("kimi-k2", "漢|カナ|123|4"),
    ("minicpm5", "123|4"),
    ("ufakzeka", "x|'ll"),
    ("exaone-moe", "हिन्दी हिन्दी x| |1"),
    ("viking", "a|(|b|1|2"),
    ("chameleon", "IMGIMGABZ|(|(|1|2"),
    ("laguna", "a|\n\n|b"),
])  # fmt: skip
def test_words_of_other_patterns(pre: str, words: str) -> None:
    """A text is cut where the bars are."""
    backend = tokenizer_from_gguf(gguf_of_byte_level(byte_level(), pre))._backend  # type: ignore[attr-defined]
    text = words.replace("|", "")
    cut = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == words.split("|")


def test_a_pattern_of_quadratic_time_is_limited() -> None:
    for pre in ("tiny_aya", "superbpe"):
        assert not tokenizer_from_gguf(gguf_of_byte_level(byte_level(), pre)).is_quick  # type: ignore[attr-defined]


def test_merges_are_needed() -> None:
    with pytest.raises(TokenizerError, match="merges is missing or empty"):
        tokenizer_from_gguf({**gguf_of_byte_level(byte_level(), "kimi-k2"), "tokenizer.ggml.merges": []})


@pytest.mark.parametrize("kind", ["gemma4", "sarvam-moe"])
def test_bpe_on_pieces_equals_its_source(kind: str) -> None:
    """Gemma 4's vocabulary, and Sarvam's, which is a "gpt2" of another pattern: spaces are U+2581, unknown characters are bytes."""
    reference = llama2_json(sentencepiece_model())
    reference.normalizer = normalizers.Replace(" ", "\u2581")
    reference.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    described = json.loads(reference.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gemma4" if kind == "gemma4" else "gpt2",
        "tokenizer.ggml.pre": "default" if kind == "gemma4" else kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i < 3 else 6 if token.startswith("<0x") else 1 for i, token in enumerate(tokens)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = tokenizer_from_gguf(metadata)
    for text in NASTY:
        ids = tokenizer.encode(text)
        assert ids == [1] * (kind == "gemma4") + reference.encode(text, add_special_tokens=False).ids, text
        stream = tokenizer.text_stream()
        assert tokenizer.decode(ids) == reference.decode(ids) == "".join(map(stream.add, ids)) + stream.finish()


def test_pattern_of_old_files() -> None:
    metadata = gguf_of_byte_level(byte_level())
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(TokenizerError, match="pre is None"):
        tokenizer_from_gguf(metadata)
    as_gpt2 = tokenizer_from_gguf(metadata | {"general.architecture": "gpt2"})
    assert as_gpt2.encode("12345") == tokenizer_from_gguf(gguf_of_byte_level(byte_level(), "gpt-2")).encode("12345")


def test_bpe_settings() -> None:
    ids = {token: byte_level().token_to_id(token) for token in SPECIALS}
    begin, end, turn, message = ids.values()
    tokenizer = tokenizer_from_gguf(gguf_of_byte_level(byte_level(), eot_token_id=turn) | {"tokenizer.chat_template": "{{ 1 }}"})
    assert tokenizer.bos_id == begin
    assert tokenizer.eos_ids == (end, turn, message)  # <|eom_id|> is recognised by its name
    assert tokenizer.special_tokens == {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}
    assert tokenizer.chat_templates == {"default": "{{ 1 }}"}
    named = {"tokenizer.chat_template.tool_use": "{{ 2 }}"}
    assert tokenizer_from_gguf(gguf_of_byte_level(byte_level()) | named).chat_templates == {"tool_use": "{{ 2 }}"}


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_bos_rules_of_bpe(pre: str, flags: dict[str, bool], before: bool, after: bool) -> None:
    tokenizer = tokenizer_from_gguf(gguf_of_byte_level(byte_level(), pre, **flags))
    ids = tokenizer.encode("the fox")
    assert (ids[0] == tokenizer.bos_id, ids[-1] in tokenizer.eos_ids) == (before, after)


@pytest.mark.parametrize(("harmony", "ends"), [(False, {"<|end|>"}), (True, {"<|return|>", "<|call|>"})])
def test_in_harmony_the_end_of_a_message_is_not_that_of_the_answer(harmony: bool, ends: set[str]) -> None:
    metadata = gguf_of_byte_level(byte_level(), "gpt-4o", eos_token_id=None)
    special = ["<|end|>", *(["<|return|>", "<|call|>"] if harmony else [])]
    metadata["tokenizer.ggml.tokens"] += special
    metadata["tokenizer.ggml.token_type"] += [3] * len(special)
    tokenizer = tokenizer_from_gguf(metadata)
    named = {tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_ids}
    assert named & {"<|end|>", "<|return|>", "<|call|>"} == ends


def test_user_defined_and_unused_tokens() -> None:
    reference = Tokenizer.from_str(byte_level().to_str())
    reference.add_tokens([AddedToken("<think>", normalized=False), AddedToken("    ", normalized=False)])
    metadata = gguf_of_byte_level(reference)
    size = reference.get_vocab_size()
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]"]
    metadata["tokenizer.ggml.token_type"] += [5]
    tokenizer = tokenizer_from_gguf(metadata)
    for text in ("a<think>b", "x     y", "[PAD1]"):
        assert tokenizer.encode(text) == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_text(size) == tokenizer.decode([size]) == ""


SPM = {
    "plain": {},
    "more symbols": {"user_defined_symbols": ("<think>", "▁▁▁▁"), "control_symbols": ("<ctl>",)},
    "no space in front": {"add_dummy_prefix": False},
}


@pytest.mark.parametrize("name", SPM)
def test_sentencepiece_equals_its_source(name: str) -> None:
    model = sentencepiece_model(**SPM[name])
    reference = processor(model)
    metadata = gguf_of_sentencepiece(model, add_space_prefix="add_dummy_prefix" not in SPM[name])
    kinds, symbols = metadata["tokenizer.ggml.token_type"], SPM[name].get("user_defined_symbols", ())
    for symbol in symbols:
        kinds[reference.piece_to_id(symbol)] = 4
    tokenizer, dice = tokenizer_from_gguf(metadata), random.Random(3)
    assert tokenizer.vocab_size == reference.vocab_size()
    for text in (*NASTY, "a<think>b     c"):
        if "<s>" not in text:
            ids = reference.encode(text)
            assert tokenizer.encode(text) == [1, *ids], text
            assert tokenizer.decode(ids) == reference.decode(ids)
    for _ in range(200):
        ids = without([dice.randrange(reference.vocab_size()) for _ in range(8)], reference.unk_id())
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_sentencepiece_settings() -> None:
    tokenizer = tokenizer_from_gguf(gguf_of_sentencepiece(sentencepiece_model()))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})
    reference = llama2_json(sentencepiece_model())
    for text in ("<s>the fox</s> the dog<s>", "the</s>the"):
        assert tokenizer.encode(text) == reference.encode(text).ids
    quiet = tokenizer_from_gguf(gguf_of_sentencepiece(sentencepiece_model(), add_bos_token=False, add_eos_token=True))
    assert quiet.encode("the")[0] != 1 and quiet.encode("the")[-1] == 2


def test_lists_may_be_arrays_and_spaces_of_added_tokens_plain() -> None:
    model = sentencepiece_model(user_defined_symbols=("▁▁▁▁",))
    metadata = gguf_of_sentencepiece(model)
    tokens = metadata["tokenizer.ggml.tokens"]
    place = tokens.index("▁▁▁▁")
    tokens[place] = "    "
    metadata["tokenizer.ggml.token_type"][place] = 4
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    metadata["tokenizer.ggml.scores"] = np.array(metadata["tokenizer.ggml.scores"], np.float32)
    tokenizer = tokenizer_from_gguf(metadata)
    text = "x" + " " * 9 + "y"
    assert tokenizer.encode(text, add_special_tokens=False) == processor(model).encode(text)


def test_phi3_swallows_whitespace_after_its_tokens() -> None:
    model = sentencepiece_model(control_symbols=("<|user|>", "<|endoftext|>"))
    phi3 = tokenizer_from_gguf(gguf_of_sentencepiece(model) | {"general.architecture": "phi3"})
    other = tokenizer_from_gguf(gguf_of_sentencepiece(model))
    assert phi3.encode("<|user|>\nthe") == other.encode("<|user|>the") != other.encode("<|user|>\nthe")
    assert phi3.encode("<|endoftext|>\nthe") == other.encode("<|endoftext|>\nthe")


def changed(metadata: dict[str, object], **changes: object) -> dict[str, object]:
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "bert"}, "model is 'bert'; supported: 'llama', 'gpt2'"),
        ({"model": None}, "model is None"),
        ({"pre": "jina-v2-de"}, "pre is 'jina-v2-de'.*known: .*llama-bpe.*qwen2"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": "abc"}, "tokens must be a list of str"),
        ({"tokens": [1, 2]}, "tokens must be a list of str"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "contains 'a' more than once"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"merges": ["nosuch token"]}, "merges does not match"),
        ({"merges": ["alone"]}, "merges does not match"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"add_bos_token": "maybe"}, "add_bos_token must be true or false"),
    ],
)
def test_bad_bpe_metadata(changes: dict[str, object], match: str) -> None:
    with pytest.raises(TokenizerError, match=match):
        tokenizer_from_gguf(changed(gguf_of_byte_level(byte_level()), **changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"token_type": None}, "no token has the type unknown"),
        ({"tokens": ["<unk>", "<0x00>", "a"], "token_type": [2, 6, 1], "scores": [0.0] * 3}, "256 byte"),
        ({"tokens": ["<unk>", "b", "a"], "token_type": [2, 9, 1], "scores": [0.0] * 3}, r"token_type\[1\] is 9"),
    ],
)
def test_bad_sentencepiece_metadata(changes: dict[str, object], match: str) -> None:
    metadata = {key: value for key, value in changed(gguf_of_sentencepiece(sentencepiece_model()), **changes).items() if value is not None}
    with pytest.raises(TokenizerError, match=match):
        tokenizer_from_gguf(metadata)
