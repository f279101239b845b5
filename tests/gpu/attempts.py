"""A pytest plugin for test runs that a broken or hanging device ends: another process continues after the last test.

With TESTS_EACH, of each test only the first of its parameters runs. TESTS_DONE names a file with a JSON line for each test that has
started, with the outcome "never ended", and another when it has ended: test, outcome and the first line of the failure. Tests in the file
are skipped. Without the variables the plugin does nothing.
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
    if os.environ.get("TESTS_EACH"):
        items[:] = {item.nodeid.split("[")[0]: item for item in reversed(items)}.values()
        items.reverse()
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_setup(item: pytest.Item) -> None:
    _note(item.nodeid, "never ended", "it ended its process, or was interrupted")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = next(iter(crash.message.splitlines()), "") if crash is not None else ""
        _note(report.nodeid, report.outcome, why[:200])
        if DONE is not None and report.failed:  # at once: what pytest says at its end is lost if the process is cut off
            print(f"\nFAILED {report.nodeid}: {why[:200]}", flush=True)


def _note(test: str, outcome: str, why: str) -> None:
    if DONE is not None:
        with open(DONE, "a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")
