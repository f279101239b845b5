"""GET /v1/capabilities and the OpenAPI document, both generated from the bodies' fields and the loaded models, so that they match the
implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.api import AsyncLLM
from tinyvllm.server.core.body import Body
from tinyvllm.server.core.endpoint import Endpoint
from tinyvllm.version import VERSION


def fields_of(body: type[Body]) -> dict[str, dict[str, str]]:
    """The fields of a body: the support of each, and a note on it if there is one."""
    fields = {}
    for name, field in body.model_fields.items():
        marks = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        note = (field.description or "").removeprefix("Refused: ")
        fields[name] = {"support": str(marks.get("x-support", "honoured")), **({"note": note} if note else {})}
    return fields


def device_of(llm: AsyncLLM) -> dict[str, Any]:
    """What the device of a loaded model computes with as packed, and what the model has."""
    return {
        "device": llm.config.device_names,
        "packed": llm.packed_types,
        "weights": llm.weight_formats,
        "kv_cache_dtype": llm.config.kv_cache_dtype,
        "speculation": speculation_of(llm.config),
    }


def speculation_of(config: EngineConfig) -> dict[str, Any] | None:
    """How tokens are guessed ahead, and whether answers are those without that; None if they are not guessed. Paths are left out."""
    if (chosen := config.speculative_config) is None:
        return None
    number = chosen.num_speculative_tokens
    return {"method": chosen.method, "num_speculative_tokens": number, "controller": chosen.controls, "exact": chosen.policy == "exact"}


def capabilities(endpoints: Sequence[Endpoint], lenient: bool, loaded: Mapping[str, AsyncLLM]) -> dict[str, Any]:
    """The response of /v1/capabilities."""
    unknown = "ignored, and named in the header X-Ignored-Fields" if lenient else "refused with status 400, which names the field"
    by_path = {endpoint.path: fields_of(endpoint.body) for endpoint in endpoints}
    models = {name: device_of(llm) for name, llm in loaded.items()}
    return {"version": VERSION, "unknown_fields": unknown, "models": models, "endpoints": by_path}


def openapi(app: FastAPI, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document; generated once, on the first request for it."""
    if not app.openapi_schema:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = [(endpoint.body, "validation") for endpoint in endpoints]
        _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
