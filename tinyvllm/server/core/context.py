"""One HTTP request on its way through the server, and the state that all requests share."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import field
from itertools import islice
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Send

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.background import BackgroundResponses
from tinyvllm.server.core.batch_runner import Batches
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.file_store import FileStore
from tinyvllm.server.core.keys import Key, Keys
from tinyvllm.server.core.limits import MAX_BODIES
from tinyvllm.server.core.local_call import SCOPE_PRIORITY
from tinyvllm.server.core.models import Models
from tinyvllm.server.core.response_store import ResponseStore
from tinyvllm.server.core.segment_store import SegmentStore

SCOPE_KEY = "tinyvllm.context"  # where an ASGI scope holds its RequestContext
_MAX_IGNORED_NAMES = 50  # in the header X-Ignored-Fields
_FINAL_SECONDS = 2.0  # for requests to write their last error after the grace period


class Service:
    """State shared by all requests: settings, models, keys, segments, stored responses, and the requests that are running."""

    def __init__(self, config: ServerConfig, models: Models, keys: Keys):
        self.config = config
        self.models = models
        self.keys = keys
        self.segments = SegmentStore(models)
        self.files = FileStore(config.store)
        self.batches = Batches(self.files)
        self.responses = ResponseStore(config.store)
        self.background = BackgroundResponses(self.responses)
        self.started = int(time.time())
        self.draining = False
        self.engine_failure: str | None = None  # which engine has ended, and of what: the server ends too
        self.running: set[RequestContext] = set()
        self.body_bytes = 0  # of the bodies of running requests
        self._idle = asyncio.Event()
        self._hurry = asyncio.Event()
        self._serials = itertools.count()

    def next_serial(self) -> int:
        """A number unique among the requests of this server."""
        return next(self._serials)

    def add_running(self, context: RequestContext) -> None:
        self.running.add(context)
        self._idle.clear()

    def remove_running(self, context: RequestContext) -> None:
        self.running.discard(context)
        if not self.running:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse new requests, and return when all accepted ones are answered. After grace_seconds the rest are ended with an error."""
        self.draining = True
        await self._wait_until_idle(self.config.grace_seconds, self._hurry)
        for context in list(self.running):
            context.end("the server is shutting down and the grace period is over")
        await self._wait_until_idle(_FINAL_SECONDS)

    def refusal(self) -> Failure | None:
        """The error for new requests while the server ends; None while it accepts them."""
        if self.engine_failure is not None:
            return Failure(503, f"{self.engine_failure}; the server ends", code="engine_dead")
        if self.draining:
            text = "the server is shutting down and accepts no new requests"
            return Failure(503, text, code="shutting_down", headers={"Retry-After": "1"})
        return None

    def hurry(self) -> bool:
        """End the grace period; False if it had ended."""
        waiting = not self._hurry.is_set()
        self._hurry.set()
        return waiting

    async def _wait_until_idle(self, seconds: float, interrupt: asyncio.Event | None = None) -> None:
        if self.running:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, interrupt) if event is not None]
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()


@dataclass(eq=False)
class RequestContext:
    """One HTTP request: its key and id, its parsed body, and what the access log will record."""

    service: Service
    scope: Mapping[str, Any]
    request_id: str
    key: Key | None = None  # None until the middleware has checked it
    started: float = field(default_factory=time.perf_counter)
    record: dict[str, Any] = field(default_factory=dict)  # fields of the access log line
    headers: dict[str, str] = field(default_factory=dict)  # of the response
    data: dict[str, Any] = field(default_factory=dict)  # the body as plain objects
    body_bytes: int = 0  # held of the body
    tokens: int = 0  # prompt and output so far, charged to the key's token limit
    reserved: int = 0  # tokens of the key's limit that this request has taken
    streams: bool = False  # whether outputs arrive while it runs, so that `tokens` is exact at any time
    task: asyncio.Task[Any] | None = None  # runs the endpoint
    send: Send | None = None  # ASGI send below the middleware: response bodies skip the middleware, once per token
    disconnected: bool = False  # the client has closed the connection
    end_reason: str | None = None  # why the server ended the request

    def __post_init__(self) -> None:
        self._serial = self.service.next_serial()
        self._ignored: list[str] = []

    @staticmethod
    def of(request: Request) -> RequestContext:
        """The context of a request that came through the middleware."""
        context: RequestContext = request.scope[SCOPE_KEY]
        return context

    @property
    def unique_id(self) -> str:
        """The id for the engine and for response ids. Clients choose request_id, which may repeat; this one never does."""
        return f"{self.request_id}-{self._serial:x}"

    @property
    def anthropic(self) -> bool:
        """Whether errors take Anthropic's shape."""
        return str(self.scope["path"]).startswith("/v1/messages")

    @property
    def default_priority(self) -> int:
        """The priority of this request if its body names none: lines of batches run after requests of clients."""
        return int(self.scope.get(SCOPE_PRIORITY, 0))

    @property
    def owner(self) -> Key:
        """The key of this request, checked by the middleware."""
        assert self.key is not None, "the middleware sets a key, the anonymous one if the server has no keys"
        return self.key

    def cache_salt(self, requested: str | None) -> str | None:
        """The salt for the engine: each API key has its own prefixes, unless the server shares them; `requested` divides them further."""
        return requested if self.service.config.share_prefixes else self.owner.private_salt(requested)

    def add_ignored(self, names: Iterable[str]) -> None:
        """Name fields of the body that have no effect in the header X-Ignored-Fields, as long as it is not sent."""
        self._ignored += [quote(name[:200], safe=".[]/#~$") for name in islice(names, _MAX_IGNORED_NAMES + 1 - len(self._ignored))]
        more = ["..."] if len(self._ignored) > _MAX_IGNORED_NAMES else []
        if self._ignored:
            self.headers["X-Ignored-Fields"] = ", ".join(self._ignored[:_MAX_IGNORED_NAMES] + more)

    def header(self, name: bytes) -> str | None:
        """A header of the request by its lower-case name."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)

    def number(self, name: bytes) -> float | None:
        """A header that holds a positive number; Failure 400 for any other value."""
        text = self.header(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= 1e9:
            raise Failure(400, f"header {name.decode()}: must be a number greater than 0", param=name.decode(), code="invalid_value")
        return value

    def reserve(self, prompt: int, output: int) -> None:
        """Take the tokens of a prompt and of its longest answer from the key's limit; Failure 429 if they are not available."""
        self.reserved += self.owner.reserve(prompt + output)
        self.count_tokens(prompt)

    def count_tokens(self, number: int) -> None:
        """Count tokens that the engine has read or written."""
        self.tokens += number
        if (beyond := self.tokens - self.reserved) > 0:
            self.owner.charge(beyond)
            self.reserved += beyond

    def settle(self) -> None:
        """Give back what was reserved and not used. A client that leaves before its only output pays for all: its tokens are unknown."""
        if not (self.disconnected and not self.streams):
            self.owner.charge(self.tokens - self.reserved)

    def hold_body(self, size: int) -> None:
        """Count bytes of the body, until `release_body`. Failure 503 if running requests hold too many."""
        limit = self.service.config.max_body * MAX_BODIES
        if self.service.body_bytes + size > limit:
            text = f"the bodies of running requests exceed the limit of {limit} bytes ({MAX_BODIES} of --max-body); try again later"
            raise Failure(503, text, code="server_busy", headers={"Retry-After": "1", "Connection": "close"})
        self.body_bytes += size
        self.service.body_bytes += size

    def release_body(self) -> None:
        self.service.body_bytes -= self.body_bytes
        self.body_bytes = 0

    def cancel_disconnected(self) -> None:
        """The client has disconnected: cancel the work within one engine step."""
        self.disconnected = True
        if self.task is not None:
            self.task.cancel()

    def end(self, reason: str) -> None:
        """Cancel the work; the client gets an error with this reason."""
        self.end_reason = reason
        if self.task is not None:
            self.task.cancel()


def request_id(requested: str | None) -> str:
    """The client's own id if it is safe for headers and logs, else a new one of 32 hexadecimal digits, as vLLM's."""
    if requested is not None and re.fullmatch(r"[\w.:-]{1,128}", requested, re.ASCII):
        return requested
    return secrets.token_hex(16)
