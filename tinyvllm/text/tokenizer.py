"""What the engine knows of a tokenizer, and the two doors to one: a Hugging Face folder and the metadata of a GGUF file.

Knows no tokenizer library: each kind has its own file, imported when a model of that kind is loaded, since start-up time counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinyvllm.errors import TokenizerError
from tinyvllm.text.assembly import Assembly, TextStream


@dataclass(frozen=True)
class Settings:
    """What a model's files say about its tokenizer beyond the vocabulary.

    prefix_ids and suffix_ids are what `encode` puts around a text; eos_ids is every id that ends a turn or a text; special_tokens are the
    names that chat templates use (bos_token, eos_token, ...); chat_templates are Jinja sources by name.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer(ABC):
    """Strings to token ids and back, as the model's reference implementation does it.

    Ids run from 0 to vocab_size - 1; some of them may have no token (a checkpoint may have more rows than its tokenizer has tokens, and a
    vocabulary holes). Such ids decode to nothing.
    """

    special_ids: frozenset[int]
    assembly: Assembly

    def __init__(self, settings: Settings):
        self.bos_id = settings.bos_id
        self.eos_ids = settings.eos_ids
        self.special_tokens = dict(settings.special_tokens)
        self.chat_templates = dict(settings.chat_templates)
        self._prefix = list(settings.prefix_ids)
        self._suffix = list(settings.suffix_ids)
        self._settled: tuple[dict[int, str], dict[int, str]] = ({}, {})  # special tokens shown, skipped

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The highest id that has a token, plus one."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised. TokenizerError for a text with lone surrogates.

        add_special_tokens: put around it what the model was trained with (usually BOS before).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"a lone surrogate {text[error.start]!r} at {error.start}"
            raise TokenizerError(f"tokenizer: the text has {what}: send whole characters") from None
        ids = self._encode(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Ids of a text that is valid Unicode, with nothing put around it."""

    def encode_within(self, text: str) -> list[int] | None:
        """Ids that add exactly this text to one that has begun, none of them special; None where the tokenizer finds no such ids."""
        for before in ("", "\x02"):  # the second keeps a space away that the tokenizer would put in front
            lead = self.encode(before, add_special_tokens=False)
            ids = self.encode(before + text, add_special_tokens=False)
            rest = ids[len(lead) :]
            if ids[: len(lead)] == lead and self.special_ids.isdisjoint(rest) and b"".join(map(self.token_bytes, rest)) == text.encode():
                return rest
        return None

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun; b"" for an id without a token."""

    def lead_bytes(self, token_id: int) -> bytes:
        """What the token adds at the beginning of a text, where `assembly` makes a difference."""
        return self.token_bytes(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte of a character that the vocabulary lacks (byte fallback)."""
        return False

    def token_text(self, token_id: int) -> str:
        """One token for people to read: U+FFFD where it is not whole characters, "" for an id without a token."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of these tokens, as the reference implementation's.

        clean_up_tokenization_spaces is not applied: it corrupts code, and transformers itself ignores it for BPE.
        """
        stream = self.text_stream(skip_special_tokens)
        parts = [stream.add(token_id) for token_id in token_ids]
        return "".join(parts) + stream.finish()

    def text_stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A new text, to be decoded token by token."""
        return TextStream(self, skip_special_tokens, self._settled[skip_special_tokens])


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, else tokenizer.model (tiktoken or sentencepiece, told apart by content).

    TokenizerError if there is none, or a file is corrupt.
    """
    from tinyvllm.text.folder import read_settings

    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"tokenizer: {folder} is not a folder: give the folder that holds tokenizer.json or tokenizer.model")
    if (folder / "tokenizer.json").is_file():
        from tinyvllm.text.huggingface import load_tokenizer_json

        return load_tokenizer_json(folder / "tokenizer.json", read_settings(folder))
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise TokenizerError(f"tokenizer: {folder} has neither tokenizer.json nor tokenizer.model: copy one from the model's origin")
    from tinyvllm.text.tiktoken_model import load_tiktoken, looks_like_tiktoken

    if looks_like_tiktoken(path):
        return load_tiktoken(path, read_settings(folder))
    from tinyvllm.text.sentencepiece_model import load_sentencepiece

    return load_sentencepiece(path, read_settings(folder))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer inside a GGUF file, from its metadata by key. TokenizerError names the key that is missing or wrong."""
    from tinyvllm.text.gguf_vocab import build_tokenizer

    return build_tokenizer(metadata)


def unique(ids: Iterable[int | None]) -> tuple[int, ...]:
    """The ids that are there, each once, in order."""
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def resolve(
    names: Mapping[str, str],
    token_to_id: Callable[[str], int | None],
    bos_id: int | None,
    eos_ids: Iterable[int],
) -> tuple[int | None, tuple[int, ...]]:
    """(bos id, eos ids): those of the named tokens first, then what the model's own configuration says."""
    named_bos = token_to_id(names["bos_token"]) if "bos_token" in names else None
    named_eos = token_to_id(names["eos_token"]) if "eos_token" in names else None
    return (bos_id if named_bos is None else named_bos), unique([named_eos, *eos_ids])
