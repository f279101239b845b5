"""Errors of the API: every exception becomes a status, a body and headers.

OpenAI's shape is {"error": {message, type, param, code}}; Anthropic's, for /v1/messages, {"type": "error", "error": {type, message}}.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tinyvllm.errors import ArgumentError, BusyError, ModelError, OutOfMemoryError, RequestError, TinyvllmError, TokenizerError
from tinyvllm.host_memory import is_out_of_memory

_MAX_RETRY_SECONDS = 24 * 3600.0
# by status: OpenAI's type, Anthropic's type
_TYPES: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
}


class Failure(Exception):
    """An error response. `param` is the field at fault (`tools[0].type`), `code` a machine-readable word.

    anthropic_message: for errors that Anthropic's clients recognize by their text, which is another than OpenAI's.
    details: further fields of the error object in OpenAI's shape, which may replace its type. anthropic_details: `details` of Anthropic's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        anthropic_message: str | None = None,
        details: Mapping[str, Any] | None = None,
        anthropic_details: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.anthropic_message = anthropic_message or message
        self.details = details or {}
        self.anthropic_details = anthropic_details or {}

    def body(self, anthropic: bool = False, request_id: str | None = None) -> dict[str, Any]:
        """The error object, in OpenAI's or Anthropic's shape."""
        openai_type, anthropic_type = _TYPES.get(self.status, _TYPES[400 if self.status < 500 else 500])
        if anthropic:
            error: dict[str, Any] = {"type": anthropic_type, "message": self.anthropic_message}
            if self.anthropic_details:
                error["details"] = dict(self.anthropic_details)
            return {"type": "error", "error": error, "request_id": request_id}
        return {"error": {"message": self.message, "type": openai_type, "param": self.param, "code": self.code, **self.details}}


def encode(body: Any) -> bytes:
    """JSON on one line, in ASCII: also lone surrogates that a client sent and gets back."""
    return json.dumps(body, separators=(",", ":")).encode()


def bad_field(param: str, message: str, code: str = "invalid_value") -> Failure:
    """400 for a field."""
    return Failure(400, message, param=param, code=code)


def busy(message: str, seconds: float, code: str = "rate_limit_exceeded") -> Failure:
    """429 with the time to wait before a retry; OpenAI's clients read the milliseconds, others the whole seconds."""
    seconds = max(0.0, min(seconds, _MAX_RETRY_SECONDS)) if math.isfinite(seconds) else _MAX_RETRY_SECONDS
    headers = {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(max(1, math.ceil(seconds * 1000)))}
    return Failure(429, message, code=code, headers=headers)


def failure_of(error: BaseException) -> Failure:
    """The error response for an exception. An unexpected one is a 500 that shows only its type: its text may hold other clients' data."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, BusyError):
        return busy(str(error), error.retry_after, "server_busy")
    if isinstance(error, (RequestError, ArgumentError, TokenizerError)):
        return Failure(400, str(error), param=_field_of(str(error)), code="invalid_value")
    if is_out_of_memory(error):
        text = str(error) if isinstance(error, OutOfMemoryError) else "out of memory; try again later, or send a shorter request"
        return Failure(503, text, code="out_of_memory")
    if isinstance(error, ModelError):
        return Failure(503, str(error), param="model", code="model_not_loaded")
    if isinstance(error, TinyvllmError):
        return Failure(500, str(error), code="engine_error")
    return Failure(500, f"internal server error ({type(error).__name__}); see the server log", code="internal_error")


def _field_of(message: str) -> str | None:
    """The field that an error message of SamplingParams or of the engine starts with."""
    match = re.match(r"(?:\w+Params: |request \S+: )?([a-z_]+)(?: must|=|: | names| has)", message)
    return match[1] if match else None
