"""Tokenizers run by the library `tokenizers`: tokenizer.json, and the BPE vocabularies of GGUF files.

The library encodes, and decodes whole texts. Decoding token by token follows the library's decoders; those that language models use are
supported (ByteLevel; Replace, ByteFallback, Fuse, Strip; Metaspace), others are refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tinyvllm.errors import TokenizerError
from tinyvllm.foreign import MAX_VOCABULARY_BYTES, quoted, read_bounded
from tinyvllm.text.assembly import Assembly
from tinyvllm.text.bounded_calls import BoundedCalls
from tinyvllm.text.folder import FolderSettings
from tinyvllm.text.tokenizer import Tokenizer, TokenizerSettings, resolve_bos_eos
from tinyvllm.text.word_rules import WORD_RULES

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one at a time, and one without end would occupy a shared thread
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 writes these bytes as the character with the same number
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))  # and these as U+0100 and following
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
# With a prefix, the library cuts merges inside of characters and then aborts the process (0.23.3). No decoder's vocabulary has one. The
# library would also read the name in escapes, as no program writes it. Both begin with plain text, which is found 40 times as fast.
_SUBWORD_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*(?!null|""|\s)')
_LETTER_ESCAPE = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
_LONG_TEXT = 2048  # characters; shorter texts gain nothing from the batch call


@contextmanager
def _no_panic(what: str) -> Iterator[None]:
    """Turns the library's panics, which are no Exception and would end the engine's thread, into TokenizerErrors."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"tokenizer: the library `tokenizers` failed on {what}: {error}; is tokenizer.json damaged?") from error


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` that has no truncation and no padding, and whose post-processor is replaced by `settings`."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, source: str):
        super().__init__(settings)
        self._backend = backend
        self._calls = BoundedCalls(f"the text splitting of {source.removeprefix('tokenizer: ')}")
        self.is_quick = _regular_expressions(backend) <= _known_patterns()
        self._decoder = _Decoder(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None, source)
        self.assembly = self._decoder.assembly
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def vocab_size(self) -> int:
        # the library counts tokens, but ids may have holes; fetching the vocabulary takes 0.1 s, so not at start-up
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _encode(self, text: str) -> list[int]:
        with _no_panic("a text"):
            if not self.is_quick:
                return self._calls.run(lambda: _encode_without_gil(self._backend, text, False), len(text))
            if len(text) < _LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=False).ids
            return _encode_without_gil(self._backend, text, False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            with _no_panic("token ids"):
                return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"tokenizer: token ids must be integers of at least 0 ({error})") from error

    def token_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        return b"" if token is None else self._decoder.piece(token)

    def lead_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        return b"" if token is None else self._decoder.lead(token)

    def is_byte(self, token_id: int) -> bool:
        token = self._token(token_id)
        return token is not None and self._decoder.byte(token) is not None

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None


def _encode_without_gil(backend: tokenizers.Tokenizer, text: str, special: bool) -> list[int]:
    """The ids of `backend.encode`, which holds the GIL."""
    return list(backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)


def _regular_expressions(backend: tokenizers.Tokenizer) -> set[str]:
    """Those that split or change a text before it is encoded."""
    stages = (stage for stage in (backend.normalizer, backend.pre_tokenizer) if stage is not None)
    return {pattern for stage in stages for pattern in _patterns_in(json.loads(stage.__getstate__()))}


def _patterns_in(value: object) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(pattern := value.get("Regex"), str):
        yield pattern
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _patterns_in(part)


@cache
def _known_patterns() -> frozenset[str]:
    """Patterns of published models, whose time grows with the length of the text."""
    return frozenset(pattern for rules in WORD_RULES.values() if rules.linear for pattern in rules.patterns)


class _Decoder:
    """The library's decoder, from its description: the text of a single token, and how tokens are joined."""

    def __init__(self, description: dict[str, Any] | None, source: str):
        self._source = source
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._dropped_lead = ""  # Metaspace: this character is dropped from the first token
        self._fused = False
        self.assembly = Assembly("run")
        stages = [] if description is None else description["decoders"] if description["type"] == "Sequence" else [description]
        if not stages:
            raise TokenizerError(f"{source}: the tokenizer has no decoder, so its tokens cannot be turned into text")
        for stage in stages:
            self._read(stage)

    def _read(self, stage: dict[str, Any]) -> None:
        kind, last = stage["type"], self._byte_level or self.assembly.start != "keep"
        if kind == "Fuse" and not last:
            self._fused = True
        elif kind == "ByteLevel" and not (last or self._fused or self._byte_fallback or self._replacements):
            self._byte_level = True
            self.assembly = Assembly("stream")
        elif kind == "ByteFallback" and not (last or self._fused):
            self._byte_fallback = True
        elif kind == "Replace" and not (last or self._fused or self._byte_fallback) and "String" in stage["pattern"]:
            self._replacements.append((stage["pattern"]["String"], stage["content"]))
        elif kind == "Strip" and self._fused and not last and stage["content"] == " " and not stage["stop"]:
            self.assembly = Assembly("run", "strip", stage["start"])
        elif kind == "Metaspace" and not (last or self._fused or self._byte_fallback or self._replacements):
            self._replacements.append((stage["replacement"], " "))
            if stage["prepend_scheme"] != "never":
                self._dropped_lead = stage["replacement"]
                self.assembly = Assembly("run", "first_token")
        else:
            raise TokenizerError(
                f"{self._source}: decoder {kind} is not supported at this position; supported: ByteLevel, Metaspace, "
                "and a sequence of Replace, ByteFallback, Fuse, Strip"
            )

    def piece(self, token: str) -> bytes:
        if self._byte_level:
            data = [_BYTE_OF.get(character, -1) for character in token]
            return token.encode("utf-8") if -1 in data else bytes(data)  # an added token may be plain text
        byte = self.byte(token)
        return self._replaced(token).encode("utf-8") if byte is None else bytes([byte])

    def lead(self, token: str) -> bytes:
        return self.piece(token.replace(self._dropped_lead, "") if self._dropped_lead else token)

    def byte(self, token: str) -> int | None:
        match = _BYTE_TOKEN.fullmatch(self._replaced(token)) if self._byte_fallback else None
        return int(match[1], 16) if match else None

    def _replaced(self, token: str) -> str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token


def load_tokenizer_json(path: Path, folder: FolderSettings) -> Tokenizer:
    """tokenizer.json with what tokenizer_config.json adds to it. TokenizerError if the library cannot read it."""
    try:
        data = read_bounded(path, MAX_VOCABULARY_BYTES)
        if _SUBWORD_PREFIX.search(data) or _has_escaped_letter(data):
            raise TokenizerError(f"tokenizer: {path}: continuing_subword_prefix must be null, and letters must not be escaped (\\u0061)")
        with _no_panic("its vocabulary"):
            backend = tokenizers.Tokenizer.from_buffer(data)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception for everything
        raise TokenizerError(f"tokenizer: {path} cannot be read ({error}); download it again") from error
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, folder, path)
    bos_id, eos_ids = resolve_bos_eos(folder.special_tokens, backend.token_to_id, folder.bos_id, folder.eos_ids)
    with _no_panic("the special tokens around a text"):
        prefix, suffix = BoundedCalls(f"the text splitting of {path}").run(lambda: _surroundings(backend), 1)
    if not prefix and not suffix:  # else tokenizer.json takes precedence over the flags, as in transformers
        eos_id = backend.token_to_id(folder.special_tokens.get("eos_token", ""))
        prefix = (bos_id,) if folder.add_bos and bos_id is not None else ()
        suffix = (eos_id,) if folder.add_eos and eos_id is not None else ()
    settings = TokenizerSettings(bos_id, eos_ids, prefix, suffix, folder.special_tokens, folder.chat_templates)
    return HuggingFaceTokenizer(backend, settings, f"tokenizer: {path}")


def _has_escaped_letter(data: bytes) -> bool:
    """If JSON has a letter of a name as \\u00.., and not as the text after a backslash that is itself escaped."""
    end = 0
    for match in _LETTER_ESCAPE.finditer(data):
        between = data[end : match.start()]
        if (len(between) - len(between.rstrip(b"\\"))) % 2 == 0:
            return True
        end = match.end()
    return False


def _add_tokens(backend: tokenizers.Tokenizer, folder: FolderSettings, path: Path) -> None:
    """Add tokens that only tokenizer_config.json has, and mark as special those that tokenizer.json holds as ordinary tokens."""
    for token in folder.added_tokens:
        if backend.token_to_id(token.content) is None:
            flags = token.special, token.lstrip, token.rstrip, token.single_word, token.normalized
            backend.add_tokens([as_library_token(token.content, *flags)])
        if backend.token_to_id(token.content) != token.token_id:
            raise TokenizerError(
                f"tokenizer: {path} gives {quoted(token.content)} the id {backend.token_to_id(token.content)}, "
                f"but tokenizer_config.json gives it the id {token.token_id}; the files belong to different models"
            )
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for content in folder.special_tokens.values():
        if content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([as_library_token(content, special=True)])


def as_library_token(
    content: str, special: bool, lstrip: bool = False, rstrip: bool = False, single_word: bool = False, normalized: bool = False
) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(content, single_word=single_word, lstrip=lstrip, rstrip=rstrip, normalized=normalized, special=special)


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text."""
    bare, whole = (_encode_without_gil(backend, "a", special) for special in (False, True))
    if not bare:  # the vocabulary has no token for it: take all ids as the prefix, since a BOS is more likely than a suffix
        return tuple(whole), ()
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return tuple(whole[:start]), tuple(whole[start + len(bare) :])
