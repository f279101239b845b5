"""Many clients stream for minutes, and every token must equal the offline one.

    python -m tests.server.soak_streams --minutes 5 --clients 64 -- --num-blocks 320

The server has one row for every client and a cache that is too small for all of them, so that sequences are preempted and prefixes are
evicted while answers stream. Exit code 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time

from tests.server.soak_client import Server, percentile, serving
from tests.server.soak_work import Asked, Tally, keep_asking, known

_EVERY = 30.0  # seconds between two lines


async def soak(server: Server, work: list[Asked], clients: int, seconds: float) -> Tally:
    """Run all clients until the time is over; prints a line at intervals."""
    tally, began = Tally(), time.monotonic()
    tasks = [asyncio.create_task(keep_asking(server.port, work, tally, began + seconds, seed)) for seed in range(clients)]
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=_EVERY)
        held = await asyncio.to_thread(server.held)
        print(f"{time.monotonic() - began:4.0f} s: {tally.requests} answers, {tally.tokens} tokens, {held}", flush=True)
    await asyncio.gather(*tasks)
    return tally


def counted(metrics: str, name: str) -> int:
    """The value of a counter of /metrics."""
    found = re.search(rf"^{re.escape(name)}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return int(float(found[1])) if found else -1


def main() -> int:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description="streams against the offline answers", epilog="after --: options of `main.py serve`")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--different", type=int, default=144, metavar="N", help="requests that are drawn from")
    options = parser.parse_args(words[:at])
    began = time.perf_counter()
    work = known(options.different)
    print(f"{len(work)} requests answered offline in {time.perf_counter() - began:.1f} s", flush=True)
    with serving("--max-num-seqs", str(options.clients), "--num-blocks", "320", *words[at + 1 :]) as server:
        print(f"ready after {server.seconds:.2f} s", flush=True)
        asyncio.run(soak(server, work, options.clients, min(60.0, options.minutes * 12)))  # creates everything that is created on first use
        server.calm()
        before, began = server.held(), time.perf_counter()
        tally = asyncio.run(soak(server, work, options.clients, options.minutes * 60))
        seconds = time.perf_counter() - began
        server.calm()
        after, complaints, metrics = server.held(), server.complaints(), server.get("/metrics")
    firsts = [percentile(tally.firsts, share) * 1000 for share in (0.5, 0.95, 0.99)]
    rate = f"{tally.tokens} tokens, {tally.tokens / seconds:.0f} tok/s"
    print(f"{options.clients} clients, {seconds:.0f} s: {tally.requests} answers, {rate}")
    print(f"{tally.events} events; first token after {firsts[0]:.0f} / {firsts[1]:.0f} / {firsts[2]:.0f} ms (50, 95, 99 of 100)")
    print(f"preempted {counted(metrics, 'vllm:num_preemptions')} times")
    print(f"before: {before}\nafter:  {after}")
    for fault, count in tally.faults.most_common(20):
        print(f"FAULT {count} x {fault}")
    if complaints:
        print(f"FAULT the server wrote: {complaints[:2000]}")
    print("every token is the offline one's" if not tally.faults else f"{tally.faults.total()} answers are wrong")
    return bool(tally.faults or complaints)


if __name__ == "__main__":
    sys.exit(main())
