"""The outermost room: gives every request its id, lets it in or not, and writes its line in the access log.

Plain ASGI around the application, so that whatever answers, also a 404, has an id and a line.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinyvllm.server.core.context import CALL, Call, Service, request_id
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.http.stream import Wire

_OPEN = ("/", "/health", "/ready", "/version", "/favicon.ico")  # without a key
_READING = ("GET", "HEAD", "OPTIONS")
_GONE = 499  # what access logs call an answer that nobody waited for


class Middleware:
    """Wraps an ASGI application."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._lines = service.lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(self._service, scope, "")
        call.request_id = request_id(call.header(b"x-request-id"))
        scope[CALL] = call
        call.send = send
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {"X-Request-Id": call.request_id, **call.headers}
                added = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        self._service.enter(call)
        counted = False
        try:
            call.key = self._key(call)
            if scope["method"] not in _READING:
                self._check_open()
                call.key.enter()
                counted = True
            await self._app(scope, receive, answer)
        except Failure as failure:
            await Wire(call, answer).fail(failure)
        finally:
            self._service.leave(call)
            if counted and call.key is not None:
                call.key.leave(call.tokens)
            if self._service.config.access_log:
                self._log(call, _GONE if call.gone else status)

    def _key(self, call: Call) -> Any:
        path = call.scope["path"]
        if path in _OPEN or path.startswith("/page/"):
            return self._service.keys.nobody
        bearer = call.header(b"authorization") or ""
        secret = bearer[7:].strip() if bearer[:7].lower() == "bearer " else call.header(b"x-api-key")
        return self._service.keys.find(secret)

    def _check_open(self) -> None:
        if self._service.draining:
            raise Failure(503, "the server shuts down and takes no new work", code="shutting_down", headers={"Retry-After": "1"})

    def _log(self, call: Call, status: int) -> None:
        scope, client = call.scope, call.scope.get("client")
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": call.request_id,
            "client": client[0] if client else None,
            "key": call.key.name if call.key is not None else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round((time.perf_counter() - call.began) * 1000, 2),
            **_asked(call.data),
            **call.record,
        }
        self._lines.write(json.dumps(line))  # ASCII: what clients chose cannot forge a line


def _asked(data: dict[str, Any]) -> dict[str, Any]:
    """Of a body, what the log may hold: no prompts."""
    return {name: data[name] for name in ("model", "user", "stream") if data.get(name) is not None}
