"""One model in several processes against one process with as many threads, in turn; and what the ranks' sums take by themselves.

    python -m benchmarks.parallel --shape tinyllama-1.1b --ways tensor,pipeline,context --ranks 2
    python -m benchmarks.parallel --device CUDA --shape llama-3.1-8b --ways tensor,host,pipeline,context   # on several GPUs

A contestant is an engine in a process of its own (benchmarks.compare.play_tinyvllm), whose ranks share the machine's threads. `decode` is
one sequence, `batch` are eight, `prefill` is a prompt of 512 tokens. `all_reduce` is the kernel by itself for one row of 2,048 numbers,
bias and residual: two ranks of one thread, which meet for every call, so that none waits for another's products.

On GPUs the one process has one GPU, and `host` are tensor-parallel ranks that meet in the host's memory; `all_reduce` is of the CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.compare.contest import READING, Contestant, contest, start, steps_of_a_round
from benchmarks.harness import Spread, record, spread, table, take_turns
from benchmarks.kernels import Team, compiled, floats, ints
from benchmarks.roof import read_size, threads_of_machine
from benchmarks.shapes import SHAPES, checkpoint
from tinyvllm.backends.cpu.threads import TEAM_BYTES
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.registry import usable_variants
from tinyvllm.distributed.memory import HEADER
from tinyvllm.placement import Placement
from tinyvllm.weights.mapping import allocate

OPTIONS = {"tensor": "tensor_parallel_size", "pipeline": "pipeline_parallel_size", "context": "context_parallel_size"}
OPTIONS["host"] = OPTIONS["tensor"]
ALONE = "one process"
TESTS = {"decode": 1, "batch": 8, "prefill": 1}  # sequences
CALLS = 20_000  # of all_reduce in a round
NUMBERS = 2048
ROUND_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="one model in several processes against one")
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--format", default="BF16", help="BF16 or a GGUF format")
    parser.add_argument("--device", choices=("CPU", "CUDA"), default="CPU")
    parser.add_argument("--ways", help="default tensor,pipeline,context; on CUDA tensor,host,pipeline,context")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--context", type=int, default=16, help="tokens of the sequences that decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept; a temporary folder otherwise")
    options = parser.parse_args()
    options.ways = options.ways or ("tensor,pipeline,context" if options.device == "CPU" else "tensor,host,pipeline,context")
    if options.device == "CPU":
        all_reduce(options.rounds)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contestants = []
        for way in (None, *options.ways.split(",")):
            contestants.append(load(options, way, folder, logs))
            stack.callback(contestants[-1].close)
        for test in TESTS:
            one_test(options, test, contestants)


def all_reduce(rounds: int) -> None:
    """Prints and records the seconds of one call where both ranks are always there."""
    shared = allocate(HEADER + 4 * 2 * 2 * NUMBERS)
    shared[:] = 0
    ranks = [Rank(number, shared) for number in range(2)]

    def run() -> None:
        threads = [threading.Thread(target=rank.run) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run()
    timed = spread(take_turns({"": run}, rounds)[""]).divided(CALLS)
    figures = [1e6 * seconds for seconds in (timed.median, timed.low, timed.high)]
    print(f"all_reduce of {NUMBERS} float32, 2 ranks of a thread: {figures[0]:.2f} us ({figures[1]:.2f} to {figures[2]:.2f})")
    record("all_reduce", {"numbers": NUMBERS, "ranks": 2, "us": [round(figure, 3) for figure in figures]}, [timed])


class Rank:
    """Calls the kernel of one rank many times, on the thread that calls `run`."""

    def __init__(self, number: int, shared: np.ndarray):
        defines = (("O", NUMBERS), ("WORLD", 2), ("RANK", number), ("PLACE", NUMBERS), ("BIAS", 1), ("RESIDUAL", 1))
        kernel = Kernel("all_reduce", "cpu", usable_variants(Placement("CPU"))[0], defines, 2, 4)
        row = (1, NUMBERS)
        self._arrays = [floats(*row), shared, floats(*row), floats(NUMBERS), floats(*row), ints(1)]
        self._list = np.array([array.ctypes.data for array in self._arrays], np.int64)
        self._repeat = compiled(kernel).repeat
        self._repeat.restype = None

    def run(self) -> None:
        pool = allocate(TEAM_BYTES)
        team = Team(0, 1, pool.ctypes.data)
        self._repeat(ctypes.c_void_p(self._list.ctypes.data), 1, CALLS, ctypes.byref(team))


def load(options: argparse.Namespace, way: str | None, folder: Path, logs: Path) -> Contestant:
    """One process (None), or as many ranks as the options say."""
    if way is not None and way not in OPTIONS:
        raise SystemExit(f"parallel: there is no way {way!r}; there are {', '.join(OPTIONS)}")
    model = checkpoint(options.shape, "folder" if options.format == "BF16" else options.format, folder)
    length = max(1024, options.prompt + 512, options.context + 1024)
    limits = {"threads": threads_of_machine(), "batch": max(TESTS.values()), "length": length, "chunk": 512}
    engine = {"device": options.device} | ({} if way is None else {OPTIONS[way]: options.ranks})
    switches = {"TINYVLLM_PEER_ACCESS": "0"} if way == "host" else {}
    one = start(way or ALONE, "play_tinyvllm", sys.executable, model, limits, logs / f"{way}.log", engine, switches)
    print(f"{one.name}: {one.missing or f'loaded in {one.load_seconds:.1f} s'}", file=sys.stderr)
    return one


def one_test(options: argparse.Namespace, test: str, contestants: list[Contestant]) -> None:
    batch = TESTS[test]
    if test == "prefill":
        units = {one.name: options.prompt for one in contestants}
        spreads = contest(contestants, test, None, {name: ("prefill", options.prompt) for name in units}, 2, options.rounds)
    else:
        begin = ("begin", batch, options.context)
        counts = steps_of_a_round(contestants, test, begin, ROUND_SECONDS, 900 // (3 * options.rounds + 3))
        units = {name: batch * count for name, count in counts.items()}
        spreads = contest(contestants, test, begin, {name: ("steps", count) for name, count in counts.items()}, 1, options.rounds)
    report(options, test, contestants, spreads, units)


def report(
    options: argparse.Namespace, test: str, contestants: list[Contestant], spreads: dict[str, Spread], units: dict[str, int]
) -> None:
    bandwidth = spreads.pop(READING).rate(read_size())
    rates = {name: each.figures(units[name]) for name, each in spreads.items()}
    alone = rates.get(ALONE, {}).get("rate")
    rows: list[list[object]] = []
    for one in contestants:
        if one.name in rates:
            rate = rates[one.name]
            rows.append([one.name, rate["rate"], rate["low"], rate["high"], rate["rate"] / alone if alone else None])
        else:
            rows.append([one.name, None, None, None, one.missing or one.notes.get(test, "")])
    print(f"\n{options.shape} {options.format} {test}, {options.ranks} ranks, {bandwidth / 1e9:.1f} GB/s")
    print(table(["", "tok/s", "low", "high", "of one process"], rows), flush=True)
    record("parallel", {
        "shape": options.shape, "format": options.format, "device": options.device, "test": test, "ranks": options.ranks,
        "sequences": TESTS[test], "context": options.context, "prompt": options.prompt if test == "prefill" else None,
        "read_GBps": round(bandwidth / 1e9, 1),
        "tok_s": rates, "of_one": {name: round(rate["rate"] / alone, 3) for name, rate in rates.items()} if alone else {},
        "missing": {one.name: one.missing or one.notes[test] for one in contestants if one.missing or test in one.notes},
    }, spreads.values())  # fmt: skip


if __name__ == "__main__":
    main()
