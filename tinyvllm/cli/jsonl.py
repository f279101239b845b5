"""Prompts from the command line and from files, and the lines of their answers. Knows no engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from tinyvllm.cli.lines import read_lines
from tinyvllm.errors import ArgumentError, FormatError, TinyvllmError, nearest
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams

_KINDS = ("prompt", "prompt_token_ids", "messages")
_FIELDS = tuple(f.name for f in fields(SamplingParams))
_SHOWN = 1000  # characters of a bad line that its answer repeats


@dataclass(frozen=True)
class Job:
    """One prompt, its own sampling fields, and its source for messages: a file and line, or an option."""

    prompt: str | Mapping[str, Any]
    source: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """The prompt as its answer repeats it."""
        return {"prompt": self.prompt} if isinstance(self.prompt, str) else dict(self.prompt)


@dataclass(frozen=True)
class BadLine:
    """A line of a file that is no prompt."""

    source: str
    line: str
    error: TinyvllmError
    id: Any = None

    @property
    def prompt_fields(self) -> dict[str, Any]:
        return {"line": self.line[:_SHOWN]}


def read_prompts(path: str, option: str = "--prompts-file") -> Iterator[Job | BadLine]:
    """The prompts of a .txt file, one a line, or of a .jsonl file, one object a line; empty lines are skipped. Errors name the option."""
    ending = Path(path).suffix.lower()
    if ending not in (".txt", ".jsonl"):
        raise ArgumentError(f"{option} must end in .txt (a prompt a line) or .jsonl (an object a line), got {path!r}")
    for number, raw in read_lines(path, option):
        source = f"{path}:{number}"
        try:
            line = _decode(source, raw, first=number == 1)
            if line.strip():
                yield _parse(source, line) if ending == ".jsonl" else Job(line, source)
        except TinyvllmError as error:
            yield BadLine(source, raw.decode("utf-8", "replace").rstrip("\r\n"), error)


def _decode(source: str, raw: bytes, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise FormatError(f"{source} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


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


def answer_line(index: int, job: Job | BadLine, answer: RequestOutput | TinyvllmError) -> bytes:
    """One line of JSON for the prompt `index`: the prompt, and its answers with the number of tokens of both, or its error."""
    record: dict[str, Any] = {"index": index} | ({} if job.id is None else {"id": job.id}) | job.prompt_fields
    if isinstance(answer, TinyvllmError):
        record["error"] = {"type": type(answer).__name__, "message": str(answer), "source": job.source}
    else:
        record["outputs"] = [_completion(part) for part in answer.outputs]
        record["prompt_tokens"] = len(answer.prompt_token_ids)
        record["completion_tokens"] = sum(len(part.token_ids) for part in answer.outputs)
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in the prompt
        return json.dumps(record).encode() + b"\n"


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


def key_of(record: Mapping[str, Any]) -> str | None:
    """The key of a line of answers: its index and a digest of its prompt, so that a changed prompt is noticed. None for another line."""
    index = record.get("index")
    prompt = {name: record[name] for name in (*_KINDS, "line") if name in record}
    if type(index) is not int or len(prompt) != 1 or not record.keys() & {"outputs", "error"}:
        return None
    text = json.dumps(prompt, sort_keys=True).encode()
    return f"prompt {index} ({hashlib.blake2b(text, digest_size=8).hexdigest()})"


def key_of_job(index: int, job: Job | BadLine) -> str:
    """The key of the answer to a prompt."""
    key = key_of({"index": index, "error": None, **job.prompt_fields})
    assert key is not None
    return key
