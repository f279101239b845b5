"""`serve --data-parallel-size 2`: one address for two engines, metrics of both, and an end when one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
ASK: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
COMMAND = ["main.py", "serve", "--port", "0", "--no-access-log", "--num-blocks", "64", "--no-warm-up", "--data-parallel-size", "2"]


def replica_of(pid: int) -> int:
    """The process of the second replica."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for path in children for child in path.read_text().split()]
    (replica,) = [child for child in found if b"replica_process" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return replica


def test_two_replicas_have_one_address() -> None:
    with subprocess.Popen([sys.executable, *COMMAND], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if line.startswith("ready: "))
            with httpx.Client(base_url=line.split()[1], timeout=120, trust_env=False) as client, ThreadPoolExecutor(8) as pool:
                bodies = [{**ASK, "prompt": f"{letter} story about"} for letter in "abcdefgh"]
                answers = list(pool.map(lambda body: client.post("/v1/completions", json=body), bodies))
                assert all(answer.status_code == 200 for answer in answers)
                metrics = client.get("/metrics").text.splitlines()
                tokens = [line for line in metrics if line.startswith("vllm:generation_tokens_total{")]
                assert ['engine="0"' in tokens[0], 'engine="1"' in tokens[1], len(tokens)] == [True, True, 2]
                assert sum(float(line.split()[-1]) for line in tokens) == 12 * 8 and all(float(line.split()[-1]) for line in tokens)
                assert len(client.get("/status").json()["models"]["tinyvllm"]["replicas"]) == 2
                os.kill(replica_of(process.pid), signal.SIGKILL)
                rest = process.stderr.read()
                assert process.wait(60) == 1
        finally:
            process.kill()
    last = rest.strip().splitlines()[-1]
    assert "the engine of model tinyvllm has ended: RankError: engine: replica 1 (process" in last and "ended with code -9" in last
