"""GET /debug/trace: the next steps of an engine as a trace for Perfetto. Only where the server was started with --allow-trace."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.limits import MAX_TRACE_SECONDS, MAX_TRACE_STEPS

DEFAULT_STEPS = 20


async def trace(request: Request) -> Response:
    """The trace of the next `steps` steps of `model`, or of as many as run within MAX_TRACE_SECONDS."""
    context = RequestContext.of(request)
    if not context.service.config.allow_trace:
        raise Failure(403, "/debug/trace is off: start the server with --allow-trace", code="trace_not_allowed")
    steps = _steps(request.query_params.get("steps", str(DEFAULT_STEPS)))
    async with context.service.models.use(request.query_params.get("model")) as (_, llm):
        text = await llm.trace(steps, MAX_TRACE_SECONDS)
    return Response(text, media_type="application/json", headers={"Content-Disposition": 'attachment; filename="trace.json"'})


def _steps(text: str) -> int:
    steps = int(text) if text.isascii() and text.isdecimal() and len(text) <= 6 else 0
    if not 1 <= steps <= MAX_TRACE_STEPS:
        raise bad_field("steps", f"steps must be a whole number from 1 to {MAX_TRACE_STEPS}, got {text[:20]!r}")
    return steps
