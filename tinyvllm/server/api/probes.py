"""GET endpoints for operators and dashboards: health, readiness, version, models, status, metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.metrics import NoMetrics, registry_of
from tinyvllm.server.core.context import RequestContext, Service
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.response import json_response
from tinyvllm.version import VERSION


def _service(request: Request) -> Service:
    return RequestContext.of(request).service


async def health(request: Request) -> Response:
    """200 while the process responds and no engine has died."""
    for name, llm in _service(request).models.loaded().items():
        if not llm.alive:
            raise Failure(503, f"the engine of model {name} has stopped", code="engine_dead")
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 while the server accepts new requests."""
    if (refusal := _service(request).refusal()) is not None:
        raise refusal
    await health(request)
    return json_response({"status": "ready"})


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def models(request: Request) -> Response:
    """The model list, for OpenAI's and Anthropic's clients."""
    models = _service(request).models
    entries = [_model(_service(request), name) for name in (*models.names, *models.adapters)]
    pages = {"has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
    return json_response({"object": "list", "data": entries, **pages})


async def model(request: Request) -> Response:
    name = request.path_params["name"]
    models = _service(request).models
    if name not in models.names and name not in models.adapters:
        raise Failure(404, f"there is no model {name!r:.200}", param="model", code="model_not_found")
    return json_response(_model(_service(request), name))


def _model(service: Service, name: str) -> dict[str, Any]:
    parent = service.models.adapters.get(name)
    llm = service.models.loaded().get(parent or name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "tinyvllm",
        "root": service.models.path(parent or name),
        "parent": parent,
        "max_model_len": None if llm is None else llm.max_model_len,
        "loaded": llm is not None,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z"),
    }


async def status(request: Request) -> Response:
    """The load of each loaded model; the chat page shows it."""
    service = _service(request)
    loaded = {name: {**llm.status(), "predicted_wait": llm.predicted_wait()} for name, llm in service.models.loaded().items()}
    return json_response({"models": loaded, "requests": len(service.running) - 1, "draining": service.draining})


async def load(request: Request) -> Response:
    """The number of requests that are running. Those that only read the state of the server do not count."""
    running = sum(context.scope["method"] == "POST" for context in _service(request).running)
    return json_response({"server_load": running})


async def metrics(request: Request) -> Response:
    """Prometheus text under vLLM's metric names."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    engines = [engine for llm in _service(request).models.loaded().values() for engine in await llm.all_metrics()]
    found = [engine for engine in engines if not isinstance(engine, NoMetrics)]
    return Response(generate_latest(registry_of(found)), media_type=CONTENT_TYPE_LATEST)
