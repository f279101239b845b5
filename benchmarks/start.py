"""How long a start takes: whole processes, `python main.py --prompt hi --max-tokens N`, caches warm.

    python -m benchmarks.start [--model FOLDER] [--max-tokens 1,2] [--rounds 7]

The first run, which may compile kernels, is reported apart. `bare` is `python -c pass`: the interpreter's share.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import record, spread, table, take_turns
from benchmarks.latency import numbers
from benchmarks.roof import roof_figures

_MAIN = Path(__file__).parents[1] / "main.py"


def seconds_of(command: list[str]) -> float:
    """Wall seconds of one process that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="whole processes, warm")
    parser.add_argument("--model", help="a folder or GGUF file; the bundled one otherwise")
    parser.add_argument("--max-tokens", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    base = [sys.executable, str(_MAIN), "--prompt", "hi", "--temperature", "0", *model, "--max-tokens"]
    commands = {f"{n} tokens": [*base, str(n)] for n in options.max_tokens} | {"bare": [sys.executable, "-c", "pass"]}
    first = seconds_of(commands[f"{options.max_tokens[0]} tokens"])
    for command in commands.values():
        seconds_of(command)
    timed = take_turns({name: (lambda c=command: seconds_of(c)) for name, command in commands.items()}, options.rounds)  # type: ignore[misc]
    spreads = {name: spread(each) for name, each in timed.items()}
    rows: list[list[object]] = [["first", first, None, None], *([name, s.median, s.low, s.high] for name, s in spreads.items())]
    print(table(["seconds", "median", "low", "high"], rows))
    figures = {name: {"median": round(s.median, 3), "low": round(s.low, 3), "high": round(s.high, 3)} for name, s in spreads.items()}
    record("start", {"model": options.model and os.path.basename(options.model), "first": round(first, 3), "seconds": figures,
                     **roof_figures()}, spreads.values())  # fmt: skip


if __name__ == "__main__":
    main()
