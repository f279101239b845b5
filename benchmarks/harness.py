"""What every benchmark shares: a machine's description, medians, and one JSON line a result in benchmarks/results/."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """Processor, cores, system, Python and the commit measured."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), model)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS).stdout.strip()
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version(), "commit": commit}


def medians(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each function, taken in turn: what else the machine does falls on all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def record(name: str, figures: dict[str, object]) -> None:
    """Print a result and append it to results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    line = json.dumps({"date": time.strftime("%Y-%m-%d"), **machine(), **figures})
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(line + "\n")
    print(line)
