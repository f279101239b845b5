"""schemathesis against every operation of the generated /openapi.json: no response is a 500, and every error has the API's shape.

    python -m tests.server.soak_schema --minutes 3

tests/server/test_schemathesis.py runs a few examples of each in the default suite.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.server.soak_client import serving

_MAX_TOKENS = 8  # of an answer: the test is about fields, not the model


def small(body: Any) -> Any:
    """The body with a short answer, and the name of the only model."""
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            del body["model"]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(value := body.get(name), int) and value > _MAX_TOKENS:
                body[name] = _MAX_TOKENS
        for name in ("n", "best_of"):
            if isinstance(value := body.get(name), int) and value > 4:
                body[name] = 4
        if not {"max_tokens", "max_completion_tokens", "max_output_tokens"} & set(body) and ("messages" in body or "input" in body):
            body["max_output_tokens" if "input" in body else "max_tokens"] = _MAX_TOKENS
    return body


def examine(url: str, seconds: float | None = None, examples: int = 20, random: bool = True) -> tuple[Counter[str], list[str]]:
    """(responses by operation and status, faults), with `examples` examples of each operation, or for about `seconds`.

    Without `random` the examples are the same every time.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    long = sum(operation.method.upper() == "POST" for operation in operations)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for operation in operations:
        share = seconds / long if seconds is not None and operation.method.upper() == "POST" else None
        _try(operation, seen, wrong, share, examples, random)
    return seen, wrong


def _try(operation: Any, seen: Counter[str], wrong: list[str], seconds: float | None, examples: int, random: bool) -> None:
    ends = None if seconds is None else time.monotonic() + seconds
    kinds = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)

    def one(case: Any) -> None:
        case.body = small(case.body)
        answer = case.call(timeout=60)
        seen[f"{operation.method.upper()} {operation.path} {answer.status_code}"] += 1
        if fault := fault_of(answer.status_code, answer.content):
            wrong.append(f"{operation.method.upper()} {operation.path}: {fault}: sent {case.body!r:.600}")

    for kind in kinds:
        label = f"{operation.label}: {kind.value}"
        try:
            strategy = operation.as_strategy(generation_mode=kind)
        except Exception as error:  # noqa: BLE001  an operation without parameters has no invalid examples
            seen[f"{label} not tried ({type(error).__name__})"] += 1
            continue
        while True:  # in portions, since hypothesis has no time limit
            portion = settings(
                max_examples=examples, derandomize=not random, deadline=None, database=None, phases=[Phase.generate], print_blob=False,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            try:
                portion(given(case=strategy)(one))()
            except Unsatisfiable:
                seen[f"{label} not tried (nothing of that kind)"] += 1
                break
            if ends is None or seconds is None or time.monotonic() > ends - (kind is kinds[0]) * seconds / 2:
                break


def fault_of(status: int, body: bytes) -> str | None:
    """The fault of a response, or None."""
    if status >= 500 and status != 503:
        return f"status {status}: {body[:400]!r}"
    if status < 400:
        return None
    try:
        error = json.loads(body)["error"]
        good = isinstance(error["message"], str) and isinstance(error["type"], str)
    except (ValueError, LookupError, TypeError):
        good = False
    return None if good else f"status {status} without the API's shape: {body[:400]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description="schemathesis over the OpenAPI document")
    parser.add_argument("--minutes", type=float, default=3.0)
    options = parser.parse_args()
    with serving("--max-num-seqs", "16", "--num-blocks", "512") as server:
        seen, wrong = examine(server.url, options.minutes * 60)
        complaints = server.complaints()
    for what, count in sorted(seen.items()):
        print(f"{count:6} {what}")
    for fault in list(dict.fromkeys(wrong))[:20]:
        print(f"FAULT {fault}")
    if complaints:
        print(f"FAULT the server wrote: {complaints[:3000]}")
    print(f"{sum(count for what, count in seen.items() if what[-3:].isdecimal())} requests, {len(wrong)} faults")
    return bool(wrong or complaints)


if __name__ == "__main__":
    sys.exit(main())
