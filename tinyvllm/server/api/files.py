"""/v1/files in OpenAI's form: uploads for batches, and their outputs. Files are in memory and end with the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.file_store import StoredFile
from tinyvllm.server.core.limits import MAX_FILE, MAX_NAME
from tinyvllm.server.core.response import json_response

_FRAME = 64 * 1024  # bytes of a multipart body that are not the file
_FIELDS = ("file", "purpose")


async def upload(request: Request) -> Response:
    """Keep a file of requests, sent as multipart/form-data with `file` and `purpose`."""
    context = RequestContext.of(request)
    context.service.files.check_enabled()
    try:
        filename, purpose, data = await _read_form(request, context)
    finally:
        context.release_body()
    file = context.service.files.add(StoredFile(context.owner, filename, purpose, data))
    context.record |= {"file": file.id}
    return json_response(file.description())


async def _read_form(request: Request, context: RequestContext) -> tuple[str, str, bytes]:
    try:
        import python_multipart  # noqa: F401  starlette's parser needs it
    except ImportError:
        raise Failure(501, "uploads need the package python-multipart: pip install 'tinyvllm[server]'", code="not_installed") from None
    kind = (context.header(b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Failure(415, f"the content type must be multipart/form-data, got {kind[:80]!r}", code="unsupported_media_type")
    try:
        parser = MultiPartParser(request.headers, _bounded(request, context), max_files=1, max_fields=len(_FIELDS), max_part_size=MAX_NAME)
        async with asyncio.timeout(context.service.config.body_seconds):
            form = await parser.parse()
    except TimeoutError:
        raise Failure(408, f"the body was not complete after {context.service.config.body_seconds:g} s", code="timeout") from None
    except (MultiPartException, KeyError, ValueError) as error:
        text = error.message if isinstance(error, MultiPartException) else "malformed"
        raise Failure(400, f"the body is no multipart/form-data: {text:.200}", code="invalid_form") from None
    try:
        if unknown := next((name for name in form if name not in _FIELDS), None):
            raise bad_field(unknown[:MAX_NAME], f"{unknown!r:.80} is not a field of files; expected file and purpose", "unknown_parameter")
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise bad_field("file", "file: missing; send it as a file of multipart/form-data")
        if purpose != "batch":
            raise bad_field("purpose", f"purpose: must be 'batch', got {purpose!r:.80}")
        return (file.filename or "file")[:MAX_NAME], purpose, await file.read()
    finally:
        await form.close()


async def _bounded(request: Request, context: RequestContext) -> AsyncGenerator[bytes, None]:
    """The body in pieces; Failure 413 beyond MAX_FILE."""
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_FILE + _FRAME:
            text = f"the file is longer than the limit of {MAX_FILE} bytes; split it"
            raise Failure(413, text, code="request_too_large", headers={"Connection": "close"})
        context.hold_body(len(piece))
        yield piece


async def list_files(request: Request) -> Response:
    """The files of this key, the newest first; ?purpose= selects."""
    context, purpose = RequestContext.of(request), request.query_params.get("purpose")
    files = [file.description() for file in reversed(context.service.files.owned_by(context.owner)) if purpose in (None, file.purpose)]
    ends: dict[str, Any] = {"first_id": files[0]["id"] if files else None, "last_id": files[-1]["id"] if files else None}
    return json_response({"object": "list", "data": files, "has_more": False, **ends})


async def get_file(request: Request) -> Response:
    return json_response(_file(request).description())


async def file_content(request: Request) -> Response:
    """The bytes of a file."""
    return Response(_file(request).data, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Forget a file."""
    context = RequestContext.of(request)
    file = context.service.files.delete(context.owner, request.path_params["name"])
    return json_response({"id": file.id, "object": "file", "deleted": True})


def _file(request: Request) -> StoredFile:
    context = RequestContext.of(request)
    return context.service.files.get(context.owner, request.path_params["name"])
