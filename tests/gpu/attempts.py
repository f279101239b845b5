"""Tests that a broken device, or one that never answers, cuts short: another process goes on behind them. A plugin of pytest.

TESTS_DONE names a file with a line of JSON for each test that has begun, "never ended", and another when it has: test, outcome and the
first line of why it failed. Tests that are in it are left out. Without the variable nothing happens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

DONE = Path(os.environ["TESTS_DONE"]) if "TESTS_DONE" in os.environ else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lines = DONE.read_text().splitlines() if DONE is not None and DONE.exists() else []
    done = {json.loads(line)["test"] for line in lines}
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_setup(item: pytest.Item) -> None:
    _note(item.nodeid, "never ended", "it ended its process, or was cut off")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = next(iter(crash.message.splitlines()), "") if crash is not None else ""
        _note(report.nodeid, report.outcome, why[:200])


def _note(test: str, outcome: str, why: str) -> None:
    if DONE is not None:
        with open(DONE, "a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")
