"""/v1/batches in OpenAI's form: an uploaded file of requests becomes files of answers, in the background. Batches end with the server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.server.core.batch_lines import Url
from tinyvllm.server.core.batch_runner import Batch
from tinyvllm.server.core.body import Body, honoured, limited, refused
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.limits import MAX_BATCHES
from tinyvllm.server.core.response import ResponseWriter, json_response
from tinyvllm.server.core.schema import Name, Texts


class BatchRequest(Body):
    """POST /v1/batches."""

    input_file_id: Name = honoured(..., example="file-1", says="id of a file of requests, as returned by POST /v1/files")
    endpoint: Url = honoured(..., example="/v1/chat/completions")
    completion_window: Literal["24h"] = limited(..., says="24h only", example="24h", beyond="1h")
    metadata: Annotated[Texts, Field(max_length=16)] | None = honoured(example={"a": "b"})
    output_expires_after: dict[str, object] | None = refused(
        "files are kept until they are deleted or the server ends", example={"seconds": 9}
    )


async def create(context: RequestContext, body: BatchRequest, writer: ResponseWriter) -> None:
    """Start a batch."""
    context.service.files.check_enabled()
    file = context.service.files.get(context.owner, body.input_file_id, "input_file_id")
    batch = context.service.batches.start(Batch(context.owner, body.endpoint, file, body.metadata))
    context.record |= {"batch": batch.id}
    await writer.json(batch.description())


async def list_batches(request: Request) -> Response:
    """The batches of this key, the newest first; ?limit= and ?after= select a page."""
    context = RequestContext.of(request)
    batches = [batch.description() for batch in reversed(context.service.batches.owned_by(context.owner))]
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_BATCHES:
        raise bad_field("limit", f"limit: must be an integer from 1 to {MAX_BATCHES}, got {limit!r:.40}")
    if after is not None:
        ids = [batch["id"] for batch in batches]
        batches = batches[ids.index(context.service.batches.get(context.owner, after).id) + 1 :]
    page = batches[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return json_response({"object": "list", "data": page, "has_more": len(page) < len(batches), **ends})


async def get_batch(request: Request) -> Response:
    context = RequestContext.of(request)
    return json_response(context.service.batches.get(context.owner, request.path_params["name"]).description())


async def cancel_batch(request: Request) -> Response:
    """Start no more lines of a batch."""
    context = RequestContext.of(request)
    return json_response(context.service.batches.cancel(context.owner, request.path_params["name"]).description())
