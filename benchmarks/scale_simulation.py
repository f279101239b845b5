"""8 to 1,000 replicas under a router by prefix and one by turns: time to first token and cache hits, simulated from recorded costs.

    python -m benchmarks.scale_simulation [--replicas 8,32,...] [--requests 40] [--load 0.3] [--svg docs/images/scale.svg]

A replica works on one request at a time: the tokens of a prompt that its cache lacks, then the answer, each at the recorded cost of a
full batch. Requests come at random (exponential pauses), from tenants of unequal popularity (Zipf), each with one long prefix. The load is
the share of all replicas' time that is taken if every request hits. Nothing here is measured, and equal seeds give equal bytes.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from tinyvllm.distributed.prefix_map import MAX_EXCESS, MAX_SHARE
from tinyvllm.lab.charts import Chart, Series
from tinyvllm.lab.svg import svg

REPLICAS = (8, 16, 32, 64, 125, 250, 500, 1000)
POLICIES = ("prefix", "round robin")


@dataclass(frozen=True)
class Costs:
    """Recorded in docs/figures.md: TinyLlama-1.1B's shape, bf16, two cores: a prompt of 512 tokens, sixteen sequences in one batch."""

    prompt_token: float = 1 / 440  # seconds
    decode_token: float = 1 / 330


@dataclass(frozen=True)
class Traffic:
    prefix: int = 2048  # tokens of a tenant's prefix
    question: int = 64
    answer: int = 64
    tenants_per_replica: int = 4
    zipf: float = 0.6  # exponent of popularity; 0 is equal
    cached_prefixes: int = 24  # that the KV cache of a replica holds


@dataclass
class Replica:
    free_at: float = 0.0
    ends: deque[float] = field(default_factory=deque)  # when its requests end, the next one first
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)  # tenants, the least recently used first
    tenants: int = 0  # that were sent here first

    def running(self, now: float) -> int:
        """Requests that wait or run."""
        while self.ends and self.ends[0] <= now:
            self.ends.popleft()
        return len(self.ends)


@dataclass(frozen=True)
class Outcome:
    """Of one policy and size, of the second half of the requests. Times to the first token in seconds."""

    replicas: int
    policy: str
    p50: float
    p99: float
    hits: float
    busiest: float  # share of its time that the busiest replica worked
    moved: float  # share of requests that did not go to the replica with their prefix, because it was too busy


def simulate(num: int, policy: str, load: float, requests: int, seed: int, costs: Costs = Costs(), traffic: Traffic = Traffic()) -> Outcome:
    """`requests` for each of `num` replicas."""
    draw = random.Random(seed)
    num_tenants = num * traffic.tenants_per_replica
    weights = list(itertools.accumulate((rank + 1) ** -traffic.zipf for rank in range(num_tenants)))
    warm = traffic.question * costs.prompt_token + traffic.answer * costs.decode_token
    cold = traffic.prefix * costs.prompt_token
    replicas = [Replica() for _ in range(num)]
    working = [0.0] * num
    homes: dict[int, list[int]] = {}
    now, hits, moved = 0.0, 0, 0
    waits: list[float] = []
    for number in range(num * requests):
        now += draw.expovariate(load * num / warm)
        tenant = bisect.bisect_left(weights, draw.random() * weights[-1])
        if policy == "prefix":
            chosen, spilled = _by_prefix(tenant, homes, replicas, now, draw)
        else:
            chosen, spilled = number % num, False
        replica = replicas[chosen]
        hit = tenant in replica.cache
        replica.cache[tenant] = None
        replica.cache.move_to_end(tenant)
        if len(replica.cache) > traffic.cached_prefixes:
            replica.cache.popitem(last=False)
        begin = max(now, replica.free_at)
        first = begin + traffic.question * costs.prompt_token + (0 if hit else cold)
        replica.free_at = first + traffic.answer * costs.decode_token
        replica.ends.append(replica.free_at)
        working[chosen] += replica.free_at - begin
        if number >= num * requests // 2:
            waits.append(first - now)
            hits += hit
            moved += spilled
    waits.sort()
    share = len(waits)
    busiest = max(work / max(now, replica.free_at) for work, replica in zip(working, replicas))
    return Outcome(num, policy, waits[share // 2], waits[share * 99 // 100], hits / share, busiest, moved / share)


def _by_prefix(tenant: int, homes: dict[int, list[int]], replicas: Sequence[Replica], now: float, draw: random.Random) -> tuple[int, bool]:
    """The replica for a tenant, and whether it is a further one because those with the prefix are too busy: PrefixMap's rule.

    For the least busy of all replicas it takes the less busy of two at random, since a router cannot ask 1,000 for each request.
    """
    known = homes[tenant] if tenant in homes else homes.setdefault(tenant, [_home(tenant, len(homes), replicas)])
    best = min(known, key=lambda one: replicas[one].running(now))
    other = min((draw.randrange(len(replicas)) for _ in range(2)), key=lambda one: replicas[one].running(now))
    if replicas[best].running(now) <= replicas[other].running(now) + MAX_EXCESS:
        return best, False
    if other not in known:
        known.append(other)
    return other, True


def _home(tenant: int, tenants: int, replicas: Sequence[Replica]) -> int:
    """The first replica in the order of the tenant's hashes that has no large share of the tenants so far."""
    most = max(MAX_SHARE * (tenants + 1) / len(replicas), 1 + min(replica.tenants for replica in replicas))
    for number in itertools.count():
        digest = blake2b(b"%d %d" % (tenant, number), digest_size=8).digest()
        home = int.from_bytes(digest, "big") % len(replicas)
        if replicas[home].tenants + 1 <= most:
            replicas[home].tenants += 1
            return home
    raise AssertionError


def charts(outcomes: Sequence[Outcome]) -> Chart:
    series = []
    for policy in POLICIES:
        for name, dashed in (("p50", False), ("p99", True)):
            points = tuple((float(one.replicas), getattr(one, name)) for one in outcomes if one.policy == policy)
            series.append(Series(f"{policy}, {name}", points, dashed=dashed))
    return Chart("scale", "Time to first token, simulated", "replicas", "seconds", tuple(series), log_x=True)


def main(argv: Sequence[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", default=",".join(map(str, REPLICAS)))
    parser.add_argument("--requests", type=int, default=40, help="for each replica")
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(argv)
    sizes = [int(text) for text in options.replicas.split(",")]
    outcomes = [simulate(num, policy, options.load, options.requests, options.seed) for num in sizes for policy in POLICIES]
    print(
        "| replicas | routing | first token p50 (s) | p99 (s) | cache hits | busiest replica | moved |\n|---:|---|---:|---:|---:|---:|---:|"
    )
    for one in outcomes:
        times = f"{one.p50:.2f} | {one.p99:.2f}"
        print(f"| {one.replicas} | {one.policy} | {times} | {one.hits:.0%} | {one.busiest:.0%} | {one.moved:.1%} |")
    if options.svg:
        options.svg.write_text(svg(charts(outcomes)))
    return outcomes


if __name__ == "__main__":
    main()
