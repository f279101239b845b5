"""The outermost ASGI layer: gives every request an id and a context, checks its origin and its key, and writes the access log.

Plain ASGI around the application, so that every response, including a 404, has an id and a log line.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinyvllm.server.core.context import SCOPE_KEY, RequestContext, Service, request_id
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.local_call import SCOPE_OWNER
from tinyvllm.server.core.response import ResponseWriter
from tinyvllm.server.http.log_writer import LogWriter
from tinyvllm.server.http.origins import Origins
from tinyvllm.server.http.paths import Paths

_PUBLIC_PATHS = ("/", "/health", "/ready", "/version", "/favicon.ico")  # need no key
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_CLIENT_CLOSED = 499  # in access logs, the status of a request whose client disconnected


class Middleware:
    """Wraps an ASGI application."""

    def __init__(self, app: ASGIApp, service: Service, access_log: LogWriter, paths: Paths):
        self._app = app
        self._service = service
        self._access_log = access_log
        self._paths = paths
        self._origins = Origins(service.config, bool(service.keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (location := self._paths.redirect(scope["path"])) is not None:
            await RedirectResponse(location, 308)(scope, receive, send)
            return
        path = self._paths.canonical(scope["path"])
        scope = {**scope, "path": path, "raw_path": quote(path).encode()}
        context = RequestContext(self._service, scope, "")
        context.request_id = request_id(context.header(b"x-request-id"))
        scope[SCOPE_KEY] = context
        context.send = send
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {"X-Request-Id": context.request_id, "X-Content-Type-Options": "nosniff", **context.headers}
                if context.anthropic:
                    headers["Request-Id"] = context.request_id  # the name that Anthropic's clients read
                added = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        self._service.add_running(context)
        try:
            await self._run(context, scope, receive, send_with_headers)
        finally:
            self._service.remove_running(context)
            if self._service.config.access_log:
                self._log(context, _CLIENT_CLOSED if context.disconnected else status)

    async def _run(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        counted = False
        try:
            self._origins.check(context)
            context.key = self._find_key(context)
            if scope["method"] not in _READ_METHODS:
                self._check_open()
                context.key.enter()
                counted = True
            else:
                context.key.count_request()
            await self._app(scope, receive, send)
        except Failure as failure:
            await ResponseWriter(context, send).fail(failure)
        finally:
            if counted:
                context.settle()
                context.owner.leave()

    def _find_key(self, context: RequestContext) -> Key:
        path, owner = context.scope["path"], context.scope.get(SCOPE_OWNER)
        if isinstance(owner, Key):
            return owner
        if path in _PUBLIC_PATHS or path.startswith("/page/"):
            return self._service.keys.anonymous
        bearer = context.header(b"authorization") or ""
        secret = bearer[7:].strip() if bearer[:7].lower() == "bearer " else context.header(b"x-api-key")
        return self._service.keys.find(secret)

    def _check_open(self) -> None:
        if (refusal := self._service.refusal()) is not None:
            raise refusal

    def _log(self, context: RequestContext, status: int) -> None:
        scope, client = context.scope, context.scope.get("client")
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": context.request_id,
            "client": client[0] if client else None,
            "key": context.key.name if context.key is not None else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round((time.perf_counter() - context.started) * 1000, 2),
            **_loggable_fields(context.data),
            **context.record,
        }
        self._access_log.write(json.dumps(line))  # ASCII without newlines: clients cannot forge a line


def _loggable_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body that the log may hold; never prompts."""
    return {name: data[name] for name in ("model", "user", "stream") if data.get(name) is not None}
