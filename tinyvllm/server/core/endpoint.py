"""The entries of the route tables: what a path takes, and which function answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.server.core.body import Body
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.response import ResponseWriter

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """A POST endpoint: `answer(context, body, writer)` with a body of this type."""

    path: str
    body: type[Body]
    answer: Callable[[RequestContext, Any, ResponseWriter], Awaitable[None]]
    summary: str


@dataclass(frozen=True)
class Resource:
    """A GET (or DELETE) endpoint without a body."""

    path: str
    handler: Handler
    summary: str
    method: str = "GET"
