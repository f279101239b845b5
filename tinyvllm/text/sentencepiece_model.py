"""sentencepiece models: a `.model` file, or one rebuilt from the vocabulary in a GGUF file.

sentencepiece encodes. Special tokens are cut out of the text first, as in transformers and llama.cpp; each part between them is a separate
text for sentencepiece, with its own leading space if the model adds one (`prefix_first_only`: only the first part). Field numbers are those
of sentencepiece_model.proto.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import sentencepiece

from tinyvllm.errors import TokenizerError, one_line
from tinyvllm.foreign import MAX_VOCABULARY_BYTES, read_bounded
from tinyvllm.text.assembly import Assembly
from tinyvllm.text.folder import AddedToken, FolderSettings
from tinyvllm.text.tokenizer import Tokenizer, TokenizerSettings, resolve_bos_eos

SPACE = "\u2581"  # how pieces write a space
NORMALIZER = 3  # field of ModelProto
ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES = 3, 4  # fields of NormalizerSpec
_TRAINER, _WHITESPACE_AS_SUFFIX = 2, 24
_VARINT, _BYTES = 0, 2  # wire types
_FIXED_BYTES = {1: 8, 5: 4}  # of the other two
_MAX_ADDED = 32_768  # control and added tokens: they are matched one after the other; published vocabularies have up to 6,500
_ERNIE = "Ernie4_5_Tokenizer"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model and added tokens. The unknown token is special, as in transformers: it decodes to nothing."""

    def __init__(
        self, model: bytes, added: Iterable[AddedToken], settings: TokenizerSettings, source: str, prefix_first_only: bool = False
    ):
        super().__init__(settings)
        self._model = model
        self._processor = load_processor(model, source)
        self._prefix_first_only = prefix_first_only
        self._pieces = pieces_of(self._processor, source)
        self._count = len(self._pieces)
        own = [AddedToken(piece, i, special=True) for i, piece in enumerate(self._pieces) if self._is_special(i)]
        tokens = {token.content: token for token in (*own, *added)}
        if len(tokens) > _MAX_ADDED:
            raise TokenizerError(f"{source}: {len(tokens)} tokens are control or added tokens, and at most {_MAX_ADDED} are supported")
        self._added = {token.token_id: token for token in tokens.values()}
        self.special_ids = frozenset(token.token_id for token in tokens.values() if token.special)
        self._by_content = tokens
        longest_first = sorted(tokens.values(), key=lambda token: -len(token.content))
        self._any_added = re.compile("|".join(map(_pattern, longest_first))) if tokens else None
        self.assembly = _assembly(model, source)

    def _is_special(self, token_id: int) -> bool:
        return self._processor.is_control(token_id) or self._processor.is_unknown(token_id)

    @property
    def vocab_size(self) -> int:
        return max(self._count, max(self._added, default=-1) + 1)

    @cached_property
    def _rest_processor(self) -> sentencepiece.SentencePieceProcessor:
        """The processor for all parts of a text except the first."""
        if not self._prefix_first_only:
            return self._processor
        return load_processor(without_prefix(self._model), "tokenizer")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        begin = 0
        while self._any_added is not None and (match := self._any_added.search(text, begin)) is not None:
            token = self._by_content[match[0]]
            start, end = match.span()
            while token.lstrip and start > begin and text[start - 1].isspace():
                start -= 1
            while token.rstrip and end < len(text) and text[end].isspace():
                end += 1
            ids += self._encode_part(text, begin, start)
            ids.append(token.token_id)
            begin = end
        return ids + self._encode_part(text, begin, len(text))

    def _encode_part(self, text: str, begin: int, end: int) -> list[int]:
        if begin == end:
            return []
        ids: list[int] = (self._rest_processor if begin else self._processor).encode(text[begin:end])
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode("utf-8")
        if not 0 <= token_id < self._count:
            return b""
        if self._processor.is_byte(token_id):
            return bytes([int(self._pieces[token_id][3:5], 16)])
        return self._pieces[token_id].replace(SPACE, " ").encode("utf-8")

    def lead_bytes(self, token_id: int) -> bytes:
        piece = self.token_bytes(token_id)
        begins_with_space = token_id not in self._added and 0 <= token_id < self._count and self._pieces[token_id].startswith(SPACE)
        return piece[1:] if begins_with_space else piece

    def is_byte(self, token_id: int) -> bool:
        return token_id not in self._added and 0 <= token_id < self._count and self._processor.is_byte(token_id)


def _pattern(token: AddedToken) -> str:
    return rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)


def _assembly(model: bytes, source: str) -> Assembly:
    """sentencepiece's rule for the leading space: removed if the model adds one, or removes extra whitespace."""
    normalizer: dict[int, int] = {}
    for field, value in _fields(model, source):
        if field == NORMALIZER and isinstance(value, bytes):
            normalizer |= {number: flag for number, flag in _fields(value, source) if isinstance(flag, int)}
        if field == _TRAINER and isinstance(value, bytes) and dict(_fields(value, source)).get(_WHITESPACE_AS_SUFFIX):
            raise TokenizerError(f"{source}: treat_whitespace_as_suffix (spaces written after words) is not supported")
    if normalizer.get(REMOVE_EXTRA_WHITESPACES, 1):  # both settings default to on
        return Assembly("byte", "all_spaces")
    return Assembly("byte", "first_token" if normalizer.get(ADD_DUMMY_PREFIX, 1) else "keep")


def without_prefix(model: bytes) -> bytes:
    """The same model without the added leading space. In protobuf, a repeated message field is merged into the first one."""
    return model + message(NORMALIZER, number(ADD_DUMMY_PREFIX, 0))


def load_processor(model: bytes, source: str) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError) as error:
        raise TokenizerError(f"{source} is not a sentencepiece model ({one_line(str(error), 120)}); download it again") from error


def pieces_of(processor: sentencepiece.SentencePieceProcessor, source: str) -> list[str]:
    """The pieces by id. sentencepiece itself accepts any bytes."""
    pieces = []
    try:
        for i in range(processor.vocab_size()):
            pieces.append(processor.id_to_piece(i))
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{source}: piece {len(pieces)} is not UTF-8; download it again") from error
    return pieces


def load_sentencepiece(path: Path, folder: FolderSettings) -> Tokenizer:
    """tokenizer.model with the settings of tokenizer_config.json.

    Every text gets a BOS unless that file disables it, as LLaMA expects; ERNIE 4.5's own tokenizer class never adds one. `legacy: false`
    there means that only the first part of a text gets a leading space.
    """
    source = f"tokenizer: {path}"
    try:
        model = read_bounded(path, MAX_VOCABULARY_BYTES)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{source} cannot be read ({error})") from error
    processor = load_processor(model, source)
    pieces = pieces_of(processor, source)
    if not pieces:
        raise TokenizerError(f"{source} has no tokens; download it again")
    if folder.add_prefix_space is False:
        model = without_prefix(model)
    names = _names_in_model(processor, pieces) | folder.special_tokens
    ids = {piece: i for i, piece in enumerate(pieces)}
    ids |= {token.content: token.token_id for token in folder.added_tokens}
    bos_id, eos_ids = resolve_bos_eos(names, ids.get, folder.bos_id, folder.eos_ids)
    add_bos = folder.tokenizer_class != _ERNIE if folder.add_bos is None else folder.add_bos
    prefix = (bos_id,) if add_bos and bos_id is not None else ()
    suffix = (ids[names["eos_token"]],) if folder.add_eos and names.get("eos_token") in ids else ()
    settings = TokenizerSettings(bos_id, eos_ids, prefix, suffix, names, folder.chat_templates)
    return SentencePieceTokenizer(model, _added_tokens(folder, ids), settings, source, prefix_first_only=folder.legacy is False)


def _names_in_model(processor: sentencepiece.SentencePieceProcessor, pieces: list[str]) -> dict[str, str]:
    methods = {"bos_token": processor.bos_id, "eos_token": processor.eos_id, "unk_token": processor.unk_id, "pad_token": processor.pad_id}
    return {name: pieces[method()] for name, method in methods.items() if 0 <= method() < len(pieces)}


def _added_tokens(folder: FolderSettings, ids: dict[str, int]) -> list[AddedToken]:
    """Tokens to match in addition to the model's control tokens: added ones, and named special tokens that are ordinary pieces."""
    added = {token.content: token for token in folder.added_tokens}
    for content in folder.special_tokens.values():
        if content in ids and content not in added:
            added[content] = AddedToken(content, ids[content], special=True)
    return list(added.values())


def _fields(data: bytes, source: str) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: numbers, and the bytes of strings and messages.

    TokenizerError for what sentencepiece accepts in messages that it does not know: groups, and broken messages in them.
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at, source)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at, source)
            yield key >> 3, value
            continue
        if kind not in _FIXED_BYTES and kind != _BYTES:
            raise TokenizerError(f"{source}: a field has the wire type {kind}, which no sentencepiece model uses; download it again")
        size, at = _read_varint(data, at, source) if kind == _BYTES else (_FIXED_BYTES[kind], at)
        if kind == _BYTES:
            yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int, source: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise TokenizerError(f"{source}: a number in it is longer than 10 bytes or cut off; download it again")


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    """One protobuf field that holds an integer, an enumeration or a boolean."""
    return _encode_varint(field << 3 | _VARINT) + _encode_varint(value)


def message(field: int, data: bytes) -> bytes:
    """One protobuf field that holds a string, bytes or a message."""
    return _encode_varint(field << 3 | _BYTES) + _encode_varint(len(data)) + data
