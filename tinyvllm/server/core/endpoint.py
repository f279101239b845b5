"""The entries of the route tables: what a path takes, and which function answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.body import Body
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.response import ResponseWriter

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """A POST endpoint: `answer(context, body, writer)` with a body of this type.

    choose: the endpoint that answers a body, by its fields, for a path of several APIs; `body` and `answer` are then those of the first.
    """

    path: str
    body: type[Body]
    answer: Callable[[RequestContext, Any, ResponseWriter], Awaitable[None]]
    summary: str
    choose: Callable[[Mapping[str, Any]], Endpoint] | None = None


@dataclass(frozen=True)
class Resource:
    """A GET (or DELETE) endpoint without a body."""

    path: str
    handler: Handler
    summary: str
    method: str = "GET"
