"""OpenAI's batch files: requests in, one line of answer each out, continued after a kill. Knows no server and no engine."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyvllm.config import nearest
from tinyvllm.errors import ArgumentError, FormatError, OutputError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
SYNC_SECONDS = 1.0  # of answers that a power cut may lose; a kill loses none
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """One request of the input, and its file and line."""

    source: str
    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_lines(path: str) -> Iterator[Line]:
    """The requests of a file, one after the other. FormatError or ArgumentError with the number of a line that is none."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _parse(f"{path}:{number}", raw)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from error


def check_input(path: str) -> set[str]:
    """The custom_ids of the whole file, before anything is loaded. Refuses a file with a duplicate id, or without requests."""
    sources: dict[str, str] = {}
    for line in read_lines(path):
        if line.custom_id in sources:
            raise ArgumentError(f"{line.source}: {sources[line.custom_id]} has the custom_id {line.custom_id!r:.80} too: give each its own")
        sources[line.custom_id] = line.source
    if not sources:
        raise ArgumentError(f"{path} has no request")
    return set(sources)


def _parse(source: str, raw: bytes) -> Line:
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise FormatError(f"{source}: expected a JSON object, got {raw.strip().decode(errors='replace')!r:.60}")
    for name in record:
        if name not in _FIELDS:
            raise ArgumentError(f"{source}: unknown field {name!r}{nearest(name, _FIELDS)}")
    if not isinstance(record.get("custom_id"), str) or not record["custom_id"]:
        raise ArgumentError(f"{source}: custom_id must be a text, got {record.get('custom_id')!r:.60}")
    if record.get("method") != "POST":
        raise ArgumentError(f"{source}: method must be POST, got {record.get('method')!r:.60}")
    if record.get("url") not in URLS:
        url = record.get("url")
        raise ArgumentError(f"{source}: url must be one of {', '.join(URLS)}, got {url!r:.80}{nearest(str(url), URLS)}")
    if not isinstance(record.get("body"), dict):
        raise ArgumentError(f"{source}: body must be an object, got {record.get('body')!r:.60}")
    if record["body"].get("stream"):
        raise ArgumentError(f"{source}: body.stream: a line of a file cannot be streamed: leave it out")
    return Line(source, record["custom_id"], record["url"], record["body"])


def answer_line(custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """A line of the output in OpenAI's format; a refused request is also a response, with its status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    record = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class Output:
    """The file of answers: it grows by whole lines, so that the next run continues where a killed one ended.

    An incomplete last line is cut off. Each line is handed to the system at once, and is on the disk after SYNC_SECONDS. ArgumentError if
    the file has answers to requests that are not `wanted`, or if another run writes it; OutputError if it cannot be written.
    """

    def __init__(self, name: str, wanted: set[str]):
        self.name = name
        self._syncing: asyncio.Task[None] | None = None
        self._failure: OSError | None = None  # of the disk, raised with the next line
        try:
            self._file = os.open(Path(name).expanduser(), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _lock(self._file, name)
                self.done, whole = _answered(self._file, name, wanted)
                os.ftruncate(self._file, whole)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise OutputError(f"cannot write {name}: {error.strerror or error}") from error

    async def add(self, line: bytes) -> None:
        """Append one line, in one go: lines of several tasks never mix."""
        try:
            if self._failure is not None:
                raise self._failure
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise OutputError(f"cannot write {self.name}: {error.strerror or error}") from error
        if self._syncing is None:
            self._syncing = asyncio.create_task(self._sync())

    async def _sync(self) -> None:
        """Bring the lines of the last SYNC_SECONDS to the disk."""
        await asyncio.sleep(SYNC_SECONDS)
        self._syncing = None
        try:
            await asyncio.to_thread(os.fsync, self._file)
        except OSError as error:
            self._failure = error

    def close(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            raise OutputError(f"cannot write {self.name}: {error.strerror or error}") from error
        finally:
            os.close(self._file)


def _lock(file: int, name: str) -> None:
    try:
        import fcntl
    except ImportError:  # a system without it
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArgumentError(f"{name} is being written by another run: wait for it, or name another file") from None


def _answered(file: int, name: str, wanted: set[str]) -> tuple[set[str], int]:
    """(custom_ids that have a whole line, bytes of these lines)."""
    done: set[str] = set()
    whole = 0
    with open(file, "rb", closefd=False) as reader:
        lines = iter(reader)
        for raw in lines:
            custom_id = _custom_id(raw)
            if custom_id is None:
                if next(lines, None) is None:
                    break  # the last line, incomplete
                raise FormatError(f"{name}: byte {whole}: not a line of answers: the file is not the output of a batch; name another one")
            if custom_id not in wanted:
                raise ArgumentError(f"{name} has an answer to {custom_id!r:.80}, which is not in the input: name another file")
            done.add(custom_id)
            whole += len(raw)
    return done, whole


def _custom_id(raw: bytes) -> str | None:
    try:
        record = json.loads(raw) if raw.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    custom_id = record.get("custom_id") if isinstance(record, dict) and "response" in record else None
    return custom_id if isinstance(custom_id, str) else None
