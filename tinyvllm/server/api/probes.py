"""What operators and dashboards ask: is it there, is it ready, which version, which models, how busy."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import tinyvllm
from tinyvllm.metrics import registry_of
from tinyvllm.server.core.context import CALL, Service
from tinyvllm.server.core.failures import Failure, encode


def reply(body: Any, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


def _service(request: Request) -> Service:
    service: Service = request.scope[CALL].service
    return service


async def health(request: Request) -> Response:
    """200 while the process can answer and no engine has died."""
    for name, llm in _service(request).models.loaded().items():
        if not llm.alive:
            raise Failure(503, f"the engine of model {name} has ended", code="engine_dead")
    return reply({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 while new work is taken."""
    if _service(request).draining:
        raise Failure(503, "the server shuts down", code="shutting_down")
    return reply({"status": "ready"})


async def version(request: Request) -> Response:
    return reply({"version": tinyvllm.__version__})


async def models(request: Request) -> Response:
    """The list as OpenAI's clients and as Anthropic's read it."""
    entries = [_model(_service(request), name) for name in _service(request).models.names]
    ends = {"has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
    return reply({"object": "list", "data": entries, **ends})


async def model(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _service(request).models.names:
        raise Failure(404, f"there is no model {name!r:.200}", param="model", code="model_not_found")
    return reply(_model(_service(request), name))


def _model(service: Service, name: str) -> dict[str, Any]:
    from datetime import UTC, datetime

    llm = service.models.loaded().get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "tinyvllm",
        "root": service.models.path(name),
        "parent": None,
        "max_model_len": None if llm is None else llm.max_model_len,
        "loaded": llm is not None,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z"),
    }


async def status(request: Request) -> Response:
    """How busy each loaded model is; the chat page shows it."""
    service = _service(request)
    found = {name: {**llm.status(), "predicted_wait": llm.predicted_wait()} for name, llm in service.models.loaded().items()}
    return reply({"models": found, "requests": len(service.running) - 1, "draining": service.draining})


async def metrics(request: Request) -> Response:
    """Prometheus' text, under vLLM's names."""
    registries = [llm.metrics for llm in _service(request).models.loaded().values() if llm.metrics.registry is not None]
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(registry_of(registries)), media_type=CONTENT_TYPE_LATEST)
