"""One HTTP request on its way through the server, and what all of them share. Knows no FastAPI."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Send

from tinyvllm.errors import ArgumentError
from tinyvllm.server.core.chunk_store import ChunkStore
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.keys import Key, Keys
from tinyvllm.server.core.models import Models
from tinyvllm.server.http.log_writer import Lines

CALL = "tinyvllm.call"  # where a scope holds its Call


@dataclass(frozen=True)
class ServerConfig:
    """How a server behaves. Seconds and bytes.

    lenient             unknown and refused fields are left out and named in the header X-Ignored-Fields, instead of a 400
    trust_request_chat_template  requests may bring a chat template of their own (it runs in a sandbox, but can be made slow)
    chat_template       Jinja text that replaces the models' own
    cors_origins        origins whose pages may use this server; "*" for all
    max_body            longest request body
    head_seconds, body_seconds, write_seconds  how long a client may take to send a head, to send a body, to take what was written
    beat_seconds        silence in a stream after which a comment is sent, so that nobody between takes it for dead
    grace_seconds       how long accepted requests may go on after SIGTERM
    access_log          a line of JSON on stdout for every request
    """

    host: str = "127.0.0.1"
    port: int = 8000
    lenient: bool = False
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body: int = 32 * 2**20
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    beat_seconds: float = 5.0
    grace_seconds: float = 30.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    access_log: bool = True

    def __post_init__(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ArgumentError("--ssl-keyfile needs --ssl-certfile")
        if not 0 <= self.port <= 65535:
            raise ArgumentError(f"--port must be from 0 to 65535 (0: any that is free), got {self.port}")
        for name in ("max_body", "head_seconds", "body_seconds", "write_seconds", "beat_seconds"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")


class Service:
    """What every request sees: settings, models, keys, and who is running."""

    def __init__(self, config: ServerConfig, models: Models, keys: Keys):
        self.config = config
        self.models = models
        self.keys = keys
        self.chunks = ChunkStore()
        self.started = int(time.time())
        self.lines = Lines(sys.stdout)  # the access log
        self.draining = False
        self.running: set[Call] = set()
        self._quiet = asyncio.Event()
        self._serials = itertools.count()

    def serial(self) -> int:
        """A number that no other request of this server has."""
        return next(self._serials)

    def enter(self, call: Call) -> None:
        self.running.add(call)
        self._quiet.clear()

    def leave(self, call: Call) -> None:
        self.running.discard(call)
        if not self.running:
            self._quiet.set()

    async def drain(self) -> None:
        """Refuse new work, and return when all that was accepted is answered. After the time of grace it is ended, and told so."""
        self.draining = True
        for seconds, last in ((self.config.grace_seconds, False), (5.0, True)):
            if not self.running:
                return
            if last:
                for call in list(self.running):
                    call.end("the server shuts down and its time of grace is over")
            try:
                await asyncio.wait_for(self._quiet.wait(), seconds)
            except TimeoutError:
                continue


@dataclass(eq=False)
class Call:
    """One request: who asks, under which id, and what its line in the access log will say."""

    service: Service
    scope: Mapping[str, Any]
    request_id: str
    key: Key | None = None
    began: float = field(default_factory=time.perf_counter)
    record: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # of the answer
    data: dict[str, Any] = field(default_factory=dict)  # the body as plain objects
    tokens: int = 0  # of prompt and answer, for the key's allowance
    task: asyncio.Task[Any] | None = None
    send: Send | None = None  # the way out past everything between the door and the endpoint; it is told of every chunk
    gone: bool = False  # the client is
    ended: str | None = None  # why the server ended it

    def __post_init__(self) -> None:
        self._serial = self.service.serial()

    @property
    def name(self) -> str:
        """What answers and the engine call it. Unlike the id, which is the client's to choose, it is never used twice."""
        return f"{self.request_id}-{self._serial:x}"

    @property
    def anthropic(self) -> bool:
        return str(self.scope["path"]).startswith("/v1/messages")

    def header(self, name: bytes) -> str | None:
        """A header of the request by its lower-case name."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)

    def number(self, name: bytes) -> float | None:
        """A header that is a positive number; Failure 400 for any other."""
        text = self.header(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= 1e9:
            raise Failure(400, f"header {name.decode()}: must be a number above 0", param=name.decode(), code="invalid_value")
        return value

    def leave_out(self) -> None:
        """The client is not there any more: stop the work within one step of the engine."""
        self.gone = True
        if self.task is not None:
            self.task.cancel()

    def end(self, why: str) -> None:
        """Stop the work; the client is told why."""
        self.ended = why
        if self.task is not None:
            self.task.cancel()


def request_id(given: str | None) -> str:
    """The client's own id if it is one, so that nothing foreign gets into headers and logs; else a new one."""
    if given is not None and re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII):
        return given
    return f"req-{secrets.token_hex(12)}"
