"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM spells them. Only where the server was started with --allow-runtime-lora: they
read folders of this machine.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.server.core.body import Body, honoured, refused
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.response import ResponseWriter
from tinyvllm.server.core.schema import Name

Folder = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Name = honoured(..., example="sql", says="what requests send as `model`")
    lora_path: Folder = honoured(..., example="/adapters/sql", says="folder of the server's machine with adapter_config.json")
    model: Name | None = honoured(says="the model that the adapter is for; default: the first")
    load_inplace: bool | None = refused("unload the adapter, then load the other one", harmless=(False,))


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Name = honoured(..., example="sql")
    lora_int_id: int | None = refused("adapters are named", example=1)


async def load(context: RequestContext, body: LoadAdapterRequest, writer: ResponseWriter) -> None:
    """Load an adapter for the requests that follow."""
    _check_allowed(context)
    models = context.service.models
    if body.lora_name in (*models.names, *models.adapters):
        raise bad_field("lora_name", f"lora_name: {body.lora_name!r} is the name of a model or adapter; unload that first, or take another")
    async with models.use(body.model) as (_, llm):
        try:
            await llm.load_lora(body.lora_name, body.lora_path)
        except (ModelError, FormatError) as error:
            raise bad_field("lora_path", str(error)) from error
    await writer.json({"message": f"Success: LoRA adapter '{body.lora_name}' added successfully.", "lora_name": body.lora_name})


async def unload(context: RequestContext, body: UnloadAdapterRequest, writer: ResponseWriter) -> None:
    """Unload an adapter: no further request may use it; those that run do to their end."""
    _check_allowed(context)
    models = context.service.models
    if body.lora_name not in models.adapters:
        loaded = ", ".join(models.adapters) or "none"
        raise Failure(404, f"there is no adapter {body.lora_name!r:.200}; loaded: {loaded}", param="lora_name", code="model_not_found")
    async with models.use(body.lora_name) as (_, llm):
        await llm.unload_lora(body.lora_name)
    await writer.json({"message": f"Success: LoRA adapter '{body.lora_name}' removed successfully.", "lora_name": body.lora_name})


def _check_allowed(context: RequestContext) -> None:
    if not context.service.config.allow_runtime_lora:
        text = "adapters are loaded at the start only: start the server with --allow-runtime-lora"
        raise Failure(403, text, code="runtime_lora_not_allowed")
