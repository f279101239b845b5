"""Prompt sets: from the bundled model's world, by seed, or from a file of JSON lines.

copy   a record to be written as JSON, a sentence to be repeated, a list that recurs: the answer copies from the prompt
code   lines of JSON records, to be continued: a structure that recurs, with other values
chat   the beginning of a conversation
story  the beginning of a story, which nothing predicts
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tinyvllm.config.values import expand_home
from tinyvllm.demo import corpus
from tinyvllm.demo.corpus import Document, documents
from tinyvllm.errors import ArgumentError, FormatError
from tinyvllm.foreign import parse_json, quoted, read_bounded
from tinyvllm.lab.settings import Settings, digest_text
from tinyvllm.lab.sweep import MAX_PROMPTS, PromptSource, Sweep

MAX_FILE = 64 << 20  # bytes of a file of prompts
_KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True)
class LabPrompt:
    """One prompt: exactly one of a text, a conversation of (role, content), or token ids."""

    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    token_ids: tuple[int, ...] | None = None

    def engine_prompt(self) -> Any:
        """As LLM.generate takes it."""
        if self.text is not None:
            return self.text
        if self.messages is not None:
            return {"messages": self.conversation()}
        return {"prompt_token_ids": list(self.token_ids or ())}

    def conversation(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages or ()]


Prompts = Mapping[str, list[LabPrompt]]


def prompts_of(sweep: Sweep, folder: Path) -> dict[str, list[LabPrompt]]:
    """The prompts of every set by its name; file names are relative to the folder."""
    return {source.name: _of_source(source, sweep, folder) for source in sweep.prompts}


def digest(prompts: Prompts) -> str:
    """What identifies the prompts in the results."""
    text = digest_text({name: [[one.text, one.messages, one.token_ids] for one in each] for name, each in prompts.items()})
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _of_source(source: PromptSource, sweep: Sweep, folder: Path) -> list[LabPrompt]:
    if source.file is not None:
        return read_prompts(str(folder / expand_home("prompts", source.file)))
    return list(islice(SETS[source.name](sweep.seed), sweep.num_prompts))


def read_prompts(path: str) -> list[LabPrompt]:
    """The prompts of a file: an object a line with prompt, messages or prompt_token_ids. ArgumentError or FormatError name the line."""
    try:
        lines = read_bounded(Path(path), MAX_FILE).split(b"\n")
    except OSError as error:
        raise ArgumentError(f"prompts: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise FormatError(f"prompts: {path}: {error}") from error
    found = [_parsed(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(found) <= MAX_PROMPTS:
        raise ArgumentError(f"{path}: expected 1 to {MAX_PROMPTS} prompts, got {len(found)}")
    return found


def _parsed(where: str, line: bytes) -> LabPrompt:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise FormatError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, got {quoted(value)}")
    own = Settings(value, where)
    kinds = [kind for kind in _KINDS if own.get(kind) is not None]
    own.finish()
    if len(kinds) != 1:
        raise FormatError(f"{where}: expected exactly one of {', '.join(_KINDS)}, got {', '.join(kinds) or 'none'}")
    return _PARSERS[kinds[0]](where, value[kinds[0]])


def _text(where: str, value: Any) -> LabPrompt:
    if not isinstance(value, str) or not value:
        raise FormatError(f"{where}: prompt must be a text, got {quoted(value)}")
    return LabPrompt(text=value)


def _messages(where: str, value: Any) -> LabPrompt:
    turns = value if isinstance(value, list) else []
    if not turns or not all(map(_is_turn, turns)):
        raise FormatError(f"{where}: messages must be a list of objects with the texts role and content, got {quoted(value)}")
    return LabPrompt(messages=tuple((turn["role"], turn["content"]) for turn in turns))


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"role", "content"} and all(isinstance(part, str) for part in value.values())


def _token_ids(where: str, value: Any) -> LabPrompt:
    if not isinstance(value, list) or not value or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise FormatError(f"{where}: prompt_token_ids must be a list of token ids, got {quoted(value)}")
    return LabPrompt(token_ids=tuple(value))


_PARSERS = {"prompt": _text, "messages": _messages, "prompt_token_ids": _token_ids}

# --- the bundled world


def _conversation(document: Document) -> LabPrompt | None:
    """The turns of a chat before its last answer."""
    turns = document.turns
    while turns and turns[-1][0] != "user":
        turns = turns[:-1]
    return LabPrompt(messages=turns) if turns else None


def _chats(seed: int) -> Iterator[LabPrompt]:
    for document in documents(seed, "held-out", "chat"):
        if (prompt := _conversation(document)) is not None:
            yield prompt


def _stories(seed: int) -> Iterator[LabPrompt]:
    """The first two sentences of a story."""
    for document in documents(seed, "held-out", "story"):
        first, _, rest = document.text.partition(". ")
        second = rest.partition(". ")[0]
        if "\n" not in first + second:
            yield LabPrompt(text=f"{first}. {second}.")


def _records(seed: int) -> Iterator[LabPrompt]:
    """Lines of JSON and the beginning of the next one; the model continues with records of the same keys."""
    lines = (
        line for one in documents(seed, "held-out", "json") if one.text for line in one.text.splitlines() if line[:1] + line[-1:] == "{}"
    )
    while True:
        some = list(islice(lines, 4))
        key = some[0].partition(":")[0]
        yield LabPrompt(text="\n".join([*some, some[0], f"{key}:"]))


def _copies(seed: int) -> Iterator[LabPrompt]:
    """Conversations that ask again for what is in them: a record of a person, or sentences to be repeated.

    The bundled model copies nothing else: a text that begins again it continues in its own way.
    """
    chance = random.Random(f"copy/{seed}")
    while True:
        if chance.random() < 0.75:
            person = chance.choice(corpus.PEOPLE)
            asks = [f"Write a JSON record for {person.name}.", f"Give me a JSON record about {person.name}."]
            answer = json.dumps(corpus.of_person(person))
        else:
            lines = chance.sample(corpus.SENTENCES, 2)
            answer = " and ".join(lines)
            asks = [f"Repeat after me: {answer}", f"Please repeat: {answer}"]
        turns = [("user", asks[0]), ("assistant", answer)] * chance.randint(1, 2)
        yield LabPrompt(messages=(*turns, ("user", asks[1])))


SETS: dict[str, Callable[[int], Iterator[LabPrompt]]] = {"copy": _copies, "code": _records, "chat": _chats, "story": _stories}
