"""The lines of OpenAI's batch files, for `main.py batch` and /v1/batches. Imports nothing of the server."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tinyvllm.errors import ArgumentError, FormatError, nearest
from tinyvllm.lazy_dataclass import dataclass

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
URLS: tuple[str, ...] = get_args(Url)
MAX_CUSTOM_ID = 512  # characters; the custom_ids of a file are held in memory
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """One request of the input, and its file and line."""

    source: str
    custom_id: str
    url: str
    body: Mapping[str, Any]


def parse_line(source: str, raw: bytes) -> Line:
    """The request of one line that `source` names. FormatError or ArgumentError if it is none."""
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise FormatError(f"{source}: expected a JSON object, got {raw.strip().decode(errors='replace')!r:.60}")
    for name in record:
        if name not in _FIELDS:
            raise ArgumentError(f"{source}: unknown field {name!r}{nearest(name, _FIELDS)}")
    if not isinstance(record.get("custom_id"), str) or not record["custom_id"]:
        raise ArgumentError(f"{source}: custom_id must be a text, got {record.get('custom_id')!r:.60}")
    if len(record["custom_id"]) > MAX_CUSTOM_ID:
        raise ArgumentError(f"{source}: custom_id must have at most {MAX_CUSTOM_ID} characters, got {len(record['custom_id'])}")
    if record.get("method") != "POST":
        raise ArgumentError(f"{source}: method must be POST, got {record.get('method')!r:.60}")
    if record.get("url") not in URLS:
        url = record.get("url")
        raise ArgumentError(f"{source}: url must be one of {', '.join(URLS)}, got {url!r:.80}{nearest(str(url), URLS)}")
    if not isinstance(record.get("body"), dict):
        raise ArgumentError(f"{source}: body must be an object, got {record.get('body')!r:.60}")
    if record["body"].get("stream"):
        raise ArgumentError(f"{source}: body.stream: a line of a file cannot be streamed: leave it out")
    return Line(source, record["custom_id"], record["url"], record["body"])


def answer_line(custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """A line of the output in OpenAI's format; a refused request is also a response, with its status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    record = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
