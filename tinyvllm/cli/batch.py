"""`tinyvllm batch IN.jsonl -o OUT.jsonl`: OpenAI's batch files without a server. Each line goes through the server's handlers, in process.

Each answer is in OUT.jsonl at once: after a kill, the same command computes only the missing ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.arguments import engine_options
from tinyvllm.cli.batch_file import Line, Output, answer_line, check_input, read_lines
from tinyvllm.cli.progress import say
from tinyvllm.cli.serve import model_specs
from tinyvllm.config import EngineConfig, resolve
from tinyvllm.errors import ArgumentError

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from tqdm import tqdm

_RETRY_STATUS = (429, 503)  # the same request may succeed later
_ATTEMPTS = 10
_MAX_PAUSE = 30.0  # seconds before a request is tried again


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if requests failed; their lines have the reasons."""
    specs = model_specs(getattr(options, "model", None), options.served_model_name, engine_options(options))
    for spec in specs.values():
        resolve(**spec)
    if options.concurrency is not None and options.concurrency < 1:
        raise ArgumentError(f"--concurrency must be 1 or more, got {options.concurrency}")
    if Path(options.output).resolve() == Path(options.input).resolve():
        raise ArgumentError(f"--output {options.output} is also the input")
    wanted = check_input(options.input)
    try:
        import tinyvllm.server.http.app  # noqa: F401  before anything is written
    except ImportError as error:
        raise ArgumentError(f"batch needs the packages of the extra 'server': pip install 'tinyvllm[server]' ({error})") from error
    output = Output(options.output, wanted)
    try:
        if output.done and not options.quiet:
            say(f"{len(output.done)} of {len(wanted)} requests were answered by an earlier run")
        return asyncio.run(_answer_all(options, specs, output, len(wanted)))
    finally:
        output.close()


@dataclass
class Tally:
    """Counts of a run."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, status: int, body: Any) -> None:
        self.answered += 1
        self.failed += status >= 400
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


async def _answer_all(options: argparse.Namespace, specs: Mapping[str, Mapping[str, Any]], output: Output, total: int) -> int:
    from tinyvllm.server.core.config import ServerConfig
    from tinyvllm.server.core.models import Models
    from tinyvllm.server.http.app import create_app

    waiting = (line for line in read_lines(options.input) if line.custom_id not in output.done)
    if len(output.done) == total:
        return 0
    models = Models(specs)
    app, _ = create_app(ServerConfig(lenient=getattr(options, "lenient", False), access_log=False, beat_seconds=3600.0), models)
    tally, bar, start = Tally(), _bar(options.quiet, total, len(output.done)), time.monotonic()
    try:
        await models.start()
        start = time.monotonic()
        workers = options.concurrency or 2 * max(spec.get("max_num_seqs", EngineConfig.max_num_seqs) for spec in specs.values())
        async with asyncio.TaskGroup() as group:
            for _ in range(min(workers, total - len(output.done))):
                group.create_task(_work(app, waiting, output, tally, bar))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # an error of a worker is one that stops all of them
    finally:
        if bar is not None:
            bar.close()
        await models.close()
    if not options.quiet:
        say(_closing_line(tally, time.monotonic() - start))
    return 1 if tally.failed else 0


async def _work(app: ASGIApp, waiting: Iterator[Line], output: Output, tally: Tally, bar: tqdm | None) -> None:
    """Answer lines until none is left; workers share the iterator."""
    for line in waiting:
        status, request_id, body = await _answer(app, line)
        await output.add(answer_line(line.custom_id, status, request_id, body))
        tally.add(status, body)
        if bar is not None:
            bar.update()


async def _answer(app: ASGIApp, line: Line) -> tuple[int, str, Any]:
    """(status, request id, body). A request that is refused for want of room is tried again later."""
    for attempt in range(_ATTEMPTS):
        status, headers, raw = await call(app, line.url, json.dumps(line.body).encode())
        if status not in _RETRY_STATUS or attempt == _ATTEMPTS - 1:
            break
        await asyncio.sleep(min(_MAX_PAUSE, max(0.05 * 2**attempt, float(headers.get("retry-after", 0)))))
    return status, headers.get("x-request-id", ""), json.loads(raw)


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a POST to an ASGI application, without a socket."""
    bodies, finished = [body], asyncio.Event()
    head: dict[str, Any] = {}
    pieces: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await finished.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            pieces.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": ("in-process", None),
        "headers": [(b"host", b"in-process"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    finally:
        finished.set()
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head["headers"]}
    return head["status"], headers, b"".join(pieces)


def _bar(quiet: bool, total: int, done: int) -> tqdm | None:
    if quiet or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total, initial=done, unit="req", dynamic_ncols=True, file=sys.stderr)


def _closing_line(tally: Tally, seconds: float) -> str:
    failed = f", {tally.failed} failed" if tally.failed else ""
    tokens = f"{tally.prompt_tokens} prompt + {tally.completion_tokens} generated tokens"
    return f"{tally.answered} requests{failed}, {tokens} in {seconds:.2f} s, {tally.completion_tokens / max(seconds, 1e-9):.1f} tok/s"
