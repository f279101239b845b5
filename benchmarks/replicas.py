"""Replicas of one engine (`--data-parallel-size`) against one engine with all cores, through their servers, in turn.

    python -m benchmarks.replicas --shape tiny160m --replicas 2 --clients 1,16,64

All clients send one request at once and stream its answer. On a CPU the replicas share the cores: what is measured is what the division
costs or gains where no core is added. `short` is one client whose answers have one token, in requests.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import record, spread, table, take_turns
from benchmarks.own_server import own_server
from benchmarks.server_overhead import body, flags, options_of, prompts, write_model
from benchmarks.shapes import SHAPES
from tinyvllm.bench_serve.client import Client

ONE = "one engine"
SHORT = 40  # requests, one after the other


def main() -> None:
    parser = argparse.ArgumentParser(description="replicas of an engine against one with all cores")
    parser.add_argument("--shape", choices=SHAPES, default="tiny160m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clients = [int(word) for word in options.clients.split(",")]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model = ["--model", str(write_model(options.shape, Path(folder))), *flags(options_of(options, max(clients)))]
        runner = stack.enter_context(asyncio.Runner())
        servers = {
            name: stack.enter_context(own_server([*model, "--data-parallel-size", str(count)]))
            for name, count in {ONE: 1, f"{options.replicas} replicas": options.replicas}.items()
        }
        calls = {name: Client(url) for name, (url, _) in servers.items()}
        seeds = iter(range(10**9))

        def together(client: Client, count: int) -> Callable[[], None]:
            async def run() -> None:
                work = prompts(count, options.prompt, next(seeds))
                streams = await asyncio.gather(*(client.post("/v1/completions", body(ids, options.answer)) for ids in work))
                wrong = [stream.error for stream in streams if stream.error]
                assert not wrong, wrong[0]

            return lambda: runner.run(run())

        def short(client: Client) -> Callable[[], None]:
            async def run() -> None:
                for ids in prompts(SHORT, 16, next(seeds)):
                    stream = await client.post("/v1/completions", body(ids, 1))
                    assert stream.error is None, stream.error

            return lambda: runner.run(run())

        pids = [one for _, pid in servers.values() for one in (pid, *children(pid))]
        for count in clients:
            works = {name: together(client, count) for name, client in calls.items()}
            compare(options, f"{count} clients", count * options.answer, works, pids)
        compare(options, "short", SHORT, {name: short(client) for name, client in calls.items()}, pids)
        for client in calls.values():
            client.close()


def children(pid: int) -> list[int]:
    """The processes that a process has started: a server's replicas."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def compare(options: argparse.Namespace, test: str, units: int, works: dict[str, Callable[[], None]], pids: list[int]) -> None:
    """One test of all contestants in turn: tokens a second, or requests of `short`."""
    for work in works.values():
        work()
        work()
    spreads = {name: spread(each) for name, each in take_turns(works, options.rounds, pids, patience=1.0).items()}
    rates: dict[str, Any] = {name: each.figures(units) for name, each in spreads.items()}
    alone = rates[ONE]["rate"]
    rows: list[list[object]] = [[name, one["rate"], one["low"], one["high"], one["rate"] / alone] for name, one in rates.items()]
    print(f"\n{options.shape}, {options.dtype}, {test}")
    print(table(["", "a second", "low", "high", "of one engine"], rows), flush=True)
    record("replicas", {
        "shape": options.shape, "dtype": options.dtype, "test": test, "replicas": options.replicas, "prompt": options.prompt,
        "answer": options.answer, "per_second": rates, "ms_a_unit": {name: round(1e3 / one["rate"], 3) for name, one in rates.items()},
    }, spreads.values())  # fmt: skip


if __name__ == "__main__":
    main()
