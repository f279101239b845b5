"""The benchmark of memory: what a process takes, measured in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_several_requests_run_to_the_last_step() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--child", "--shape", "tiny160m", "--batch", "8"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    figures = json.loads(said.splitlines()[-1])
    assert figures["before"]["resident"] < figures["loaded"]["resident"] <= figures["ran"]["peak"]
    assert figures["ran"]["resident"] > figures["weights"] / 2 and figures["step"]["device_bytes_left"] == 0
