"""Replicas under Ray Serve: time to the first token by routing, throughput of one and two replicas, and what Ray adds to a request.

    python -m benchmarks.scale [--shape tiny160m] [--replicas 3] [--tenants 2] [--prefix 2000] [--requests 24]

Each tenant has one prefix, and the KV cache of a replica holds one of them and what runs: by turns a replica sees all tenants in turn. All
replicas share this machine: give each its cores, or read ratios only. The routings take turns within one run, each on new replicas.
Switches of Ray Serve (RAY_SERVE_... in the environment) are recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import record, table
from benchmarks.own_server import own_server
from benchmarks.server_overhead import flags, write_model
from benchmarks.shapes import SHAPES

QUESTION = 32  # tokens after a prefix


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def cluster() -> Iterator[str]:
    """The address of an empty local Ray Serve."""
    import ray
    from ray import serve

    ray.init(include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    port = free_port()  # after Ray has taken its own
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def deployed(model: Path, engine: dict[str, Any], routing: str, replicas: int) -> Iterator[None]:
    """New replicas with this routing."""
    from ray import serve

    from tinyvllm.integrations.ray import app

    given = {"model": str(model), "engine": engine, "routing": routing, "num_replicas": replicas, "replica_options": {"num_cpus": 0.1}}
    serve.run(app(given))
    try:
        yield
    finally:
        serve.delete("default")


def first_token(url: str, ids: list[int], answer: int = 4) -> tuple[float, float]:
    """Seconds to the first event of a completion, and to its end."""
    body = {"prompt": ids, "max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        reply.readline()
        first = time.perf_counter() - start
        reply.read()
    return first, time.perf_counter() - start


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """The tenants in turn, each prompt with a question of its own."""
    draw = random.Random(options.seed)
    prefixes = [[draw.randrange(10, 3000) for _ in range(options.prefix)] for _ in range(options.tenants)]
    order = [prefixes[draw.randrange(options.tenants)] for _ in range(options.requests)]
    return [[*prefix, *(draw.randrange(10, 3000) for _ in range(QUESTION))] for prefix in order]


def throughput(url: str, work: Sequence[list[int]]) -> float:
    """Requests a second of four clients."""
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda ids: first_token(url, ids), work))
    return len(work) / (time.perf_counter() - start)


def overhead(url: str, count: int) -> float:
    """Median seconds of a request of one token."""
    return median(first_token(url, [11, 12, 13], 1)[1] for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="tiny160m", choices=SHAPES)
    for name, default in (("replicas", 3), ("tenants", 2), ("prefix", 2000), ("requests", 24), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    longest = options.prefix + QUESTION + 64
    engine = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": longest, "max_num_seqs": 4, "num_blocks": -(-longest * 3 // 32)}
    work = prompts(options)
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder, cluster() as url:
        model = write_model(options.shape, Path(folder))
        for routing in ("prefix", "round_robin"):
            with deployed(model, engine, routing, options.replicas):
                times = [first_token(url, ids)[0] for ids in work]
                figures[f"first token, {routing}, s"] = median(times[len(times) // 4 :])
        for count in (1, 2):
            with deployed(model, engine, "prefix", count):
                throughput(url, work)
                figures[f"requests a second, {count} replicas"] = throughput(url, work)
        with deployed(model, engine, "prefix", 1), own_server(["--model", str(model), *flags(engine)]) as (alone, _):
            overhead(url, 10), overhead(alone, 10)
            rounds = [overhead(url, 20) - overhead(alone, 20) for _ in range(5)]
            figures["Ray's part of a request, ms"] = 1000 * median(rounds)
    figures["first token, round robin / prefix"] = figures["first token, round_robin, s"] / figures["first token, prefix, s"]
    print(table(["what", "figure"], [[name, f"{value:.3f}"] for name, value in figures.items()]))
    switches = {name: value for name, value in sorted(os.environ.items()) if name.startswith("RAY_SERVE_")}
    record("scale", {**vars(options), "switches": switches, **figures})


if __name__ == "__main__":
    main()
