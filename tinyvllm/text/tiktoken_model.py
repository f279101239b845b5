"""Llama 3's original tokenizer.model: a tiktoken file, one line of base64 and rank for each token.

The file contains neither the pattern that splits words nor the special tokens: both are Llama 3's here. tiktoken encodes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import tiktoken

from tinyvllm.errors import TokenizerError
from tinyvllm.foreign import MAX_VOCABULARY_BYTES, quoted, read_bounded
from tinyvllm.text.assembly import Assembly
from tinyvllm.text.folder import FolderSettings
from tinyvllm.text.tokenizer import Tokenizer, TokenizerSettings, resolve_bos_eos

# Meta's pattern for Llama 3
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPECIAL_TOKENS = 256
# positions of the named tokens among the 256 of Llama 3.1; Llama 3 has no names for 4, 8 and 10
_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_END_POSITIONS = (1, 8, 9)
_MAX_RUN = 25_000  # characters; the pattern's backtracking overflows on longer runs of spaces, and Meta's code cuts at the same length
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n?")


def looks_like_tiktoken(path: Path) -> bool:
    """Whether the file starts with a line of base64 and a number."""
    try:
        with path.open("rb") as file:
            return _LINE.fullmatch(file.readline(4096)) is not None
    except OSError as error:
        raise TokenizerError(f"tokenizer: {path} cannot be read ({error.strerror})") from error


def special_tokens(count: int) -> dict[str, int]:
    """Llama 3.1's 256 special tokens after `count` ordinary ones; unnamed ones are reserved and numbered in order."""
    names = dict(_NAMED)
    numbers = iter(range(_SPECIAL_TOKENS))
    for position in range(_SPECIAL_TOKENS):
        if position not in names:
            names[position] = f"<|reserved_special_token_{next(numbers)}|>"
    return {names[position]: count + position for position in range(_SPECIAL_TOKENS)}


class TiktokenTokenizer(Tokenizer):
    """A `tiktoken.Encoding`; its text is one stream of bytes."""

    assembly = Assembly("stream")

    def __init__(self, encoding: tiktoken.Encoding, specials: dict[str, int], settings: TokenizerSettings):
        super().__init__(settings)
        self._encoding = encoding
        self.special_ids = frozenset(specials.values())

    @property
    def vocab_size(self) -> int:
        return self._encoding.max_token_value + 1

    def _encode(self, text: str) -> list[int]:
        if len(text) <= _MAX_RUN:
            return self._encoding.encode(text, allowed_special="all")
        return [token_id for part in _cut_long_runs(text) for token_id in self._encoding.encode(part, allowed_special="all")]

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token_id)
        except (KeyError, OverflowError):
            return b""


def _cut_long_runs(text: str) -> Iterator[str]:
    """The text in parts, cut after every _MAX_RUN characters of a run of whitespace or of non-whitespace."""
    begin = 0
    for run in re.finditer(r"\s+|\S+", text):
        for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]


def load_tiktoken(path: Path, folder: FolderSettings) -> Tokenizer:
    """Llama 3's tokenizer.model, with the special tokens that tokenizer_config.json names, or else Llama 3.1's."""
    if folder.model_type not in (None, "llama", "mllama"):
        raise TokenizerError(
            f"tokenizer: {path} is a tiktoken file, which is supported for Llama 3 only, but the model is {quoted(folder.model_type)}; "
            "convert it to tokenizer.json"
        )
    ranks = _read_ranks(path)
    specials = {token.content: token.token_id for token in folder.added_tokens} or special_tokens(len(ranks))
    if min(specials.values()) < len(ranks):
        lowest = min(specials.values())
        raise TokenizerError(f"tokenizer: {path} has {len(ranks)} tokens, but tokenizer_config.json adds a token with the id {lowest}")
    encoding = tiktoken.Encoding(path.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    names = {"bos_token": _NAMED[0], "eos_token": _NAMED[1]} | folder.special_tokens
    ends = [specials.get(_NAMED[position]) for position in _END_POSITIONS] if not folder.eos_ids else folder.eos_ids
    bos_id, eos_ids = resolve_bos_eos(names, specials.get, folder.bos_id, [i for i in ends if i is not None])
    prefix = (bos_id,) if bos_id is not None and folder.add_bos is not False else ()
    suffix = (specials[names["eos_token"]],) if folder.add_eos and names["eos_token"] in specials else ()
    return TiktokenTokenizer(encoding, specials, TokenizerSettings(bos_id, eos_ids, prefix, suffix, names, folder.chat_templates))


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        lines = read_bounded(path, MAX_VOCABULARY_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise TokenizerError(f"tokenizer: {path} cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:  # binascii.Error is one
            raise TokenizerError(f"tokenizer: {path}, line {number}: expected base64 and a rank ({error}); download it again") from error
    if sorted(ranks.values()) != list(range(len(lines))):
        raise TokenizerError(f"tokenizer: {path} has {len(lines)} lines, but not the ranks 0 to {len(lines) - 1}; download it again")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise TokenizerError(f"tokenizer: {path} has no token for the byte {missing:#04x}; download it again")
    return ranks
