"""Requests to the ASGI application from within the process: batches, answers in the background. Imports nothing of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp

RETRY_STATUS = (429, 503)  # the same request may succeed later
_FIRST_PAUSE, _MAX_PAUSE = 0.05, 30.0  # seconds before a request that was refused for want of room is sent again
SCOPE_PRIORITY = "tinyvllm.priority"  # where it holds the priority of a request that names none
SCOPE_OWNER = "tinyvllm.owner"  # where the scope of such a request holds its API key: a client cannot write into a scope


async def call(app: ASGIApp, path: str, body: bytes, key: object = None, priority: int = 0) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a POST to the application, without a socket; with `key`, an API key of the server, in its name.

    priority  of a body that names none; higher numbers wait for lower ones
    """
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
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": ("localhost", None), SCOPE_OWNER: key,
        SCOPE_PRIORITY: priority,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    finally:
        finished.set()
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head["headers"]}
    return head["status"], headers, b"".join(pieces)


async def call_until_accepted(
    app: ASGIApp, path: str, body: bytes, key: object, priority: int, may_continue: Callable[[], bool]
) -> tuple[int, dict[str, str], bytes]:
    """What `call` returns. A request that is refused for want of room is sent again, as long as `may_continue`."""
    pause = _FIRST_PAUSE
    while True:
        status, headers, raw = await call(app, path, body, key, priority)
        if status not in RETRY_STATUS or not may_continue():
            return status, headers, raw
        await asyncio.sleep(min(_MAX_PAUSE, max(pause, float(headers.get("retry-after", 0)))))
        pause *= 2
