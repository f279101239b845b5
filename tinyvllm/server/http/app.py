"""The application: every path and who answers it. Knows no sockets; `listen` runs it, tests and batch files call it in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

import tinyvllm
from tinyvllm.server.api import anthropic, chat, chunks, completions, embeddings, probes, responses
from tinyvllm.server.api import utility as tokens
from tinyvllm.server.api.capabilities import capabilities, openapi
from tinyvllm.server.core.context import CALL, ServerConfig, Service
from tinyvllm.server.core.failures import Failure, encode, failure_of
from tinyvllm.server.core.keys import Keys
from tinyvllm.server.core.models import Models
from tinyvllm.server.core.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    TokenizeRequest,
)
from tinyvllm.server.http.middleware import Middleware
from tinyvllm.server.http.stream import Answer, Endpoint, log

PAGE = Path(__file__).parents[1] / "page"

ENDPOINTS = (
    Endpoint("/v1/completions", CompletionRequest, completions.answer, "Continue texts"),
    Endpoint("/v1/chat/completions", ChatRequest, chat.answer, "Answer a conversation"),
    Endpoint("/v1/responses", responses.ResponsesRequest, responses.answer, "Answer a conversation, in OpenAI's newer form"),
    Endpoint("/v1/messages", anthropic.MessagesRequest, anthropic.answer, "Answer a conversation, in Anthropic's form"),
    Endpoint("/v1/messages/count_tokens", anthropic.CountRequest, anthropic.count_tokens, "Count a conversation's tokens"),
    Endpoint("/v1/chunks", chunks.ChunkRequest, chunks.register, "Compute a piece of context once and hold it"),
    Endpoint("/v1/embeddings", EmbeddingRequest, embeddings.answer, "Texts to vectors"),
    Endpoint("/generate", GenerateRequest, tokens.generate, "Continue one prompt, with the fields of SamplingParams"),
    Endpoint("/tokenize", TokenizeRequest, tokens.tokenize, "A text or a conversation to token ids"),
    Endpoint("/detokenize", DetokenizeRequest, tokens.detokenize, "Token ids to a text"),
)


async def _capabilities(request: Request) -> Response:
    return probes.reply(capabilities(ENDPOINTS, request.scope[CALL].service.config.lenient))


_NAME = ({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},)
_Get = Callable[[Request], Awaitable[Response]]
_GETS: tuple[tuple[str, _Get, str], ...] = (
    ("/v1/models", probes.models, "The models that are served"),
    ("/v1/models/{name:path}", probes.model, "One model"),
    ("/v1/chunks", chunks.listed, "The chunks of this key, and what they hold"),
    ("/v1/chunks/{name}", chunks.one, "One chunk"),
    ("/v1/capabilities", _capabilities, "Which fields are honoured, limited or refused"),
    ("/tokenizer_info", tokens.tokenizer_info, "The tokenizer of the first model"),
    ("/health", probes.health, "Whether the engines are alive"),
    ("/ready", probes.ready, "Whether new work is taken"),
    ("/version", probes.version, "The version"),
    ("/status", probes.status, "How busy the engines are"),
    ("/metrics", probes.metrics, "Prometheus metrics"),
)


def create_app(config: ServerConfig, models: Models, keys: Keys | None = None) -> tuple[ASGIApp, Service]:
    """(the ASGI application with its lifespan, which loads and closes the models; what its requests share)."""
    service = Service(config, models, keys or Keys())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await models.start()
        yield
        await models.close()
        service.lines.close()

    app = FastAPI(title="tinyvllm", version=tinyvllm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for endpoint in ENDPOINTS:
        app.add_api_route(endpoint.path, _post(endpoint), methods=["POST"], **_described(endpoint.summary, endpoint.body.__name__))
    for path, answer, summary in _GETS:
        app.add_api_route(path, _get(answer), methods=["GET"], **_described(summary, parameters=_NAME if "{name" in path else ()))
        app.router.add_route(path, _get(answer), methods=["HEAD"], include_in_schema=False)  # what load balancers ask
    app.add_api_route("/v1/chunks/{name}", _get(chunks.release), methods=["DELETE"], **_described("Release a chunk", parameters=_NAME))
    if PAGE.is_dir():
        app.add_api_route("/", _file("index.html"), methods=["GET"], include_in_schema=False)
        app.add_api_route("/page/{name}", _file(None), methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _not_here)
    app.add_exception_handler(Failure, _failed)
    app.add_exception_handler(Exception, _unforeseen)
    app.openapi = lambda: openapi(app, ENDPOINTS)  # type: ignore[method-assign]
    guarded: ASGIApp = Middleware(app, service)
    if config.cors_origins:
        exposed = ["X-Request-Id", "X-Ignored-Fields", "Retry-After"]
        guarded = CORSMiddleware(guarded, config.cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
    return guarded, service


def _described(summary: str, body: str | None = None, parameters: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What the OpenAPI document says. Bodies are read by Answer, not by FastAPI, so their schema is named here."""
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    errors: dict[str, Any] = {status: {"description": "An error in OpenAI's shape, or Anthropic's"} for status in ("4XX", "5XX")}
    return {"summary": summary, "response_model": None, "openapi_extra": extra, "responses": errors}


def _post(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Answer(endpoint)

    answer.__name__ = endpoint.path.strip("/").replace("/", "_")
    return answer


def _get(answer: _Get) -> _Get:
    async def get(request: Request) -> Response:
        try:
            return await answer(request)
        except Exception as error:  # noqa: BLE001  the last door, as for every POST
            failure = failure_of(error)
            if failure.status == 500:
                log.error("%s: %s", request.url.path, failure.message, exc_info=error)
            return await _failed(request, failure)

    get.__name__ = answer.__name__
    return get


def _file(name: str | None) -> _Get:
    """A file of the chat page: the named one, or the one that the path names, if the folder holds exactly that."""

    async def page(request: Request) -> Response:
        wanted = name or request.path_params["name"]
        if wanted not in {path.name for path in PAGE.iterdir() if path.is_file()}:
            raise Failure(404, "there is no such file", code="not_found")
        return FileResponse(PAGE / wanted)

    return page


async def _not_here(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the API's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        text = f"{request.url.path} does not take {request.method}"
        failure = Failure(405, text, code="method_not_allowed", headers=dict(error.headers or {}))
    else:
        failure = Failure(error.status_code, f"there is nothing at {request.url.path[:200]!r}", code="not_found")
    return await _failed(request, failure)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """What broke outside of our own rooms, such as in making the OpenAPI document; it is raised again behind this, for the log."""
    return await _failed(request, failure_of(error))


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, Failure)
    call = request.scope[CALL]
    call.record["error"] = error.code
    body = error.body(call.anthropic, call.request_id)
    return Response(encode(body), error.status, error.headers, media_type="application/json")
