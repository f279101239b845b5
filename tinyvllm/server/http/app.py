"""The ASGI application: mounts the routes of all APIs. Opens no sockets; `listen.py` serves it, tests and batch files call it directly."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from tinyvllm.server.api.capabilities import openapi
from tinyvllm.server.api.routes import ENDPOINTS, INVOCATIONS, RESOURCES
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.context import RequestContext, Service
from tinyvllm.server.core.endpoint import Endpoint, Handler
from tinyvllm.server.core.failures import Failure, encode, failure_of
from tinyvllm.server.core.keys import Keys
from tinyvllm.server.core.models import Models
from tinyvllm.server.http.handler import PostHandler, log
from tinyvllm.server.http.log_writer import LogWriter
from tinyvllm.server.http.middleware import Middleware
from tinyvllm.server.http.origins import LOCAL_ORIGINS
from tinyvllm.server.http.paths import Paths
from tinyvllm.version import VERSION

PAGE = Path(__file__).parents[1] / "page"
_NAME_PARAMETER = ({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},)
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_EXPOSED_HEADERS = ["X-Request-Id", "X-Ignored-Fields", "Retry-After"]


def create_app(config: ServerConfig, models: Models, keys: Keys | None = None) -> tuple[ASGIApp, Service]:
    """(the ASGI application, whose lifespan loads and closes the models; the state that its requests share)."""
    service = Service(config, models, keys or Keys())
    access_log = LogWriter(sys.stdout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await models.start()
        yield
        await models.close()
        access_log.close()

    app = FastAPI(title="tinyvllm", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    _mount_routes(app)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(Failure, _on_failure)
    app.add_exception_handler(Exception, _on_unexpected)
    app.openapi = lambda: {**openapi(app, ENDPOINTS), "servers": [{"url": config.root_path or "/"}]}  # type: ignore[method-assign]
    paths = Paths((route.path for route in (*ENDPOINTS, INVOCATIONS, *RESOURCES)), config.root_path)
    service.batches.app = service.background.app = guarded = Middleware(app, service, access_log, paths)
    with_cors = CORSMiddleware(
        guarded,
        config.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_origin_regex=LOCAL_ORIGINS,
        expose_headers=_EXPOSED_HEADERS,
    )
    return with_cors, service


def _mount_routes(app: FastAPI) -> None:
    for endpoint in (*ENDPOINTS, INVOCATIONS):
        described = _description(endpoint.summary, endpoint.body.__name__)
        app.add_api_route(endpoint.path, _post_route(endpoint), methods=["POST"], **described)
    for resource in RESOURCES:
        route = _resource_route(resource.handler)
        described = _description(resource.summary, parameters=_NAME_PARAMETER if "{name" in resource.path else ())
        app.add_api_route(resource.path, route, methods=[resource.method], **described)
        if resource.method == "GET":  # load balancers send HEAD
            app.router.add_route(resource.path, route, methods=["HEAD"], include_in_schema=False)
    if PAGE.is_dir():
        app.add_api_route("/", _page_route("index.html"), methods=["GET"], include_in_schema=False)
        app.add_api_route("/page/{name}", _page_route(None), methods=["GET"], include_in_schema=False)
    app.add_api_route("/favicon.ico", _no_icon, methods=["GET", "HEAD"], include_in_schema=False)


def _description(summary: str, body: str | None = None, parameters: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The OpenAPI entry of a route. PostHandler reads bodies, not FastAPI, so the schema is referenced here."""
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    errors: dict[str, Any] = {status: {"description": "An error in OpenAI's or Anthropic's shape"} for status in ("4XX", "5XX")}
    return {"summary": summary, "response_model": None, "openapi_extra": extra, "responses": errors}


def _post_route(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return PostHandler(endpoint)

    route.__name__ = endpoint.path.strip("/").replace("/", "_")
    return route


def _resource_route(handler: Handler) -> Handler:
    async def route(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001  every client gets an error in the shape of its API
            failure = failure_of(error)
            if failure.status == 500:
                log.error("%s: %s", request.url.path, failure.message, exc_info=error)
            return await _on_failure(request, failure)

    route.__name__ = handler.__name__
    return route


def _page_route(name: str | None) -> Handler:
    """A route to a file of the chat page: the file `name`, or the one that the path names if the folder contains it."""

    async def page(request: Request) -> Response:
        file_name = name or request.path_params["name"]
        if file_name not in {path.name for path in PAGE.iterdir() if path.is_file()}:
            raise Failure(404, "there is no such file", code="not_found")
        return FileResponse(PAGE / file_name, headers=_PAGE_HEADERS)

    return page


async def _no_icon(request: Request) -> Response:
    """Browsers ask for an icon next to any path that they open, and write a 404 into the console of the page that is open by then."""
    return Response(status_code=204, headers={"Cache-Control": "max-age=86400"})


async def _on_routing_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the shape of the API."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        text = f"{request.url.path} does not accept {request.method}"
        failure = Failure(405, text, code="method_not_allowed", headers=dict(error.headers or {}))
    else:
        failure = Failure(error.status_code, f"there is no path {request.url.path[:200]!r}", code="not_found")
    return await _on_failure(request, failure)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Errors outside our handlers, such as while the OpenAPI document is generated; starlette raises them again for the log."""
    return await _on_failure(request, failure_of(error))


async def _on_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, Failure)
    context = RequestContext.of(request)
    context.record["error"] = error.code
    body = error.body(context.anthropic, context.request_id)
    return Response(encode(body), error.status, error.headers, media_type="application/json")
