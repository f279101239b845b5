"""Shared by the soak scripts: a server in a separate process, measurements of that process, and clients that keep all responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.notices import without_notices

ROOT = Path(__file__).parents[2]
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Held:
    """Memory, sockets and blocks of a process and its engine at one moment."""

    rss_mib: float
    sockets: int
    files: int
    threads: int
    blocks: int  # of the KV cache in use
    requests: int

    def __str__(self) -> str:
        return (
            f"RSS {self.rss_mib:.0f} MiB, {self.sockets} sockets, {self.files} other files, {self.threads} threads, "
            f"{self.blocks} KV blocks, {self.requests} requests"
        )


@dataclass
class Server:
    """`main.py serve` on a free port."""

    process: subprocess.Popen[bytes]
    url: str
    seconds: float  # from the start of the process to its ready line
    log: Path
    key: str | None = None  # that requests must send

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> Any:
        headers = {} if self.key is None else {"x-api-key": self.key}
        with _DIRECT.open(urllib.request.Request(self.url + path, headers=headers), timeout=30) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def status(self) -> dict[str, Any]:
        """/status of the only model, with the number of requests of the whole server."""
        said = self.get("/status")
        return {**next(iter(said["models"].values())), "requests": said["requests"]}

    def held(self) -> Held:
        status, folder = self.status(), Path(f"/proc/{self.process.pid}")
        size = re.search(r"VmRSS:\s+(\d+)", (folder / "status").read_text())
        links = []
        for entry in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(entry))
        sockets = sum(link.startswith("socket:") for link in links)
        threads = len(list((folder / "task").iterdir()))
        blocks = status["blocks"]["used"]
        return Held(int(size[1]) / 1024 if size else 0.0, sockets, len(links) - sockets, threads, blocks, status["requests"])

    def cpu_seconds(self) -> float:
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def calm(self, seconds: float = 60.0) -> None:
        """Wait until no request is running; RuntimeError after a time limit."""
        end = time.monotonic() + seconds
        while (status := self.status())["requests"] or status["running"] or status["waiting"]:
            if time.monotonic() > end:
                raise RuntimeError(f"the server is not idle after {seconds:g} s: {status}")
            time.sleep(0.1)

    def complaints(self) -> str:
        """Its stderr output but for the ready line and the notice of compiling."""
        return complaints_in(self.log.read_text(errors="replace"))


def complaints_in(text: str) -> str:
    """The lines of a server's stderr that tell of something wrong."""
    return "\n".join(line for line in without_notices(text.splitlines()) if not line.startswith("ready: "))


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Server]:
    """A server with these options of `main.py serve`, killed at the end if it is still running."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        began = time.perf_counter()
        with log.open("wb") as file:
            command = [sys.executable, "main.py", "serve", "--port", "0", "--no-access-log", *options]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
        try:
            while not (found := re.search(r"^ready: (\S+) .*\n", log.read_text(), re.MULTILINE)):
                if process.poll() is not None or time.perf_counter() - began > 120:
                    raise SystemExit(f"the server did not start: {log.read_text()}")
                time.sleep(0.005)
            yield Server(process, found[1], time.perf_counter() - began, log)
        finally:
            process.kill()
            process.wait()


@dataclass
class Reply:
    """A response. whole: it ended according to HTTP; status 0: there was no response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    first: float = 0.0  # seconds to the first byte of the body

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error in the API's shape (OpenAI's or Anthropic's), None for anything else."""
        try:
            error = self.json()["error"]
        except (ValueError, LookupError, TypeError):
            return None
        good = isinstance(error, dict) and isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
        return error if good else None


def head(path: str, length: int, more: str = "", method: str = "POST") -> bytes:
    """A request's head; `more` is further lines, each with its line end."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"{head}{more}\r\n".encode()


class Connection:
    """One connection at a time to a server, used for consecutive requests."""

    def __init__(self, port: int):
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def fresh(self) -> bool:
        """Whether the next request opens a connection."""
        return self._reader is None or self._reader.at_eof()

    async def ask(self, path: str, body: Any, more: str = "") -> Reply:
        """Send a JSON body and read the whole answer."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send(head(path, len(raw), more) + raw)

    async def send(self, request: bytes) -> Reply:
        """Send these bytes, and read the response as far as it arrives."""
        reply, began = Reply(), time.perf_counter()
        try:
            if self.fresh:
                self.close()
                self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
            assert self._reader is not None and self._writer is not None
            self._writer.write(request)
            await read_reply(self._reader, reply, began)
        except (OSError, EOFError, ValueError):
            pass
        if not reply.whole or reply.headers.get("connection") == "close":
            self.close()
        return reply

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def read_reply(reader: asyncio.StreamReader, reply: Reply, began: float) -> None:
    """Fill `reply`. EOFError if the connection ends before the response."""
    while reply.status < 200:  # interim answers
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        reply.status = int(lines[0].split()[1])
    reply.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:]) if value}
    if "transfer-encoding" in reply.headers:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            reply.first = reply.first or time.perf_counter() - began
            reply.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        reply.body = await reader.readexactly(int(reply.headers.get("content-length", 0)))
        reply.first = time.perf_counter() - began
    reply.whole = True


@dataclass
class Told:
    """One answer of a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Streamed:
    """A stream that was read to its end: an answer for each choice."""

    choices: dict[int, Told]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    done: bool  # [DONE] was the last event


def read_stream(body: bytes) -> Streamed:
    """The joined events of /v1/completions or /v1/chat/completions."""
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    found = Streamed({}, None, None, bool(events) and events[-1] == b"[DONE]")
    for event in events:
        if event == b"[DONE]":
            continue
        said = json.loads(event)
        found.error = said.get("error") or found.error
        found.usage = said.get("usage") or found.usage
        for choice in said.get("choices", ()):
            told = found.choices.setdefault(choice["index"], Told())
            told.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            told.token_ids += choice.get("token_ids") or []
            told.logprobs += logprobs_of(choice)
            told.finish_reason = choice["finish_reason"] or told.finish_reason
    return found


def read_whole(body: bytes) -> Streamed:
    """The same for a response in one piece."""
    said = json.loads(body)
    choices = {
        choice["index"]: Told(
            choice["text"] if "text" in choice else choice["message"]["content"] or "",
            choice.get("token_ids") or [],
            logprobs_of(choice),
            choice["finish_reason"],
        )
        for choice in said["choices"]
    }
    return Streamed(choices, said["usage"], None, True)


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    told = choice.get("logprobs") or {}
    return told.get("token_logprobs") or [token["logprob"] for token in told.get("content") or ()]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed; 0 for no values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def gather_all(count: int, one: Callable[[int], Any], at_once: int) -> list[Any]:
    """Results of one(0) ... one(count - 1), `at_once` of them concurrently."""
    gate = asyncio.Semaphore(at_once)

    async def guarded(number: int) -> Any:
        async with gate:
            return await one(number)

    return await asyncio.gather(*(guarded(number) for number in range(count)))
