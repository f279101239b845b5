"""SIGTERM while many clients stream: accepted requests are finished or end with an error; later ones are refused.

    python -m tests.server.soak_stop --rounds 3 --clients 64

An answer that is cut off, or a request that was sent whole over a fresh connection and never answered though the connection was accepted,
is lost. Exit code 1 where one is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter

from tests.server.soak_client import Connection, Reply, Server, read_stream, serving
from tests.server.soak_work import Asked, fault_of, known


def verdict(asked: Asked, reply: Reply, fresh: bool) -> str:
    """The outcome of one request."""
    if reply.status == 503 and reply.error is not None and reply.whole:
        return "refused"
    if reply.status == 0:  # no response: the connection was not accepted, or was being closed
        return "not accepted" if fresh else "not accepted on a connection used before"
    if reply.status == 200 and reply.whole and asked.body.get("stream"):
        stream = read_stream(reply.body)
        if stream.error is not None and stream.done:
            right = [told.token_ids[: len(stream.choices[i].token_ids)] for i, told in enumerate(asked.right) if i in stream.choices]
            same = right == [stream.choices[i].token_ids for i in range(len(asked.right)) if i in stream.choices]
            return "ended with an error" if same else "LOST: other tokens before the error"
    fault = fault_of(asked, reply)
    return "finished" if fault is None else f"LOST: {fault}"


async def client(port: int, work: list[Asked], seen: Counter[str], told: asyncio.Event, seed: int) -> None:
    """Consecutive requests, until some after the signal were refused."""
    chance, connection, denied = random.Random(seed), Connection(port), 0
    while denied < 3:
        asked, fresh = chance.choice(work), connection.fresh
        late = told.is_set()
        said = verdict(asked, await connection.ask(asked.path, asked.body), fresh)
        seen[f"{said}{' (sent after the signal)' if late else ''}"] += 1
        denied += late and said != "finished"
        await asyncio.sleep(0.01 if denied else 0)


async def one_round(server: Server, work: list[Asked], clients: int, after: float) -> Counter[str]:
    """Send the signal while all clients stream; the outcomes of all requests."""
    seen: Counter[str] = Counter()
    told = asyncio.Event()
    tasks = [asyncio.create_task(client(server.port, work, seen, told, seed)) for seed in range(clients)]
    await asyncio.sleep(after)
    told.set()
    began = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    code = await asyncio.to_thread(server.process.wait, 60)
    seen[f"exit code {code}"] += 1
    print(f"  ended {time.perf_counter() - began:.1f} s after the signal: {dict(sorted(seen.items()))}", flush=True)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGTERM under load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    work, bad = known(72, seed=2), 0
    for number in range(options.rounds):
        for grace in ("60", "0.5"):
            with serving("--max-num-seqs", "32", "--num-blocks", "640", "--grace-seconds", grace) as server:
                print(f"round {number}, grace {grace} s", flush=True)
                seen = asyncio.run(one_round(server, work, options.clients, 6.0 + 2 * number))
                complaints = server.complaints()
            bad += sum(count for what, count in seen.items() if what.startswith("LOST")) + (not seen["exit code 0"])
            bad += grace == "60" and any(what.startswith("ended") for what in seen)
            if complaints:
                bad += 1
                print(f"FAULT the server wrote: {complaints[:2000]}")
    print("nothing was lost" if not bad else f"{bad} faults")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
