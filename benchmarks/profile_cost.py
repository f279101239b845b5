"""What `--profile` costs: decode steps with and without a trace in turn, within one process. The goal is less than 2%.

    python -m benchmarks.profile_cost [--model PATH | --shape tinyllama-1.1b] [--batches 1,8]
    TINYVLLM_THREADS=1 python -m benchmarks.profile_cost --processor-seconds       # where other processes run, too

A round is a multiple of the steps between two samples of kernels, so that it has its share of them, and of the writes to the file. `again`
are rounds without a trace, too: how far they are from the others is the noise of the machine; of steps that were interrupted the usual
length counts. Without a trace there is nothing to measure:
no observer is installed, which tests/engine/tools/test_trace.py checks, as it does the number of calls in a step with one. Threads of a
pool that wait for each other spend processor seconds, too: one thread has none of that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.compare.child import prompt
from benchmarks.harness import Round, Spread, record, spread, table, take_turns
from benchmarks.latency import ROUND_SECONDS, load_model, model_arguments, model_name, numbers
from tinyvllm.backends.cpu.threads import num_threads_wanted
from tinyvllm.engine.tools.stepping import Stepping
from tinyvllm.engine.tools.trace import SAMPLE_EVERY, SAMPLE_EVERY_GPU
from tinyvllm.engine.tools.trace_output import TraceFile
from tinyvllm.engine.tracing import start_trace, stop_trace

CONTEXT, LONGEST = 16, 1024  # tokens at the start of a round, and at its end at most
INTERRUPTED = 6  # times the median: a step that took longer waited for another process, or the host's; a sampled one takes three


@dataclass
class Rounds:
    """Decodes of `batch` sequences, `count` steps a round, each from the same contexts."""

    stepping: Stepping
    batch: int
    path: Path
    count: int
    clock: Callable[[], float]

    def without(self) -> float:
        self.begin()
        return self._steps()

    def traced(self) -> float:
        """With what the trace writes at its end, as events wait for up to a second; without its start, which reads the roof."""
        self.begin()
        trace = start_trace(self.stepping.engine, TraceFile(str(self.path)))
        steps, start = self._steps(), self.clock()
        stop_trace(self.stepping.engine, trace)
        return steps + self.clock() - start

    def _steps(self) -> float:
        """Seconds of `count` steps, those of interrupted ones taken as the median's."""
        ends = [self.clock()]
        for _ in range(self.count):
            self.stepping.steps(1)
            ends.append(self.clock())
        steps = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        usual = median(steps)
        return sum(step if step < INTERRUPTED * usual else usual for step in steps)

    def begin(self) -> None:
        self.stepping.begin_tuned([prompt(CONTEXT, number) for number in range(self.batch)], 2)


def rounds_of(stepping: Stepping, batch: int, path: Path, clock: Callable[[], float]) -> Rounds:
    """Rounds of about ROUND_SECONDS; both kinds have run once."""
    every = SAMPLE_EVERY_GPU if stepping.engine.runner.overlaps else SAMPLE_EVERY
    rounds = Rounds(stepping, batch, path, every, clock)
    rounds.traced()
    count = round(ROUND_SECONDS / rounds.without())
    rounds.count = every * max(1, min(count, (LONGEST - CONTEXT) // every - 1))
    return rounds


def ratio(timed: dict[str, list[Round]], name: str) -> float:
    """The median over the pairs of rounds, less 1."""
    return median(b.seconds / a.seconds for a, b in zip(timed["without"], timed[name], strict=True)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of a trace, in seconds of a step")
    model_arguments(parser)
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--processor-seconds", action="store_true", help="of this process, instead of those on the clock")
    options = parser.parse_args()
    clock = time.process_time if options.processor_seconds else time.perf_counter
    most = max(options.batches)
    llm = load_model(options, max_model_len=LONGEST, max_num_seqs=most, num_blocks=most * (LONGEST // 16 + 1))
    stepping, rows, figures = Stepping(llm), list[list[object]](), list[dict[str, object]]()
    spreads: list[Spread] = []
    with TemporaryDirectory() as folder:
        for batch in options.batches:
            rounds = rounds_of(stepping, batch, Path(folder) / "trace.json", clock)
            timed = take_turns({"without": rounds.without, "with": rounds.traced, "again": rounds.without}, options.rounds)
            each = {name: spread(some).divided(rounds.count) for name, some in timed.items()}
            cost, noise = ratio(timed, "with"), ratio(timed, "again")
            steps = (1e6 * each["without"].median, 1e6 * each["with"].median)
            rows.append([f"decode {batch}", rounds.count, *steps, f"{cost:+.2%}", f"{noise:+.2%}"])
            figures.append({"batch": batch, "steps": rounds.count, "cost": round(cost, 4), "noise": round(noise, 4),
                            "us_without": round(steps[0], 1), "us_with": round(steps[1], 1)})  # fmt: skip
            spreads += each.values()
    print(table(["", "steps", "us without", "us with", "cost", "noise"], rows))
    known = {"model": model_name(options), "clock": clock.__name__, "threads": num_threads_wanted()}
    record("profile_cost", known | {"runs": figures}, () if options.processor_seconds else spreads)


if __name__ == "__main__":
    main()
