"""Decode steps next to other processes: each processor has one that never waits, against an idle machine, in turn within one run.

    python -m benchmarks.busy --shape tinyllama-1.1b --batches 1,16

A fair system gives each of two processes half of a processor, so twice the time is what sharing takes. More is what meetings of threads
add: a thread that waits for one that another process has pushed aside waits for that process's slice.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.compare.child import prompt
from benchmarks.harness import ENOUGH, Round, one_round, record, spread, table
from benchmarks.latency import load_model, model_arguments, model_name, numbers
from tinyvllm.backends.cpu.threads import num_threads_wanted
from tinyvllm.engine.tools.stepping import Stepping

CONTEXT, LONGEST = 16, 1024
ROUND_SECONDS = 2.0  # many slices of the system's scheduler


class Neighbours:
    """A process for each processor that this one may use, stopped but within `running`."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "while True: pass"]
        self._processes = [subprocess.Popen(command) for _ in range(len(os.sched_getaffinity(0)))]
        self._signal(signal.SIGSTOP)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @contextmanager
    def running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


def measure(
    stepping: Stepping, neighbours: Neighbours, ranks: list[int], batch: int, rounds: int
) -> tuple[list[Round], list[Round], int]:  # fmt: skip
    """Rounds on an idle machine, rounds next to the neighbours, and the steps of each. `ranks` are the processes of the other ranks."""
    own = [*neighbours.pids, *ranks]
    stepping.begin_tuned([prompt(CONTEXT, number) for number in range(batch)], 2)
    most = (LONGEST - CONTEXT - 16) // (2 * rounds + 1)
    count = max(2, min(most, round(ROUND_SECONDS / (one_round(lambda: stepping.steps(4)).seconds / 4))))
    idle, busy = [], []
    for _ in range(rounds):
        idle.append(one_round(lambda: stepping.steps(count), own))
        with neighbours.running():
            busy.append(one_round(lambda: stepping.steps(count), own))
    return idle, busy, count


def main() -> None:
    parser = argparse.ArgumentParser(description="decode steps next to processes that keep every processor busy")
    model_arguments(parser)
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size")
    options = parser.parse_args()
    most = max(options.batches)
    llm = load_model(
        options, max_model_len=LONGEST, max_num_seqs=most, num_blocks=most * (LONGEST // 16 + 1), tensor_parallel_size=options.ranks
    )
    ranks = llm.engine.runner.ranks.pids if options.ranks > 1 else []
    stepping, neighbours, rows, figures, spreads = Stepping(llm), Neighbours(), list[list[object]](), list[dict[str, object]](), []
    try:
        for batch in options.batches:
            idle, busy, count = measure(stepping, neighbours, ranks, batch, max(ENOUGH, options.rounds))
            alone, shared = spread(idle).divided(count), spread(busy).divided(count)
            slower = shared.median / alone.median
            rows.append([f"decode {batch}", 1e3 * alone.median, 1e3 * shared.median, 1e3 * shared.low, 1e3 * shared.high, slower])
            figures.append({"batch": batch, "steps": count, "ms_idle": round(1e3 * alone.median, 3),
                            "ms_busy": round(1e3 * shared.median, 3), "slower": round(slower, 2)})  # fmt: skip
            spreads += [alone, shared]
    finally:
        neighbours.close()
    print(table(["", "ms idle", "ms busy", "low", "high", "slower"], rows))
    record("busy", {"model": model_name(options), "threads": num_threads_wanted(), "ranks": options.ranks, "runs": figures}, spreads)


if __name__ == "__main__":
    main()
