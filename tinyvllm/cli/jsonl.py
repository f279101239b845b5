"""Prompts from files, and results to files: plain lines and JSON lines. Knows no engine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tinyvllm.config import nearest
from tinyvllm.errors import ArgumentError, FormatError, OutputError
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams

_KINDS = ("prompt", "prompt_token_ids", "messages")
_FIELDS = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True)
class Job:
    """One prompt, its own sampling fields, and its source for messages: a file and line, or an option."""

    prompt: str | Mapping[str, Any]
    source: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None


def read_prompts(path: str) -> list[Job]:
    """The prompts of a .txt file, one a line, or of a .jsonl file, one object a line; empty lines are skipped."""
    ending = Path(path).suffix.lower()
    if ending not in (".txt", ".jsonl"):
        raise ArgumentError(f"--prompts-file must end in .txt (a prompt a line) or .jsonl (an object a line), got {path!r}")
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"--prompts-file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    lines = [(f"{path}:{number}", line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1)]
    jobs = [_parse(source, line) if ending == ".jsonl" else Job(line, source) for source, line in lines if line.strip()]
    if not jobs:
        raise ArgumentError(f"--prompts-file {path} has no prompt")
    return jobs


def _parse(source: str, line: str) -> Job:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise FormatError(f"{source}: expected a JSON object, got {line.strip()!r:.60}")
    kinds = [kind for kind in _KINDS if kind in record]
    if len(kinds) != 1:
        raise ArgumentError(f"{source}: expected exactly one of {', '.join(_KINDS)}, got {' and '.join(kinds) or 'none'}")
    known = (*_KINDS, "id", *_FIELDS)
    for name in record:
        if name not in known:
            raise ArgumentError(f"{source}: unknown field {name!r}{nearest(name, known)}")
    sampling = {name: sampling_value(name, record[name]) for name in _FIELDS if name in record}
    prompt = record["prompt"] if kinds == ["prompt"] else {kinds[0]: record[kinds[0]]}
    if kinds == ["prompt"] and not isinstance(prompt, str):
        raise ArgumentError(f"{source}: prompt must be a text, got {prompt!r:.60}")
    return Job(prompt, source, sampling, record.get("id"))


def sampling_value(name: str, value: Any) -> Any:
    """A field of SamplingParams from JSON, which has no integer keys for logit_bias. SamplingParams validates it."""
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if key.isdecimal() else key: bias for key, bias in value.items()}
    return value


def result(job: Job, output: RequestOutput) -> str:
    """One line of JSON for a finished prompt: the prompt, its answers, and the number of tokens of both."""
    record: dict[str, Any] = {} if job.id is None else {"id": job.id}
    record |= {"prompt": job.prompt} if isinstance(job.prompt, str) else job.prompt
    record["outputs"] = [_completion(part) for part in output.outputs]
    record["prompt_tokens"] = len(output.prompt_token_ids)
    record["completion_tokens"] = sum(len(part.token_ids) for part in output.outputs)
    return json.dumps(record, ensure_ascii=False)


def _completion(part: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {"text": part.text, "token_ids": part.token_ids}
    record |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
    if part.error is not None:
        record["error"] = part.error
    if part.logprobs is not None:
        record["logprobs"] = [
            [{"token_id": i, "token": p.decoded_token, "logprob": p.logprob, "rank": p.rank} for i, p in position.items()]
            for position in part.logprobs
        ]
    return record


@contextlib.contextmanager
def new_file(name: str) -> Iterator[Callable[[str], None]]:
    """A function that writes the whole text of a file, which appears under its name only when it is complete. "-" is stdout.

    OutputError on entering if the file cannot be written: before the hours of computing, not after.
    """
    if name == "-":
        yield _print
        return
    target = Path(name).expanduser().resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")

    def publish(text: str) -> None:
        with _writing(name):
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, target)

    with _writing(name):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        unfinished.touch()
    try:
        yield publish
    finally:
        unfinished.unlink(missing_ok=True)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror or error}") from error
