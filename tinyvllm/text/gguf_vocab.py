"""The tokenizer in a GGUF file, from the keys `tokenizer.*` of its metadata.

`tokenizer.ggml.model` "gpt2" is a byte-level BPE, built with the library `tokenizers` and the word pattern that `tokenizer.ggml.pre` names;
"gemma4" is a BPE on pieces of text, built with the same library; "llama" is a sentencepiece model, rebuilt and passed to sentencepiece.
Rules that the metadata does not contain (BOS by default, end tokens by name, Phi-3's whitespace) are llama.cpp's; the patterns are those of
the models' own tokenizers where both exist.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tinyvllm.errors import TokenizerError
from tinyvllm.foreign import quoted
from tinyvllm.text.folder import AddedToken
from tinyvllm.text.tokenizer import Tokenizer, TokenizerSettings, unique
from tinyvllm.text.word_rules import WORD_RULES, WordRules

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type, the same numbers as sentencepiece's
_SPACE = "\u2581"  # in pieces of text
_BPE = 2  # sentencepiece's TrainerSpec.ModelType
_SOURCE = "GGUF tokenizer"
_KEY = "tokenizer.ggml."

_PRE_BY_ARCHITECTURE = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen2moe": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}
_USUAL_PRE = ("deepseek-v3", "gpt-2", "gpt-4o", "llama-bpe", "qwen2", "tekken")
_END_TOKENS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<turn|>")
)
_HARMONY_ENDS = ("<|return|>", "<|call|>")  # of an answer; there <|end|> ends one of its messages
_PHI3_KEEPS_WHITESPACE = ("<unk>", "<s>", "<|endoftext|>")


def build_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the metadata describes; TokenizerError names the key that is missing or invalid."""
    kind = _name(metadata, _KEY + "model")
    builders = {"llama": _build_sentencepiece, "gpt2": _build_bpe, "gemma4": _build_bpe}
    if kind not in builders:
        raise TokenizerError(f"{_SOURCE}: {_KEY}model is {quoted(kind)}; supported: {', '.join(map(repr, builders))}")
    return builders[kind](_Vocabulary(metadata))


def _name(metadata: Mapping[str, object], key: str) -> str | None:
    """A text of the metadata, None if the key is missing."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{_SOURCE}: {key} must be a text, got {quoted(value)}")
    return value


class _Vocabulary:
    """The validated lists of the metadata: one type (and score) for each token, and special ids within the list."""

    def __init__(self, metadata: Mapping[str, object]):
        self.metadata = metadata
        tokens = self.list_of("tokens", str)
        if not tokens:
            raise TokenizerError(f"{_SOURCE}: {_KEY}tokens is missing or empty, so the file has no vocabulary")
        self.tokens: list[str] = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self.types = self.list_of("token_type", int) or [NORMAL] * len(tokens)
        if len(self.types) != len(tokens):
            raise TokenizerError(f"{_SOURCE}: {_KEY}token_type has {len(self.types)} entries for {len(tokens)} tokens")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(tokens):
            duplicate = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise TokenizerError(f"{_SOURCE}: {_KEY}tokens contains {quoted(duplicate)} more than once; convert the model again")

    def list_of(self, name: str, kind: type) -> list[Any]:
        """A list (or array) of strings or numbers; [] if the key is missing."""
        values = self.metadata.get(_KEY + name, [])
        values = values.tolist() if hasattr(values, "tolist") else values
        allowed = {int, float} if kind is float else {kind}
        if not isinstance(values, Sequence) or isinstance(values, str) or not set(map(type, values)) <= allowed:
            raise TokenizerError(f"{_SOURCE}: {_KEY}{name} must be a list of {kind.__name__}, got {quoted(values)}")
        return list(values)

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(_KEY + name, default)
        if not isinstance(value, (bool, int)):
            raise TokenizerError(f"{_SOURCE}: {_KEY}{name} must be true or false, got {quoted(value)}")
        return bool(value)

    def special_id(self, name: str, default: int | None = None) -> int | None:
        value = self.metadata.get(f"{_KEY}{name}_token_id")
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise TokenizerError(
                f"{_SOURCE}: {_KEY}{name}_token_id is {quoted(value)}, outside the vocabulary of {len(self.tokens)} tokens"
            )
        return value

    def settings(self, add_bos: bool, default_bos: int | None, default_eos: int | None, *, needs_bos: bool = False) -> TokenizerSettings:
        bos, eos = self.special_id("bos", default_bos), self.special_id("eos", default_eos)
        ends = _END_TOKENS
        if all(token in self.ids for token in _HARMONY_ENDS):
            ends = ends.difference(("<|end|>",)).union(_HARMONY_ENDS)
        end_ids = [i for i, (token, kind) in enumerate(zip(self.tokens, self.types)) if kind == CONTROL and token in ends]
        named = {"bos_token": bos, "eos_token": eos, "unk_token": self.special_id("unknown"), "pad_token": self.special_id("padding")}
        return TokenizerSettings(
            bos_id=bos,
            eos_ids=unique([eos, self.special_id("eot"), self.special_id("eom"), *end_ids]),
            prefix_ids=(bos,) if bos is not None and (self.flag("add_bos_token", add_bos) or needs_bos) else (),
            suffix_ids=(eos,) if eos is not None and self.flag("add_eos_token", False) else (),
            special_tokens={name: self.tokens[i] for name, i in named.items() if i is not None},
            chat_templates=self._chat_templates(),
        )

    def _chat_templates(self) -> dict[str, str]:
        templates = {}
        for key in self.metadata:
            match = re.fullmatch(r"tokenizer\.chat_template(?:\.(.+))?", key)
            if match:
                templates[match[1] or "default"] = _name(self.metadata, key) or ""
        return templates


def _build_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    from tinyvllm.text.huggingface import HuggingFaceTokenizer, as_library_token

    rules = _word_rules(vocabulary.metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.list_of("merges", str)]
    if not merges:
        raise TokenizerError(f"{_SOURCE}: {_KEY}merges is missing or empty, without which no word can be encoded; convert the model again")
    used = {token: i for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] != UNUSED}
    unknown = vocabulary.special_id("unknown") if rules.pieces else None
    unk = {} if unknown is None else {"unk_token": vocabulary.tokens[unknown], "fuse_unk": True}
    try:
        backend = Backend(models.BPE(vocab=used, merges=merges, ignore_merges=rules.whole_words, byte_fallback=rules.pieces, **unk))
    except Exception as error:  # the library raises plain Exception for everything
        raise TokenizerError(f"{_SOURCE}: {_KEY}merges does not match {_KEY}tokens ({error})") from error
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns]
    if rules.pieces:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    added = [token for token, i in used.items() if vocabulary.types[i] in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_tokens([as_library_token(token, vocabulary.types[used[token]] != USER_DEFINED) for token in added])
    return HuggingFaceTokenizer(backend, vocabulary.settings(rules.add_bos, None, None, needs_bos=rules.needs_bos), _SOURCE)


def _word_rules(metadata: Mapping[str, object]) -> WordRules:
    name = _name(metadata, _KEY + "pre")
    if metadata.get(_KEY + "model") == "gemma4":
        name = "gemma4"  # its own kind of vocabulary; files name other patterns or none
    if name is None:
        name = _PRE_BY_ARCHITECTURE.get(_name(metadata, "general.architecture") or "")
    if name not in WORD_RULES:
        usual, more = ", ".join(_USUAL_PRE), len(WORD_RULES) - len(_USUAL_PRE)
        raise TokenizerError(
            f"{_SOURCE}: {_KEY}pre is {quoted(name)}, an unknown word pattern; known: {usual} and {more} more (docs/models.md)"
        )
    return WORD_RULES[name]


def _build_sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    from tinyvllm.text.sentencepiece_model import SentencePieceTokenizer

    settings = vocabulary.settings(True, *(i if i < len(vocabulary.tokens) else None for i in (1, 2)))
    phi3 = vocabulary.metadata.get("general.architecture") == "phi3"
    added = []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types)):
        if phi3 and kind in (CONTROL, USER_DEFINED):
            added.append(AddedToken(token, i, special=kind == CONTROL, rstrip=token not in _PHI3_KEEPS_WHITESPACE))
    return SentencePieceTokenizer(_sentencepiece_model(vocabulary), added, settings, _SOURCE)


def _sentencepiece_model(vocabulary: _Vocabulary) -> bytes:
    """A serialized ModelProto with these pieces. Field numbers are those of sentencepiece_model.proto."""
    from tinyvllm.text.sentencepiece_model import ADD_DUMMY_PREFIX, NORMALIZER, REMOVE_EXTRA_WHITESPACES, SPACE, message, number

    scores = vocabulary.list_of("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(f"{_SOURCE}: {_KEY}scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    types = list(vocabulary.types)
    unknown = vocabulary.special_id("unknown", types.index(UNKNOWN) if UNKNOWN in types else None)
    if unknown is None:
        raise TokenizerError(f"{_SOURCE}: no token has the type unknown ({UNKNOWN}), which sentencepiece requires; convert the model again")
    types = [UNKNOWN if i == unknown else CONTROL if kind == UNKNOWN else kind for i, kind in enumerate(types)]  # exactly one
    pieces = []
    for i, (token, score, kind) in enumerate(zip(vocabulary.tokens, scores, types)):
        if not NORMAL <= kind <= BYTE:
            raise TokenizerError(f"{_SOURCE}: {_KEY}token_type[{i}] is {kind}; valid types are {NORMAL} to {BYTE}")
        text = token.replace(" ", SPACE) if kind == USER_DEFINED else token  # converters keep plain spaces in added tokens
        pieces.append(message(1, message(1, text.encode("utf-8")) + b"\x15" + struct.pack("<f", score) + number(3, kind)))
    trainer = number(3, _BPE) + number(35, BYTE in types) + number(40, unknown)  # model_type, byte_fallback, unk_id
    normalizer = message(1, b"identity") + number(ADD_DUMMY_PREFIX, vocabulary.flag("add_space_prefix", True))
    normalizer += number(REMOVE_EXTRA_WHITESPACES, vocabulary.flag("remove_extra_whitespaces", False))
    return b"".join(pieces) + message(2, trainer) + message(NORMALIZER, normalizer)
