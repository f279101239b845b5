"""Tokenizer settings in the small files of a Hugging Face folder: names, added tokens, BOS rules, end tokens, chat templates.

Reads tokenizer_config.json, special_tokens_map.json, added_tokens.json, config.json, generation_config.json and the chat template files.
Reads no vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from tinyvllm.errors import TokenizerError
from tinyvllm.foreign import MAX_JSON_BYTES, parse_json, quoted, read_bounded
from tinyvllm.lazy_dataclass import dataclass

MAX_TOKEN_ID = 1 << 24  # exclusive; published vocabularies have up to 262,144 tokens
MAX_TEMPLATE_BYTES = 256 << 10  # of a chat template; the largest published ones have 30 KB
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched before the tokenizer sees the text. lstrip, rstrip: it absorbs the whitespace before or after it."""

    content: str
    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class FolderSettings:
    """The settings in the files, None if unset. special_tokens: text by name ("bos_token"). chat_templates: source by name ("default")."""

    special_tokens: dict[str, str] = field(default_factory=dict)
    added_tokens: tuple[AddedToken, ...] = ()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    tokenizer_class: str | None = None
    model_type: str | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)


def read_settings(folder: Path) -> FolderSettings:
    """Read the files that exist; TokenizerError names the file that is corrupt or the entry that is invalid."""
    path = folder / "tokenizer_config.json"
    tokenizer, names = _read_object(path), _read_object(folder / "special_tokens_map.json")
    config, generation = _read_object(folder / "config.json"), _read_object(folder / "generation_config.json")

    def ids(key: str) -> tuple[int, ...]:
        return (*_ids(generation, key, folder / "generation_config.json"), *_ids(config, key, folder / "config.json"))

    return FolderSettings(
        special_tokens=_special_tokens(names | tokenizer, path),
        added_tokens=_added_tokens(tokenizer, _read_object(folder / "added_tokens.json"), path),
        bos_id=next(iter(ids("bos_token_id")), None),
        eos_ids=ids("eos_token_id"),
        add_bos=_flag(tokenizer, "add_bos_token", path),
        add_eos=_flag(tokenizer, "add_eos_token", path),
        add_prefix_space=_flag(tokenizer, "add_prefix_space", path),
        legacy=_flag(tokenizer, "legacy", path),
        tokenizer_class=_name(tokenizer, "tokenizer_class", path),
        model_type=_name(config, "model_type", folder / "config.json"),
        chat_templates=_chat_templates(folder, tokenizer, path),
    )


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(read_bounded(path, MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"tokenizer: {path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"tokenizer: {path} must hold a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(names: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Texts of the named tokens, each written as a string or as an object with `content`; null and "" mean that there is none."""
    tokens = {}
    for name in NAMES:
        value = names.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if text is not None and not isinstance(text, str):
            raise TokenizerError(f"tokenizer: {path}: {name} must be a text, or an object with content, got {quoted(value)}")
        if text:
            tokens[name] = text
    return tokens


def _added_tokens(tokenizer: Mapping[str, Any], plain: Mapping[str, Any], path: Path) -> tuple[AddedToken, ...]:
    """The added tokens ordered by id: `added_tokens_decoder` of tokenizer_config.json, then those only in added_tokens.json."""
    decoder = tokenizer.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise TokenizerError(f"tokenizer: {path}: added_tokens_decoder must map ids to objects with content, got {quoted(decoder)}")
    tokens = {token.token_id: token for token in (_added_token(key, entry, path) for key, entry in decoder.items())}
    names = set(_special_tokens(tokenizer, path).values())
    for content, number in plain.items():
        if type(number) is not int or not 0 <= number < MAX_TOKEN_ID or not content:
            where = f"tokenizer: {path.with_name('added_tokens.json')}"
            raise TokenizerError(f"{where} must map tokens to ids below {MAX_TOKEN_ID}, got {quoted(content)}: {quoted(number)}")
        tokens.setdefault(number, AddedToken(content, number, special=content in names))
    return tuple(tokens[token_id] for token_id in sorted(tokens))


def _added_token(key: str, entry: object, path: Path) -> AddedToken:
    """One entry of added_tokens_decoder: a non-empty text (an empty one would be matched everywhere) and flags that are booleans."""
    content = entry.get("content") if isinstance(entry, Mapping) else None
    flags = {flag: entry.get(flag, False) for flag in _FLAGS} if isinstance(entry, Mapping) else {}
    token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else MAX_TOKEN_ID
    good = isinstance(content, str) and content and token_id < MAX_TOKEN_ID and all(isinstance(flag, bool) for flag in flags.values())
    if not good or not isinstance(content, str):
        expected = f"must map ids below {MAX_TOKEN_ID} to objects with content and flags that are true or false"
        raise TokenizerError(f"tokenizer: {path}: added_tokens_decoder {expected}, got {quoted(key)}: {quoted(entry)}")
    return AddedToken(content, token_id, **flags)


def _ids(config: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """An id, a list of ids or null; negative ids mean that there is none."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i >= MAX_TOKEN_ID for i in values):
        raise TokenizerError(f"tokenizer: {path}: {key} must be a token id (below {MAX_TOKEN_ID}) or a list of them, got {quoted(value)}")
    return tuple(i for i in values if i >= 0)


def _flag(config: Mapping[str, Any], key: str, path: Path) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"tokenizer: {path}: {key} must be true or false, got {quoted(value)}")
    return value


def _name(config: Mapping[str, Any], key: str, path: Path) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"tokenizer: {path}: {key} must be a text, got {quoted(value)}")
    return value


def _chat_templates(folder: Path, tokenizer: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Jinja sources by name. Separate template files take precedence over tokenizer_config.json, as in transformers."""
    value = tokenizer.get("chat_template")
    if value is None:
        value = _read_object(folder / "chat_template.json").get("chat_template")
    templates = _named_templates(value, path)
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja"} | {file.stem: file for file in named}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = read_bounded(file, MAX_TEMPLATE_BYTES).decode("utf-8")
            except (OSError, ValueError) as error:
                raise TokenizerError(f"tokenizer: {file} cannot be read as text ({error})") from error
    return templates


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    pairs = [(entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None) for entry in entries]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    templates = {name: template for name, template in pairs if isinstance(name, str) and isinstance(template, str)}
    if len(templates) != len(pairs):
        expected = "must be a template or a list of objects, each with another name and a template"
        raise TokenizerError(f"tokenizer: {path}: chat_template {expected}, got {quoted(value)}")
    return templates
