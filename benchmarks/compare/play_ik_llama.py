"""ik_llama.cpp, by its own `llama-bench`, which IK_LLAMA_BENCH names; it has no Python binding.

Each turn is a process that loads the model, warms up and times one test, so that only what it has timed counts. It decodes without choosing
tokens, which the others do. `tune` chooses between the matrices as in the file and repacked at load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess

from benchmarks.compare.child import Unable, serve


class IkLlama:
    def __init__(self, options: argparse.Namespace):
        self.bench, self.options, self.repack = os.environ.get("IK_LLAMA_BENCH"), options, 0
        if self.bench is None:
            raise ImportError("IK_LLAMA_BENCH names no llama-bench of ik_llama.cpp")

    def tune(self, test: str, batch: int, tokens: int) -> str:
        times = {}
        for repack in (0, 1):
            self.repack = repack
            times[repack] = self.prefill(tokens) if test == "prefill" else self.steps(16)
        self.repack = min(times, key=lambda repack: times[repack])
        return f"rtr={self.repack}"

    def begin(self, batch: int, context: int) -> None:
        if batch > 1 or context > 16:
            raise Unable("llama-bench: one sequence from an empty context")

    def steps(self, count: int) -> float:
        return self._seconds("-p", "0", "-n", str(count))

    def prefill(self, tokens: int) -> float:
        return self._seconds("-p", str(tokens), "-n", "0")

    def _seconds(self, *test: str) -> float:
        o = self.options
        settings = ("-t", str(o.threads), "-ub", str(o.chunk), "-rtr", str(self.repack), "-r", "1", "-o", "json")
        done = subprocess.run([str(self.bench), "-m", o.model, *test, *settings], capture_output=True, text=True, check=True, timeout=300)
        return float(json.loads(done.stdout)[0]["avg_ns"]) / 1e9


if __name__ == "__main__":
    serve(IkLlama)
