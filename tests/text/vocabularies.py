"""Difficult texts, and tiny vocabularies that are trained here and written in every file format of models."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")

NASTY = (
    "",
    " ",
    "a",
    " leading and trailing ",
    "   three spaces, then   three",
    "\n\n\t \t\n  \r\n\r\r \u00a0\u2003\u3000",
    "x" + " " * 100 + "y" + "\n" * 50 + "\t" * 33 + "z",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 ✍🏿 0️⃣",
    "日本語のテキスト、漢字カナ混じり。中文文本，没有空格。한국어 문장입니다.",
    "مرحبا بالعالم שלום עולם, mixed العربية with עברית and English 123",
    "e\u0301 e\u0300\u0323 n\u0303 a\u0308\u0304 Z\u0351\u036b\u0343 \u1100\u1161\u11a8",
    "\x00\x01\x02 nul and\x07 bell\x1b[31m\x7f\x80\x9f",
    "\ufeffbyte order mark \ufeff inside, \u200b zero \u200d width, \u2028 separators \u2029",
    "don't won't I'LL we'Re they'VE it'ſ 's",
    "def f(x):\n    if x != 0 and x . y :\n\t\treturn {'a': [1, 22, 333, 4444, 55555]}  # ½ ² ٣ Ⅷ\n",
    "3.14159e-10 1,000,000 0x1F 12345678901234567890 ١٢٣",
    "ФЫВА привет мир Ελληνικά ไทยไม่มีช่องว่าง हिन्दी ქართული አማርኛ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0001f9ff \U000e0041 \U0010ffff \ufffd \ufffe",
    "▁ already ▁▁ escaped ▁",
    "<s> <unk> </s> <0x41> <|not_special|> <|begin_of_text <pad>",
    "the quick brown fox jumps over the lazy dog " * 20,
)

TRAINING = (
    "the quick brown fox jumps over the lazy dog and the other foxes, again and again",
    "once upon a time there was a small tokenizer that did not know many words",
    "don't you know it's what we've said? they'll say: 1 22 333 4444 times!",
    "def main(argument):\n    return argument + 1",
    "日本語のテキスト と 中文文本 に 한국어 문장",
    "привет мир, как дела? всё хорошо",
    "café naïve résumé über straße",
    "    four spaces\t\ttabs  two",
)


@cache
def byte_level(size: int = 420) -> Tokenizer:
    """A byte-level BPE like Llama 3's, with BOS before every text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TRAINING * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    bos = tokenizer.token_to_id(SPECIALS[0])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], bos)])
    return tokenizer


@cache
def sentencepiece_model(kind: str = "bpe", byte_fallback: bool = True, size: int = 400, **options: Any) -> bytes:
    """A sentencepiece model like Llama 2's: identity normalization, spaces kept, one leading space."""
    settings = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.98} | options
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING * 4),
        model_writer=out,
        vocab_size=size,
        model_type=kind,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return out.getvalue()


@cache
def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def llama2_json(model: bytes, legacy: bool = True) -> Tokenizer:
    """The same vocabulary for `tokenizers`, converted as Llama 2's was; legacy: a space before every part between special tokens."""
    source = processor(model)
    pieces = [source.id_to_piece(i) for i in range(source.vocab_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece, i in ids.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in ids and piece[cut:] in ids]
        merges += [(-source.get_score(i), ids[left], ids[right], left, right) for left, right in pairs if not source.is_byte(i) and i > 2]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[m[3:] for m in sorted(merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=source.piece_to_id("<0x00>") > 0,
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace_json() -> Tokenizer:
    """A Unigram vocabulary with Metaspace, without byte fallback."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TRAINING * 4, trainer)
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """A folder with tokenizer.json and other files: config -> config.json, ...; texts and bytes are written as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def bytes_of(token: str) -> bytes:
    """A token of a byte-level vocabulary, decoded by the library itself."""
    codes = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert set(token) <= set(codes)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)}
    return bytes(table[character] for character in token)


def tiktoken_lines(tokenizer: Tokenizer) -> bytes:
    """The ordinary tokens of a byte-level BPE as a tiktoken file. Its ids are in the order of the merges, as ranks must be."""
    specials = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    vocab = {token: i for token, i in tokenizer.get_vocab().items() if token not in specials}
    ordered = sorted(vocab, key=vocab.__getitem__)
    return b"".join(base64.b64encode(bytes_of(token)) + f" {rank}\n".encode() for rank, token in enumerate(ordered))


def gguf_of_byte_level(tokenizer: Tokenizer, pre: str = "llama-bpe", **extra: object) -> dict[str, object]:
    """The metadata that a converter writes for a byte-level BPE."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id(SPECIALS[0]),
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id(SPECIALS[1]),
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def gguf_of_sentencepiece(model: bytes, **extra: object) -> dict[str, object]:
    """The metadata that a converter writes for a sentencepiece model."""
    source = processor(model)
    ids = range(source.vocab_size())

    def kind(i: int) -> int:
        flags = (source.is_unknown(i), source.is_control(i), source.is_unused(i), source.is_byte(i))
        return next((number for flag, number in zip(flags, (2, 3, 5, 6)) if flag), 1)

    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [source.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [source.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def without(ids: Sequence[int], unwanted: int) -> list[int]:
    return [i for i in ids if i != unwanted]
