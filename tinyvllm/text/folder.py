"""Tokenizer settings in the small files of a Hugging Face folder: names, added tokens, BOS rules, end tokens, chat templates.

Reads tokenizer_config.json, special_tokens_map.json, added_tokens.json, config.json, generation_config.json and the chat template files.
Reads no vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyvllm.errors import TokenizerError

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
        special_tokens=_special_tokens(names | tokenizer),
        added_tokens=_added_tokens(tokenizer, _read_object(folder / "added_tokens.json"), path),
        bos_id=next(iter(ids("bos_token_id")), None),
        eos_ids=ids("eos_token_id"),
        add_bos=_flag(tokenizer, "add_bos_token", path),
        add_eos=_flag(tokenizer, "add_eos_token", path),
        add_prefix_space=_flag(tokenizer, "add_prefix_space", path),
        legacy=_flag(tokenizer, "legacy", path),
        tokenizer_class=tokenizer.get("tokenizer_class"),
        model_type=config.get("model_type"),
        chat_templates=_chat_templates(folder, tokenizer, path),
    )


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer: {path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"tokenizer: {path} must hold a JSON object, got {type(value).__name__}")
    return value


def _content(value: object) -> str | None:
    """The text of a token written as a string or as an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _special_tokens(names: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name in NAMES if (text := _content(names.get(name))) is not None}


def _added_tokens(tokenizer: Mapping[str, Any], plain: Mapping[str, Any], path: Path) -> tuple[AddedToken, ...]:
    """The added tokens ordered by id: `added_tokens_decoder` of tokenizer_config.json, then those only in added_tokens.json."""
    tokens: dict[int, AddedToken] = {}
    decoder = tokenizer.get("added_tokens_decoder") or {}
    try:
        for token_id, entry in decoder.items():
            flags = {flag: bool(entry.get(flag, False)) for flag in ("special", "lstrip", "rstrip", "single_word", "normalized")}
            tokens[int(token_id)] = AddedToken(entry["content"], int(token_id), **flags)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"tokenizer: {path}: added_tokens_decoder must map ids to objects with content ({error!r})") from error
    names = set(_special_tokens(tokenizer).values())
    for content, number in plain.items():
        if type(number) is not int:
            raise TokenizerError(f"tokenizer: {path.with_name('added_tokens.json')} must map tokens to ids, got {content!r}: {number!r}")
        tokens.setdefault(number, AddedToken(content, number, special=content in names))
    return tuple(tokens[token_id] for token_id in sorted(tokens))


def _ids(config: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """An id, a list of ids or null; negative ids mean that there is none."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int for i in values):
        raise TokenizerError(f"tokenizer: {path}: {key} must be a token id or a list of them, got {value!r:.80}")
    return tuple(i for i in values if i >= 0)


def _flag(config: Mapping[str, Any], key: str, path: Path) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"tokenizer: {path}: {key} must be true or false, got {value!r}")
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
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"tokenizer: {file} cannot be read as text ({error})") from error
    return templates


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
    if not isinstance(value, dict) or any(not isinstance(part, str) for pair in value.items() for part in pair):
        raise TokenizerError(f"tokenizer: {path}: chat_template must be a template or a list of objects with name and template")
    return value
