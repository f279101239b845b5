"""What `--profile` costs: decode steps with and without a trace in turn, within one process. The goal is less than 2%.

    python -m benchmarks.profile_cost [--model PATH | --shape tinyllama-1.1b] [--batches 1,8]
    TINYVLLM_THREADS=1 python -m benchmarks.profile_cost --processor-seconds       # where other processes run, too

The kinds take turns of GROUP steps each: a virtual machine's speed wanders by 10% within a second, which longer turns would measure.
`again` are steps without a trace, too: how far they are from the others is the noise. Of steps that were interrupted the usual length
counts. Time passes for all kinds, so what a trace does by time, its samples, counters and writes, is made as much rarer: else it would
come several times as often as in a run that is traced throughout. Without a trace there is nothing to measure: no observer is installed,
which tests/engine/tools/test_trace.py checks, as it does the number of calls in a step with one. Threads of a pool that wait for each
other spend processor seconds, too: one thread has none of that.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.compare.child import prompt
from benchmarks.harness import Round, Spread, one_round, record, spread, table
from benchmarks.latency import load_model, model_arguments, model_name, numbers
from tinyvllm.backends.cpu.threads import num_threads_wanted
from tinyvllm.engine.tools import trace as trace_module
from tinyvllm.engine.tools.stepping import Stepping
from tinyvllm.engine.tools.trace import StepTrace
from tinyvllm.engine.tools.trace_output import TraceFile
from tinyvllm.engine.tracing import start_trace, stop_trace

CONTEXT, LONGEST = 16, 1024  # tokens at the start of a round, and at its end at most
GROUP = 16  # steps of one kind in a row
KINDS = ("without", "with", "again")
INTERRUPTED = 6  # times the median: a step that took longer waited for another process, or the host's; a sampled one takes three


@dataclass
class Rounds:
    """Decodes of `batch` sequences, as many steps of each kind a round as fit a context."""

    stepping: Stepping
    batch: int
    trace: StepTrace
    clock: Callable[[], float]
    groups = (LONGEST - CONTEXT) // GROUP // len(KINDS) - 1

    def run(self) -> dict[str, Round]:
        """One round: seconds of the steps of each kind."""
        steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        whole = one_round(lambda: self._run(steps))
        usual = median(steps["without"])
        seconds = {kind: sum(step if step < INTERRUPTED * usual else usual for step in each) for kind, each in steps.items()}
        return {kind: Round(each, whole.others) for kind, each in seconds.items()}

    def _run(self, steps: dict[str, list[float]]) -> None:
        self.stepping.begin_tuned([prompt(CONTEXT, number) for number in range(self.batch)], 2)
        for _ in range(self.groups):
            for kind in random.sample(KINDS, len(KINDS)):
                if kind == "with":
                    self._resume()
                steps[kind] += self._group()
                if kind == "with":
                    self._pause()

    def _group(self) -> list[float]:
        ends = [self.clock()]
        for _ in range(GROUP):
            self.stepping.steps(1)
            ends.append(self.clock())
        return [end - start for start, end in zip(ends, ends[1:], strict=False)]

    def _resume(self) -> None:
        engine = self.stepping.engine
        engine.observer.add(self.trace)
        engine.observer.marks = engine.stages.marks = self.trace.marks

    def _pause(self) -> None:
        engine = self.stepping.engine
        engine.observer.remove(self.trace)
        engine.observer.marks = engine.stages.marks = None


def measure(stepping: Stepping, batch: int, path: Path, clock: Callable[[], float], rounds: int) -> dict[str, list[Round]]:
    """Some rounds; one before them does not count. Neither does the trace's start, which reads the roof, nor its end."""
    trace = start_trace(stepping.engine, TraceFile(str(path)))
    turns = Rounds(stepping, batch, trace, clock)
    turns._pause()
    turns.run()
    done = [turns.run() for _ in range(rounds)]
    turns._resume()
    stop_trace(stepping.engine, trace)
    return {kind: [one[kind] for one in done] for kind in KINDS}


def as_rare_as_in_one_run() -> None:
    """Of the time that passes, one kind of steps has its share."""
    trace_module.SHORT_STEP *= len(KINDS)
    trace_module.SAMPLE_SHARE /= len(KINDS)
    trace_module.COUNTER_SECONDS *= len(KINDS)
    trace_module.FLUSH_SECONDS *= len(KINDS)


def ratio(timed: dict[str, list[Round]], name: str) -> float:
    """The median over the rounds, less 1."""
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
    as_rare_as_in_one_run()
    stepping, rows, figures = Stepping(llm), list[list[object]](), list[dict[str, object]]()
    spreads: list[Spread] = []
    with TemporaryDirectory() as folder:
        for batch in options.batches:
            timed = measure(stepping, batch, Path(folder) / "trace.json", clock, options.rounds)
            count = Rounds.groups * GROUP
            each = {name: spread(some).divided(count) for name, some in timed.items()}
            cost, noise = ratio(timed, "with"), ratio(timed, "again")
            steps = (1e6 * each["without"].median, 1e6 * each["with"].median)
            rows.append([f"decode {batch}", count, *steps, f"{cost:+.2%}", f"{noise:+.2%}"])
            figures.append({"batch": batch, "steps": count, "cost": round(cost, 4), "noise": round(noise, 4),
                            "us_without": round(steps[0], 1), "us_with": round(steps[1], 1)})  # fmt: skip
            spreads += each.values()
    print(table(["", "steps", "us without", "us with", "cost", "noise"], rows))
    known = {"model": model_name(options), "clock": clock.__name__, "threads": num_threads_wanted()}
    record("profile_cost", known | {"runs": figures}, () if options.processor_seconds else spreads)


if __name__ == "__main__":
    main()
