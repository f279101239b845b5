"""Writes responses: JSON in one piece, or server-sent events.

The hot path is ResponseWriter.write: one ASGI message with the events of one engine step, and nothing else per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure, encode

__all__ = ["DONE", "ResponseWriter", "json_response", "quote", "sse_event"]

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def sse_event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event; `name` for APIs that name their events."""
    return b"".join([f"event: {name}\n".encode() if name else b"", b"data: ", encode(data), b"\n\n"])


def json_response(body: Any, status: int = 200) -> Response:
    """A response for GET and DELETE handlers."""
    return Response(encode(body), status, media_type="application/json")


class ResponseWriter:
    """Writes the response of one POST, either with `json`, or with `start_stream`, `write` and `close`."""

    def __init__(self, context: RequestContext, send: Send):
        self._context = context
        self._send = send
        self._send_body = context.send or send
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment_task: asyncio.Task[None] | None = None
        self.started = False
        self.finished = False
        self.format_failure: Callable[[Failure], bytes] = self._failure_event  # the event with which a stream of this API fails

    async def json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Write the whole response."""
        raw = body if isinstance(body, bytes) else encode(body)
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        head += [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self.started = self.finished = True
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send_body({"type": "http.response.body", "body": raw})

    def start_stream(self) -> None:
        """Make this response a stream. Its head goes out with the first write, so that an earlier failure still gets its own status."""
        self._timer = self._loop.call_later(self._context.service.config.beat_seconds, self._check_idle)

    async def write(self, data: bytes) -> None:
        """Write formatted events."""
        self._writing = True
        if not self.started:
            self.started = True
            self._context.record["ttft_ms"] = round((time.perf_counter() - self._context.started) * 1000, 2)
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        self._last_write = self._loop.time()
        await self._send_body({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False

    async def close(self, data: bytes = b"") -> None:
        """Write the last events."""
        self.stop_timer()
        if not self.started:
            await self.write(b"")
        self.finished = True
        await self._send_body({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, failure: Failure) -> None:
        """Write an error in the API's shape: as a status while nothing has been sent, else as an event."""
        self._context.record["error"] = failure.code or failure.message
        if not self.started:
            body = failure.body(self._context.anthropic, self._context.request_id)
            await self.json(body, failure.status, failure.headers)
        elif not self.finished:
            await self.close(self.format_failure(failure))

    def stop_timer(self) -> None:
        """Send no further comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _failure_event(self, failure: Failure) -> bytes:
        body = failure.body(self._context.anthropic, self._context.request_id)
        return sse_event(body, "error") if self._context.anthropic else sse_event(body) + DONE

    def _check_idle(self) -> None:
        """Runs every beat_seconds while a stream is open: sends a comment if it is silent, cancels it if the client accepts no data."""
        config, now = self._context.service.config, self._loop.time()
        silent = now - self._last_write
        if self._writing and silent >= config.write_seconds:
            self._context.cancel_disconnected()
            return
        if not self._writing and silent >= config.beat_seconds:
            self._comment_task = self._loop.create_task(self._write_comment())
            silent = 0.0
        self._timer = self._loop.call_later(max(0.01, config.beat_seconds - silent), self._check_idle)

    async def _write_comment(self) -> None:
        with contextlib.suppress(Exception):
            await self.write(_COMMENT)
