"""A server of ours in a process of its own, for benchmarks and tests. `tinyvllm bench serve` measures its latency against load."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ready_url(stderr: Iterable[str]) -> str:
    """The URL of a server's ready line; other lines may come before. SystemExit with all of them if there is none."""
    lines = []
    for line in stderr:
        if line.startswith("ready: "):
            return line.split()[1]
        lines.append(line)
    raise SystemExit(f"the server did not start: {''.join(lines)}")


@contextlib.contextmanager
def own_server(options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(url, process id) of a server of ours on a free port."""
    command = [sys.executable, str(ROOT / "main.py"), "serve", "--port", "0", "--no-access-log", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        yield ready_url(process.stderr), process.pid
    finally:
        process.terminate()
        process.wait(60)
