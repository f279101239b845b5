"""Handles one POST: reads and parses its body, and runs the endpoint until it is done or the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinyvllm.host_memory import native_call
from tinyvllm.server.core.body import Body, parse_object, validate
from tinyvllm.server.core.context import SCOPE_KEY, RequestContext
from tinyvllm.server.core.endpoint import Endpoint
from tinyvllm.server.core.failures import Failure, failure_of
from tinyvllm.server.core.limits import THREAD_BODY
from tinyvllm.server.core.response import ResponseWriter
from tinyvllm.server.http.origins import check_content_type

log = logging.getLogger("tinyvllm.server")

_PARSED_BYTES = 16  # of memory for a byte of a body, while it is parsed and checked: 13 were measured, with 400,000 names
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
# fields of the APIs, by the engine's name in its error messages
_API_FIELDS = {
    "structured_outputs": ("response_format", "text", "output_config", "tools"),
    "stop": ("stop_sequences",),
    "thinking_token_budget": ("thinking",),
}


class PostHandler(Response):
    """The ASGI response of an endpoint."""

    def __init__(self, endpoint: Endpoint):
        self.background = None
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope[SCOPE_KEY]
        writer = ResponseWriter(context, send)
        watcher: asyncio.Task[None] | None = None
        try:
            body = await self._parse(context, await read_body(context, receive))
            context.task = asyncio.current_task()
            watcher = asyncio.create_task(_watch_disconnect(context, writer, receive))
            await self._endpoint.answer(context, body, writer)
        except asyncio.CancelledError:
            if not (context.disconnected or context.end_reason):
                raise
            await _end_cancelled(context, writer)
        except Exception as error:  # noqa: BLE001  every client gets an error in the shape of its API
            context.task = None
            await writer.fail(_logged_failure(context, error))
        finally:
            context.task = None
            context.release_body()
            writer.stop_timer()
            if watcher is not None:
                watcher.cancel()

    async def _parse(self, context: RequestContext, raw: bytes) -> Any:
        lenient = context.service.config.lenient
        if len(raw) > THREAD_BODY:
            body, context.data, ignored = await asyncio.to_thread(self._validate, raw, lenient)
        else:
            body, context.data, ignored = self._validate(raw, lenient)
        request_id = getattr(body, "request_id", None)
        if request_id is not None and context.header(b"x-request-id") is None:
            context.request_id = request_id
        context.add_ignored(ignored)
        return body

    def _validate(self, raw: bytes, lenient: bool) -> tuple[Body, dict[str, Any], list[str]]:
        """(the validated body, the same as plain objects, names of the fields dropped)."""
        with native_call(len(raw) * _PARSED_BYTES, "reading the body"):
            data = parse_object(raw)
            if self._endpoint.choose is not None:
                self._endpoint = self._endpoint.choose(data)
            body, ignored = validate(self._endpoint.body, data, lenient)
        return body, data, ignored


async def _end_cancelled(context: RequestContext, writer: ResponseWriter) -> None:
    """The disconnect watcher or the server has cancelled the request; in the second case the client gets an error."""
    assert context.task is not None
    context.task.uncancel()
    context.task = None
    if not context.disconnected:
        await writer.fail(Failure(503, context.end_reason or "", code="shutting_down", headers={"Retry-After": "1"}))


def _logged_failure(context: RequestContext, error: Exception) -> Failure:
    failure = failure_of(error)
    if not isinstance(error, Failure):
        failure.param = _api_field(failure.param, context.data)
    if failure.status >= 500:
        log.error("request %s: %s", context.request_id, failure.message, exc_info=error if failure.status == 500 else None)
    return failure


def _api_field(name: str | None, data: dict[str, Any]) -> str | None:
    """The field of the body that the engine calls `name`; None if the body has no such field."""
    return next((n for n in (name, *_API_FIELDS.get(name or "", ())) if n in data), None)


async def read_body(context: RequestContext, receive: Receive) -> bytes:
    """The whole body. Failure 413 for one that is too long, 408 for a slow client, 415 for another content type than JSON."""
    config = context.service.config
    _check_headers(context, config.max_body)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(config.body_seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    context.disconnected = True
                    raise Failure(400, "the client disconnected before the body was complete", code="incomplete_body")
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(parts[-1])
                if size > config.max_body:
                    raise _too_large(config.max_body)
                context.hold_body(len(parts[-1]))
    except TimeoutError:
        text = f"the body was not complete after {config.body_seconds:g} s"
        raise Failure(408, text, code="timeout", headers=_CLOSE) from None
    return b"".join(parts)


def _check_headers(context: RequestContext, max_body: int) -> None:
    check_content_type(context)
    length = context.header(b"content-length")
    if length is not None and length.isdecimal() and int(length) > max_body:
        raise _too_large(max_body)


def _too_large(limit: int) -> Failure:
    return Failure(413, f"the body is longer than the limit of {limit} bytes (--max-body)", code="request_too_large", headers=_CLOSE)


async def _watch_disconnect(context: RequestContext, writer: ResponseWriter, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not writer.finished:  # after a whole response, a disconnect is the normal end
        context.cancel_disconnected()
