"""How long a start takes: whole processes, `python main.py --prompt hi --max-tokens N`, with warm caches and on a fresh machine.

    python -m benchmarks.start [--model FOLDER] [--max-tokens 1,2] [--rounds 7]

`cold` is the first of the numbers of tokens with an empty cache folder: a machine that has never run this, but that Python has written its
files of bytecode. `bare` is `python -c pass`: the interpreter's share.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import record, spread, table, take_turns
from benchmarks.latency import numbers
from benchmarks.roof import roof_figures

_SET_CHILD_SUBREAPER = 36
_MAIN = Path(__file__).parents[1] / "main.py"


def seconds_of(command: list[str], **environment: str) -> float:
    """Wall seconds of one process that must succeed."""
    everything = os.environ | environment
    everything.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    subprocess.run(command, check=True, env=everything, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def cold_seconds_of(command: list[str]) -> float:
    """The same with an empty cache folder. A process ends before its compilers have: they end before the next one starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)  # whose children these become
    with TemporaryDirectory() as folder:
        seconds = seconds_of(command, TINYVLLM_CACHE=folder)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="whole processes")
    parser.add_argument("--model", help="a folder or GGUF file; the bundled one otherwise")
    parser.add_argument("--max-tokens", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    base = [sys.executable, str(_MAIN), "--prompt", "hi", "--temperature", "0", *model, "--max-tokens"]
    commands = {f"{n} tokens": [*base, str(n)] for n in options.max_tokens} | {"bare": [sys.executable, "-c", "pass"]}
    for command in commands.values():
        seconds_of(command)
        seconds_of(command)
    timers = {name: partial(seconds_of, command) for name, command in commands.items()}
    timers["cold"] = partial(cold_seconds_of, commands[f"{options.max_tokens[0]} tokens"])
    spreads = {name: spread(each) for name, each in take_turns(timers, options.rounds).items()}
    print(table(["seconds", "median", "low", "high"], [[name, s.median, s.low, s.high] for name, s in spreads.items()]))
    figures = {name: {"median": round(s.median, 3), "low": round(s.low, 3), "high": round(s.high, 3)} for name, s in spreads.items()}
    record("start", {"model": options.model and os.path.basename(options.model), "seconds": figures, **roof_figures()}, spreads.values())


if __name__ == "__main__":
    main()
