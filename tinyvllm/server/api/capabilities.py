"""GET /v1/capabilities and the OpenAPI document, both made from the bodies' fields, so that they cannot say what is not so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

import tinyvllm
from tinyvllm.server.core.body import Body
from tinyvllm.server.http.stream import Endpoint


def fields_of(body: type[Body]) -> dict[str, dict[str, Any]]:
    """Each field of a body: its support, what is to be said of it, and the JSON schema of its values."""
    properties = body.model_json_schema()["properties"]
    found = {}
    for name, field in body.model_fields.items():
        marks = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        says = (field.description or "").removeprefix("Refused: ")
        schema = {k: v for k, v in properties[name].items() if k not in ("title", "description") and not k.startswith("x-")}
        found[name] = {"support": marks.get("x-support", "honoured"), **({"note": says} if says else {}), "schema": schema}
    return found


def capabilities(endpoints: Sequence[Endpoint], lenient: bool) -> dict[str, Any]:
    """The whole answer."""
    listed = {
        e.path: {name: {k: v for k, v in about.items() if k != "schema"} for name, about in fields_of(e.body).items()} for e in endpoints
    }
    unknown = "left out and named in X-Ignored-Fields" if lenient else "refused by name with status 400"
    return {"version": tinyvllm.__version__, "unknown_fields": unknown, "endpoints": listed}


def openapi(app: FastAPI, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document; made once, it is asked for by machines that come back."""
    if not app.openapi_schema:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = [(endpoint.body, "validation") for endpoint in endpoints]
        _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
