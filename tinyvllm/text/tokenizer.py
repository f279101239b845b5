"""The interface of a tokenizer: strings to token ids and back, and text from a stream of tokens.

Imports no tokenizer library; `load.py` picks the implementation for a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from tinyvllm.errors import TokenizerError
from tinyvllm.host_memory import native_call, require
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.text.assembly import Assembly, TextStream

_CHECKED_CHARACTERS = 50_000
_BYTES_PER_CHARACTER = 128  # of memory while tokenising: 100 were measured with 31 MB of text


@dataclass(frozen=True)
class TokenizerSettings:
    """What a model's files say about its tokenizer in addition to the vocabulary.

    prefix_ids, suffix_ids  ids that `encode` puts before and after a text
    eos_ids                 every id that ends a turn or a text
    special_tokens          text of a token by the name that chat templates use (bos_token, eos_token, ...)
    chat_templates          Jinja sources by name
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer(ABC):
    """Strings to token ids and back, exactly as the model's reference implementation.

    Ids run from 0 to vocab_size - 1. Some ids may have no token: a checkpoint can have more embedding rows than its tokenizer has tokens,
    and a vocabulary can have holes. Such ids decode to "".
    """

    special_ids: frozenset[int]
    assembly: Assembly
    is_quick = True  # whether the time of `encode` is known to grow with the length of the text; if not, it is bounded, and needs a thread

    def __init__(self, settings: TokenizerSettings):
        self.bos_id = settings.bos_id
        self.eos_ids = settings.eos_ids
        self.special_tokens = dict(settings.special_tokens)
        self.chat_templates = dict(settings.chat_templates)
        self._prefix = list(settings.prefix_ids)
        self._suffix = list(settings.suffix_ids)
        self._text_cache: tuple[dict[int, str], dict[int, str]] = ({}, {})  # index: skip_special_tokens; shared by all text streams

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Highest id that has a token, plus one."""

    @property
    def prefix_ids(self) -> list[int]:
        """What `encode` puts before a text: usually BOS, or nothing."""
        return list(self._prefix)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text are recognised. TokenizerError for lone surrogates,
        OutOfMemoryError for a long text without the memory for it.

        add_special_tokens: add the tokens that the model was trained with before and after a text (usually BOS before).
        """
        nbytes, what = len(text) * _BYTES_PER_CHARACTER, f"tokenising {len(text)} characters"
        if len(text) > _CHECKED_CHARACTERS:
            require(nbytes, what)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"a lone surrogate {text[error.start]!r} at index {error.start}"
            raise TokenizerError(f"tokenizer: the text has {what}; send valid Unicode") from None
        with native_call(nbytes, what):
            ids = self._encode(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Ids of a text that is valid Unicode, without prefix or suffix."""

    def encode_within(self, text: str) -> list[int] | None:
        """Ids that append exactly `text` to an earlier text, none of them special; None if the tokenizer produces no such ids."""
        for before in ("", "\x02"):  # with \x02 in front, the tokenizer cannot insert its leading space before `text`
            lead = self.encode(before, add_special_tokens=False)
            ids = self.encode(before + text, add_special_tokens=False)
            rest = ids[len(lead) :]
            if ids[: len(lead)] == lead and self.special_ids.isdisjoint(rest) and b"".join(map(self.token_bytes, rest)) == text.encode():
                return rest
        return None

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token appends to a non-empty text; b"" for an id without a token."""

    def lead_bytes(self, token_id: int) -> bytes:
        """Bytes of the token as the first token of a text, for rules of `assembly` that treat the start of a text differently."""
        return self.token_bytes(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a byte-fallback token: one byte of a character that the vocabulary lacks."""
        return False

    def token_text(self, token_id: int) -> str:
        """Readable form of one token: U+FFFD for incomplete characters, "" for an id without a token."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens, equal to the reference implementation's.

        clean_up_tokenization_spaces is not applied: it corrupts code, and transformers itself ignores it for BPE.
        """
        stream = self.text_stream(skip_special_tokens)
        parts = [stream.add(token_id) for token_id in token_ids]
        return "".join(parts) + stream.finish()

    def text_stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A new stream that decodes token by token."""
        return TextStream(self, skip_special_tokens, self._text_cache[skip_special_tokens])


def unique(ids: Iterable[int | None]) -> tuple[int, ...]:
    """The ids that are not None, without duplicates, in order."""
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def resolve_bos_eos(
    names: Mapping[str, str],
    token_to_id: Callable[[str], int | None],
    bos_id: int | None,
    eos_ids: Iterable[int],
) -> tuple[int | None, tuple[int, ...]]:
    """(bos id, eos ids): ids of the named special tokens first, then those of the model's configuration."""
    named_bos = token_to_id(names["bos_token"]) if "bos_token" in names else None
    named_eos = token_to_id(names["eos_token"]) if "eos_token" in names else None
    return (bos_id if named_bos is None else named_bos), unique([named_eos, *eos_ids])
