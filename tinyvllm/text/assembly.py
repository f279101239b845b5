"""Joins tokens to text one at a time: incomplete characters, byte fallback, the leading space that a text loses.

Imports no tokenizer library. The `Assembly` of a tokenizer says which of the few existing rules its reference implementation follows;
`TextStream` applies them token by token, so that text it has returned never changes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal, Protocol

from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Assembly:
    """The rules by which one kind of tokenizer joins its tokens.

    broken: how bytes that are not UTF-8 are decoded.
        "stream": all tokens form one stream of bytes, each maximal invalid part becomes one U+FFFD (byte-level BPE, tiktoken).
        "byte":   only byte tokens can be invalid, each invalid byte becomes one U+FFFD (sentencepiece).
        "run":    if a run of byte tokens is not UTF-8 as a whole, each of its bytes becomes one U+FFFD (ByteFallback of `tokenizers`).
    start: what the start of a text loses; in a "stream", nothing.
        "keep": nothing.
        "strip": up to `strip` spaces (Strip after Fuse in `tokenizers`).
        "first_token": the bytes that `lead_bytes` omits from the first token (Metaspace in `tokenizers`; sentencepiece).
        "all_spaces": the same for every token until there is text (sentencepiece models that remove extra whitespace).
    """

    broken: Literal["stream", "byte", "run"]
    start: Literal["keep", "strip", "first_token", "all_spaces"] = "keep"
    strip: int = 0


class Vocabulary(Protocol):
    """The part of a tokenizer that a TextStream uses."""

    assembly: Assembly
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def lead_bytes(self, token_id: int) -> bytes: ...

    def is_byte(self, token_id: int) -> bool: ...


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("tinyvllm.each_byte", _each_byte)
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Text of a growing list of tokens. The cost of `add` does not depend on the length of the text.

    text_cache: by token id, the text of tokens whose text does not depend on earlier tokens. Streams of one tokenizer share it.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, text_cache: dict[int, str]):
        self._vocabulary = vocabulary
        self._rules = vocabulary.assembly
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._text_cache = text_cache
        self._utf8 = _Utf8Decoder("replace" if self._rules.broken == "stream" else "tinyvllm.each_byte")
        self._run = b""  # bytes that may still become a character
        self._at_start = self._rules.start != "keep"
        self._strip = self._rules.strip

    def add(self, token_id: int) -> str:
        """The text that this token completes: "" while a character is incomplete."""
        if not (self._run or self._at_start):
            text = self._text_cache.get(token_id)
            if text is not None:
                return text
        if token_id in self._skipped:
            # sentencepiece sees control tokens and ends a run of bytes at them; the others filter them out before decoding
            return self._end_run() if self._rules.broken == "byte" else ""
        piece = self._vocabulary.token_bytes(token_id)
        if not piece:
            return ""
        if self._rules.broken == "stream":
            return self._add_bytes(token_id, piece)
        return self._add_piece(token_id, piece)

    def _add_bytes(self, token_id: int, piece: bytes) -> str:
        whole = not self._run
        text = self._utf8.decode(piece)
        self._run = self._utf8.getstate()[0]
        if whole and not self._run:
            self._text_cache[token_id] = text
        return text

    def _add_piece(self, token_id: int, piece: bytes) -> str:
        if self._vocabulary.is_byte(token_id):
            if self._rules.broken == "run":
                self._run += piece
                return ""
            text = self._utf8.decode(piece)
            self._run = self._utf8.getstate()[0]
            self._at_start = False
            return text
        before = self._end_run()
        if self._at_start:
            return before + self._begin(token_id, piece)
        text = self._text_cache[token_id] = piece.decode("utf-8", "replace")
        return before + text

    def _begin(self, token_id: int, piece: bytes) -> str:
        """The text of a token at the start of the text."""
        if self._rules.start == "strip":
            return self._strip_spaces(piece.decode("utf-8", "replace"))
        lead = self._vocabulary.lead_bytes(token_id)
        self._at_start = self._rules.start == "all_spaces" and not lead
        return lead.decode("utf-8", "replace")

    def _strip_spaces(self, text: str) -> str:
        while text.startswith(" ") and self._strip:
            text, self._strip = text[1:], self._strip - 1
        self._at_start = bool(self._strip) and not text
        return text

    def _end_run(self) -> str:
        """The text of the pending bytes; no further byte belongs to them."""
        if not self._run:
            return ""
        text = self._run_text()
        self._run = b""
        self._utf8.reset()
        if self._at_start:
            self._at_start = False
            if self._rules.start == "strip":
                text = self._strip_spaces(text)
        return text

    def _run_text(self) -> str:
        if self._rules.broken == "stream":
            return self._run.decode("utf-8", "replace")
        try:
            return self._run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(self._run)

    def held(self) -> str:
        """The text that `finish` would return, without changing the stream."""
        text = self._run_text()
        spaces = min(self._strip if self._at_start else 0, len(text) - len(text.lstrip(" ")))
        return text[spaces:]

    def finish(self) -> str:
        """The rest of the text: pending bytes, decoded although incomplete."""
        return self._end_run()

    def resume(self, token_ids: Sequence[int]) -> None:
        """Reach the same state as `add` of all these tokens, but read only the first (until there is text) and the last ones."""
        front = 0
        while front < len(token_ids) and self._at_start:
            self.add(token_ids[front])
            front += 1
        last = len(token_ids)
        while last > front:
            last -= 1
            if self._starts_fresh(token_ids[last]):
                break
        for token_id in token_ids[last:]:
            self.add(token_id)

    def _starts_fresh(self, token_id: int) -> bool:
        """Whether the text from this token on is independent of earlier tokens, once the start of the text is passed."""
        if token_id in self._skipped:
            return False
        if self._rules.broken != "stream":
            return bool(self._vocabulary.token_bytes(token_id)) and not self._vocabulary.is_byte(token_id)
        piece = self._vocabulary.token_bytes(token_id)
        return bool(piece) and piece[0] & 0xC0 != 0x80  # not a continuation byte
