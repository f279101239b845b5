"""How an answer gets out: JSON in one piece, or server-sent events; and what stops the work when the client has gone.

The hot path is Wire.write: one ASGI message for the chunks that a step brought. Nothing else happens per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any
from urllib.parse import quote as percent

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinyvllm.server.core.body import Body, parse
from tinyvllm.server.core.context import CALL, Call
from tinyvllm.server.core.failures import Failure, encode, failure_of

__all__ = ["Answer", "Endpoint", "Wire", "event", "quote"]

log = logging.getLogger("tinyvllm.server")

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_BEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event; `name` where the API names them."""
    return b"".join([f"event: {name}\n".encode() if name else b"", b"data: ", encode(data), b"\n\n"])


@dataclass(frozen=True)
class Endpoint:
    """A POST that is answered by `work(call, body, wire)`; `body` is what it takes."""

    path: str
    body: type[Body]
    work: Callable[[Call, Any, Wire], Awaitable[None]]
    summary: str


class Wire:
    """The way to one client. Exactly one of `json` and `open` ... `close` is used."""

    def __init__(self, call: Call, send: Send):
        self._call = call
        self._send = send
        self._send_body = call.send or send
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self.started = False
        self.over = False
        self.failed: Callable[[Failure], bytes] = self._failed  # how a stream of this API says that it has failed

    async def json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """A whole answer."""
        raw = body if isinstance(body, bytes) else encode(body)
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        head += [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self.started = self.over = True
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send_body({"type": "http.response.body", "body": raw})

    def open(self) -> None:
        """This answer is a stream. Its head goes out with the first write, so that a refusal before it is still a status of its own."""
        self._timer = self._loop.call_later(self._call.service.config.beat_seconds, self._beat)

    async def write(self, data: bytes) -> None:
        """Events, as they are."""
        self._writing = True
        if not self.started:
            self.started = True
            self._call.record["ttft_ms"] = round((time.perf_counter() - self._call.began) * 1000, 2)
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        self._last = self._loop.time()
        await self._send_body({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False

    async def close(self, data: bytes = b"") -> None:
        """The last events."""
        self.stop()
        if not self.started:
            await self.write(b"")
        self.over = True
        await self._send_body({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, failure: Failure) -> None:
        """The error in the API's shape: as a status while nothing was sent, else as an event."""
        self._call.record["error"] = failure.code or failure.message
        if not self.started:
            body = failure.body(self._call.anthropic, self._call.request_id)
            await self.json(body, failure.status, failure.headers)
        elif not self.over:
            await self.close(self.failed(failure))

    def stop(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _failed(self, failure: Failure) -> bytes:
        body = failure.body(self._call.anthropic, self._call.request_id)
        return event(body, "error") if self._call.anthropic else event(body) + DONE

    def _beat(self) -> None:
        """Runs once in beat_seconds while a stream is open: a comment if nothing else was sent, an end if nothing is taken any more."""
        config, now = self._call.service.config, self._loop.time()
        silent = now - self._last
        if self._writing and silent >= config.write_seconds:
            self._call.leave_out()
            return
        if not self._writing and silent >= config.beat_seconds:
            self._beating = self._loop.create_task(self._comment())
            silent = 0.0
        self._timer = self._loop.call_later(max(0.01, config.beat_seconds - silent), self._beat)

    async def _comment(self) -> None:
        with contextlib.suppress(Exception):
            await self.write(_BEAT)


class Answer(Response):
    """Reads and checks the body, then runs an endpoint's work until it is done, the client has gone, or the server ends it."""

    def __init__(self, endpoint: Endpoint):
        self.background = None
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        wire = Wire(call, send)
        watcher: asyncio.Task[None] | None = None
        try:
            raw = await read_body(call, receive)
            config = call.service.config
            body, call.data, ignored = parse(self._endpoint.body, raw, config.lenient)
            own = getattr(body, "request_id", None)
            if own is not None and call.header(b"x-request-id") is None:
                call.request_id = own
            if ignored:
                call.headers["X-Ignored-Fields"] = ", ".join(percent(name[:200], safe=".[]") for name in ignored[:50])
            call.task = asyncio.current_task()
            watcher = asyncio.create_task(_watch(call, wire, receive))
            await self._endpoint.work(call, body, wire)
        except asyncio.CancelledError:
            if not (call.gone or call.ended):
                raise
            assert call.task is not None
            call.task.uncancel()
            call.task = None
            if not call.gone:
                await wire.fail(Failure(503, call.ended or "", code="shutting_down", headers={"Retry-After": "1"}))
        except Exception as error:  # noqa: BLE001  the last door: every client gets an answer in its API's shape
            call.task = None
            failure = failure_of(error)
            if not isinstance(error, Failure):
                failure.param = _field_given(failure.param, call.data)
            if failure.status >= 500:
                log.error("request %s: %s", call.request_id, failure.message, exc_info=error if failure.status == 500 else None)
            await wire.fail(failure)
        finally:
            call.task = None
            wire.stop()
            if watcher is not None:
                watcher.cancel()


async def read_body(call: Call, receive: Receive) -> bytes:
    """The whole body; Failure 413 beyond the limit, 408 from a client that takes too long, 415 for what is not JSON."""
    config = call.service.config
    kind = (call.header(b"content-type") or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):  # also what keeps foreign pages from posting here without CORS
        raise Failure(415, f"the body must be application/json, got {kind[:80]!r}", code="unsupported_media_type", headers=_CLOSE)
    announced = call.header(b"content-length")
    if announced is not None and announced.isdecimal() and int(announced) > config.max_body:
        raise _too_large(config.max_body)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(config.body_seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    call.gone = True
                    raise Failure(400, "the client left before its body was complete", code="incomplete_body")
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(parts[-1])
                if size > config.max_body:
                    raise _too_large(config.max_body)
    except TimeoutError:
        raise Failure(408, f"the body was not complete after {config.body_seconds:g} s", code="timeout", headers=_CLOSE) from None
    return b"".join(parts)


def _field_given(name: str | None, data: dict[str, Any]) -> str | None:
    """The field of this API that the engine means by its own name for it; None for one that was not given."""
    return next((n for n in (name, *_OTHER_NAMES.get(name or "", ())) if n in data), None)


_OTHER_NAMES = {
    "structured_outputs": ("response_format", "text", "output_config", "tools"),
    "stop": ("stop_sequences",),
    "thinking_token_budget": ("thinking",),
}


_CLOSE = {"Connection": "close"}  # what is left of the body is not read


def _too_large(limit: int) -> Failure:
    return Failure(413, f"the body is longer than {limit} bytes", code="request_too_large", headers=_CLOSE)


async def _watch(call: Call, wire: Wire, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not wire.over:  # what comes behind a whole answer is only its end
        call.leave_out()
