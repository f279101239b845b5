"""Files in OpenAI's batch format: their requests, and which of them an output answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyvllm.cli.lines import read_lines
from tinyvllm.errors import ArgumentError
from tinyvllm.server.core.batch_lines import Line, parse_line


def read_requests(path: str) -> Iterator[Line]:
    """The requests of a file, one after the other. FormatError or ArgumentError with the number of a line that is none."""
    for number, raw in read_lines(path):
        yield parse_line(f"{path}:{number}", raw)


def check_input(path: str) -> Mapping[str, int]:
    """The line numbers of a file by custom_id. Refuses a duplicate id and a file without requests, before anything is loaded."""
    numbers: dict[str, int] = {}
    for number, raw in read_lines(path):
        custom_id = parse_line(f"{path}:{number}", raw).custom_id
        if custom_id in numbers:
            raise ArgumentError(f"{path}:{number}: {path}:{numbers[custom_id]} has the custom_id {custom_id!r:.80} too: give each its own")
        numbers[custom_id] = number
    if not numbers:
        raise ArgumentError(f"{path} has no request")
    return numbers


def is_failed(record: Mapping[str, Any]) -> bool:
    """Whether a line of the output is the answer to a request that failed."""
    response = record.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    return not isinstance(status, int) or status >= 400


def custom_id_of(record: Mapping[str, Any]) -> str | None:
    """The custom_id of a line of the output; None if it is no such line."""
    custom_id = record.get("custom_id") if "response" in record else None
    return custom_id if isinstance(custom_id, str) else None
