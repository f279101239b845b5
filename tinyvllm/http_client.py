"""What clients of OpenAI servers share: addresses, which answers may be retried, when, and the events of a stream within bounds."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tinyvllm.errors import ArgumentError, TinyvllmError

RETRY_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_EVENT, MAX_STREAM = 16 << 20, 1 << 30  # bytes of a line of a stream, and of a stream with its comments
MAX_SILENCE = 600.0  # seconds without an event, whatever comments come meanwhile


class Address(NamedTuple):
    """Where a server is. `root` is the path before /v1."""

    secure: bool
    host: str
    port: int | None
    root: str


def server_address(url: str, option: str) -> Address:
    """The address in a URL, which may end in /v1. ArgumentError, which names the option, for any other text."""
    try:
        parts = urlsplit(url)
        address = Address(parts.scheme == "https", parts.hostname or "", parts.port, parts.path.rstrip("/").removesuffix("/v1"))
    except ValueError as error:
        raise ArgumentError(f"{option}: {url}: {error}") from None
    sendable = address.root.isascii() and (address.host + address.root).isprintable() and " " not in address.host + address.root
    if parts.scheme not in ("http", "https") or not address.host or parts.query or parts.fragment or not sendable:
        raise ArgumentError(f"{option}: expected a URL such as http://localhost:8000, got {url!r}")
    return address


def authorization(api_key: str | None) -> dict[str, str]:
    """The header of an API key. ArgumentError for a key that a header cannot have."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ArgumentError("--api-key has characters that a header must not have")
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def retry_after(value: str | None, now: float | None = None) -> float | None:
    """The seconds of a Retry-After header, which is a number or a date; None for anything else."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now))
    except (TypeError, ValueError):
        return None


def json_events(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Generator[Mapping[str, Any], None, None]:
    """The JSON objects of server-sent events up to [DONE]. TinyvllmError for an error among them and for a stream beyond its limits,
    ConnectionError without [DONE]."""
    with contextlib.closing(connection), contextlib.closing(response):
        size, heard = 0, time.monotonic()
        while line := response.readline(MAX_EVENT + 1):
            size += len(line)
            if len(line) > MAX_EVENT:
                raise TinyvllmError(f"the server sent a line of more than {MAX_EVENT >> 20} MiB: is this an OpenAI server?")
            if size > MAX_STREAM:
                raise TinyvllmError(f"the server sent an answer of more than {MAX_STREAM >> 20} MiB: does it know max_tokens?")
            if not line.startswith(b"data:"):  # a comment, the name of an event, an empty line
                if time.monotonic() - heard > MAX_SILENCE:
                    raise TinyvllmError(f"the server sent no event within {MAX_SILENCE:g} seconds, only comments: is it overloaded?")
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise TinyvllmError(f"the server sent an event that is not JSON: {data[:80]!r}") from error
            if isinstance(event, dict) and event.get("error"):
                detail = event["error"]
                raise TinyvllmError(f"error of the server: {detail.get('message', detail) if isinstance(detail, dict) else detail}")
            if not isinstance(event, dict):
                raise TinyvllmError(f"the server sent an event that is not an object: {data[:80]!r}")
            yield event
            heard = time.monotonic()  # what the caller took does not count
        raise ConnectionError("the stream ended without [DONE]")


def reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
