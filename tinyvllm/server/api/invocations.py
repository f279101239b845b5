"""POST /invocations: one path for all APIs, as Amazon SageMaker calls its containers. The fields of the body say which API is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyvllm.server.core.endpoint import Endpoint
from tinyvllm.server.core.failures import Failure

PATH = "/invocations"
# the path that answers a body which has the field; the first field in this order counts
_BY_FIELD = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "queries": "/score",
    "text_1": "/score",
    "data_1": "/score",
    "query": "/rerank",
}


def invocations(endpoints: Sequence[Endpoint]) -> Endpoint:
    """The endpoint that passes bodies on to those of these endpoints that /invocations serves."""
    by_path = {endpoint.path: endpoint for endpoint in endpoints}

    def choose(data: Mapping[str, Any]) -> Endpoint:
        path = next((path for field, path in _BY_FIELD.items() if field in data), None)
        if path is None:
            text = f"{PATH}: the body must have one of the fields {', '.join(_BY_FIELD)}, which tell its API"
            raise Failure(400, text, code="missing_required_parameter")
        return by_path[path]

    first = by_path[_BY_FIELD["messages"]]
    return Endpoint(PATH, first.body, first.answer, "Any of the APIs, chosen by the fields of the body", choose)
