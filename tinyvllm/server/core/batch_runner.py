"""The batches of /v1/batches: each reads an uploaded file, sends its lines through the application, and stores the answers as files.

Batches are in memory and end with the server. Their lines run in the name of their key, a few at a time, so that other requests keep going.
"""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from starlette.types import ASGIApp

from tinyvllm.errors import ArgumentError, FormatError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.batch_lines import Line, answer_line, parse_line
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.file_store import FileStore, StoredFile
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.limits import MAX_BATCH_ERRORS, MAX_BATCH_LINES, MAX_BATCHES, MAX_FILES_BYTES
from tinyvllm.server.core.local_call import call_until_accepted

WINDOW = 24 * 3600  # seconds, the only completion_window
PRIORITY = 1000  # of a line that names none: requests of clients, whose priority is 0 if they name none, run first
CONCURRENCY = 8  # lines of all batches that run at the same time
_FINAL = ("failed", "completed", "expired", "cancelled")


@dataclass(eq=False)
class Batch:
    """One batch. `times` has the second in which it reached a status."""

    owner: Key
    endpoint: str
    input: StoredFile
    metadata: Mapping[str, str] | None = None
    id: str = field(default_factory=lambda: f"batch_{secrets.token_hex(12)}")
    status: str = "validating"
    times: dict[str, int] = field(default_factory=lambda: {"created": int(time.time())})
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    def set_status(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    @property
    def expires(self) -> int:
        return self.times["created"] + WINDOW

    @property
    def is_final(self) -> bool:
        return self.status in _FINAL

    def description(self) -> dict[str, Any]:
        """The batch as OpenAI's API shows it."""
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input.id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.times["created"],
            "expires_at": self.expires,
            **{f"{stage}_at": self.times.get(stage) for stage in stages},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Batches:
    """The batches of one server: at most MAX_BATCHES of a key, of which the oldest finished one leaves. `app` gets the requests."""

    def __init__(self, files: FileStore):
        self.app: ASGIApp | None = None
        self._files = files
        self._batches: dict[str, Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def start(self, batch: Batch) -> Batch:
        """Keep a batch and run it in the background. Failure 409 if the key has too many that are not finished."""
        mine = self.owned_by(batch.owner)
        if len(mine) >= MAX_BATCHES:
            oldest = next((one for one in mine if one.is_final), None)
            if oldest is None:
                raise Failure(409, f"{len(mine)} batches of this key are not finished, which is the limit", code="too_many_batches")
            del self._batches[oldest.id]
        self._batches[batch.id] = batch
        task = asyncio.create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return batch

    def owned_by(self, owner: Key) -> list[Batch]:
        """The batches of a key, the oldest first."""
        return [batch for batch in self._batches.values() if batch.owner is owner]

    def get(self, owner: Key, name: str) -> Batch:
        """The batch with this id. Failure 404 if the key has none."""
        batch = self._batches.get(name)
        if batch is None or batch.owner is not owner:
            raise Failure(404, f"there is no batch {name!r:.80}", code="batch_not_found")
        return batch

    def cancel(self, owner: Key, name: str) -> Batch:
        """Start no more lines; those that run are finished. Failure 409 for a batch that is finished."""
        batch = self.get(owner, name)
        if batch.is_final:
            raise Failure(409, f"batch {batch.id} is {batch.status} and cannot be cancelled", code="batch_finished")
        batch.set_status("cancelling")
        return batch

    async def _run(self, batch: Batch) -> None:
        answers, failures = bytearray(), bytearray()
        try:
            batch.errors = await asyncio.to_thread(_check, batch)
            if batch.errors:
                batch.set_status("failed")
                return
            if batch.status != "cancelling":
                batch.set_status("in_progress")
            lines = _lines(batch)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENCY, batch.total)):
                    group.create_task(self._work(batch, lines, answers, failures))
            ended = batch.status
            batch.set_status("finalizing")
            batch.output_file_id = self._store(batch, "output", answers)
            batch.error_file_id = self._store(batch, "error", failures)
            batch.set_status({"cancelling": "cancelled", "expired": "expired"}.get(ended, "completed"))
        except Exception as raised:  # noqa: BLE001  whatever ends a batch is shown in it, and ends nothing else
            error = raised.exceptions[0] if isinstance(raised, ExceptionGroup) else raised
            text = error.message if isinstance(error, Failure) else f"internal error ({type(error).__name__})"
            batch.errors.append({"code": "batch_failed", "message": text, "line": None, "param": None})
            batch.set_status("failed")

    async def _work(self, batch: Batch, lines: Iterator[Line], answers: bytearray, failures: bytearray) -> None:
        """Answer lines until none is left; the workers of a batch share the iterator."""
        for line in lines:
            async with self._slots:
                if not _may_continue(batch):
                    return
                status, request_id, raw = await self._answer(batch, line)
            target = answers if status < 400 else failures
            target += answer_line(line.custom_id, status, request_id, json.loads(raw))
            if self._files.size + len(answers) + len(failures) > MAX_FILES_BYTES:
                raise Failure(409, f"the answers exceed the room for files, {MAX_FILES_BYTES} bytes; delete files or send fewer lines")
            batch.completed += status < 400
            batch.failed += status >= 400

    async def _answer(self, batch: Batch, line: Line) -> tuple[int, str, bytes]:
        """(status, request id, body). A line that is refused for want of room is tried again until the batch ends."""
        assert self.app is not None, "create_app sets it"
        body = json.dumps(line.body).encode()
        status, headers, raw = await call_until_accepted(self.app, line.url, body, batch.owner, PRIORITY, lambda: _may_continue(batch))
        return status, headers.get("x-request-id", ""), raw

    def _store(self, batch: Batch, kind: str, data: bytearray) -> str | None:
        if not data:
            return None
        return self._files.add(StoredFile(batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", bytes(data))).id


def _may_continue(batch: Batch) -> bool:
    if batch.status == "in_progress" and time.time() > batch.expires:
        batch.set_status("expired")
    return batch.status == "in_progress"


def _lines(batch: Batch) -> Iterator[Line]:
    for number, raw in enumerate(io.BytesIO(batch.input.data), 1):
        if raw.strip():
            yield parse_line(f"line {number}", raw)


def _check(batch: Batch) -> list[dict[str, Any]]:
    """What is wrong with the lines of a batch, at most MAX_BATCH_ERRORS; counts the lines."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()

    def add(code: str, message: str, number: int | None) -> None:
        errors.append({"code": code, "message": message, "line": number, "param": None})

    for number, raw in enumerate(io.BytesIO(batch.input.data), 1):
        if len(errors) >= MAX_BATCH_ERRORS:
            break
        if not raw.strip():
            continue
        batch.total += 1
        if batch.total > MAX_BATCH_LINES:
            add("too_many_lines", f"a batch has at most {MAX_BATCH_LINES} lines", number)
            break
        try:
            line = parse_line(f"line {number}", raw)
        except (ArgumentError, FormatError) as error:
            add("invalid_line", str(error), number)
            continue
        if line.url != batch.endpoint:
            add("mismatched_endpoint", f"line {number}: url {line.url} is not the endpoint of the batch, {batch.endpoint}", number)
        if line.custom_id in seen:
            add("duplicate_custom_id", f"line {number}: custom_id {line.custom_id!r:.80} is not the first one", number)
        seen.add(line.custom_id)
    if not batch.total:
        add("empty_file", "the file has no request", None)
    return errors
