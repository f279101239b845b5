"""The load of an engine in a header of the answer, in the Open Request Cost Aggregation (ORCA) form that load balancers read."""

from __future__ import annotations

import json

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import bad_field

_REQUESTED = b"endpoint-load-metrics-format"
_HEADER = "endpoint-load-metrics"


def report_load(context: RequestContext, llm: AsyncLLM) -> None:
    """Add the header if the request asks for it: vLLM's two figures, as the engine is now. Failure for other formats than TEXT and JSON."""
    form = context.header(_REQUESTED)
    if form is None:
        return
    status = llm.status()
    blocks = status["blocks"]
    figures = {"kv_cache_usage_perc": blocks["used"] / blocks["total"], "num_requests_waiting": float(status["waiting"])}
    if form == "TEXT":
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
    elif form == "JSON":
        text = json.dumps({"named_metrics": figures})
    else:
        name = _REQUESTED.decode()
        raise bad_field(name, f"header {name}: must be TEXT or JSON, got {form!r:.40}")
    context.headers[_HEADER] = f"{form} {text}"
