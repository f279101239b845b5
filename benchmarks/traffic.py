"""The cost of serving over bare computing: eight figures, each with its roof and its goal.

    batching   answers a second of the engine against a static batch of the same work: the runner driven by a loop that does nothing else,
               as many sequences at a time, the next batch when all of the last are over. Equal lengths, where static is at its best, and
               random ones, where it waits for the longest
    host       scheduling and laying out a step of 64 decodes, microseconds
    prefix     time to the first token after 2048 tokens: computed, and found in the prefix cache
    together   sixteen requests at once with the same first tokens: until each has its first token, and the same without waiting
               for another request to compute the shared prefix
    ramp       thirty requests that come one after the other to an engine that was just loaded (tiny160m): waits for the first token and for
               the next ones, where its steps are captured on the way, and where the usual ones were captured before
    cache      prefix-cache overhead at a 0% hit rate, measured two ways: rounds with and without it in turn, and the processor time of its
               calls by all of the time. Its pool is full, so each block is evicted from
    idle       share of a step of decodes in which the device has nothing to run
    gap        the longest wait of eight decoding sequences for their next token, while a prompt of 4096 tokens comes in, by budget

    python -m benchmarks.traffic [--what batching,cache] [--shape tinyllama-1.1b] [--small tiny160m]

batching and cache run on the small shape, where whatever is not computing weighs most; the others on the large one. Weights are random.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Spread, one_round, record, spread, table, take_turns
from benchmarks.loading import load
from benchmarks.shapes import SHAPES, write_config
from tinyvllm.engine.tools.stepping import Stepping

Work = list[tuple[list[int], int]]  # (token ids, tokens to answer) of each request


@dataclass(frozen=True)
class Result:
    """A line of the table, what is recorded of it, and the spreads it comes from."""

    name: str
    measured: str
    context: str
    goal: str
    figures: dict[str, Any]
    spreads: tuple[Spread, ...] = ()


def serve(engine: Any, work: Work) -> None:
    """All requests at once, greedy, until the last is over."""
    from tinyvllm import SamplingParams

    for n, (ids, answer) in enumerate(work):
        engine.add(f"traffic-{n}", ids, SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, output_kind="final_only"))
    while engine.has_work():
        engine.step()


def serve_static(engine: Any, work: Work, batch: int) -> list[list[int]]:
    """The same by the runner alone: `batch` requests at a time, each of which decodes until the longest is over. Their tokens."""
    return [tokens for start in range(0, len(work), batch) for tokens in _static_batch(engine, work[start : start + batch])]


def _static_batch(engine: Any, work: Work) -> list[list[int]]:
    from tinyvllm import SamplingParams
    from tinyvllm.request import Sequence
    from tinyvllm.scheduler import Schedule, Scheduled

    runner, pool, budget = engine.runner, engine.scheduler.pool, engine.config.max_num_batched_tokens
    longest = max(answer for _, answer in work)
    sequences = [Sequence(1 << 40 | n, "static", ids, SamplingParams()) for n, (ids, _) in enumerate(work)]
    for sequence in sequences:
        sequence.block_table = pool.allocate(pool.blocks_for(len(sequence) + longest))
    waiting = [Scheduled(sequence, 0, len(sequence), 1) for sequence in sequences]
    while waiting:
        count = max(1, sum(sum(e.num_tokens for e in waiting[: n + 1]) <= budget for n in range(len(waiting))))
        step = runner.prepare(Schedule(waiting[:count]))
        _take(step.logit_rows, runner.tokens(runner.launch(step).best)[0])
        del waiting[:count]
    for _ in range(longest - 1):
        step = runner.prepare(Schedule([Scheduled(s, len(s) - 1, 1, 1) for s in sequences]))
        result = runner.launch(step)
        (tokens,) = runner.advance(step, result.best, None, 1)
        _take(step.logit_rows, tokens[0])
    for sequence in sequences:
        pool.release(sequence.block_table)
    return [sequence.output_token_ids for sequence in sequences]


def _take(entries: Any, tokens: Any) -> None:
    for entry, token in zip(entries, tokens.tolist()):  # rows of padding come last
        entry.sequence.output_token_ids.append(token)


def equal_work(count: int, chance: random.Random) -> Work:
    return [(prompt(64, chance), 64) for _ in range(count)]


def random_work(count: int, chance: random.Random) -> Work:
    return [(prompt(chance.randint(16, 112), chance), chance.randint(16, 112)) for _ in range(count)]


def prompt(tokens: int, chance: random.Random) -> list[int]:
    """Token ids that every vocabulary has, and that no earlier request had."""
    return chance.choices(range(3, 1000), k=tokens)


def batching(llm: Any, rounds: int) -> Iterator[Result]:
    engine, batch = llm.engine, llm.config.max_num_seqs
    for name, make, goal in (("equal lengths", equal_work, ">= 97%"), ("random lengths", random_work, "")):
        work = make(3 * batch, random.Random(0))
        contestants: dict[str, Callable[[], float]] = {
            "engine": partial(seconds_of, serve, engine, work),
            "static": partial(seconds_of, serve_static, engine, work, batch),
        }
        with no_prefix(engine):  # its rounds are equal, and would hit
            for run in contestants.values():
                run()  # captures what it needs
            turns = take_turns(contestants, rounds, patience=1.0)
        answers, pairs = sum(answer for _, answer in work), paired(turns["static"], turns["engine"])
        ours, static = spread(turns["engine"]), spread(turns["static"])
        yield Result(
            f"batching, {name}", f"{ours.rate(answers):.0f} tok/s", f"{pairs:.1%} of static, {static.rate(answers):.0f} tok/s", goal,
            {"what": "batching", "work": name, "batch": batch, "requests": len(work), "engine_tok_s": ours.figures(answers),
             "static_tok_s": static.figures(answers), "of_static": round(pairs, 4)}, (ours, static),
        )  # fmt: skip


def paired(numerators: Any, denominators: Any) -> float:
    """The median of what two contestants' rounds took, pair by pair: what else the machine did fell on both of a pair."""
    return float(median(a.seconds / b.seconds for a, b in zip(numerators, denominators, strict=True)))


@contextmanager
def no_prefix(engine: Any) -> Iterator[None]:
    """The engine without its prefix cache for a while; nothing may run at either end."""
    prefix, engine.scheduler.prefix = engine.scheduler.prefix, None
    prefix.reset()
    try:
        yield
    finally:
        engine.scheduler.prefix = prefix


def cache(llm: Any, rounds: int) -> Iterator[Result]:
    engine, count, chance = llm.engine, llm.config.max_num_seqs, random.Random(1)
    prefix = engine.scheduler.prefix

    def on() -> float:
        fill(engine, chance)
        return seconds_of(serve, engine, equal_work(count, chance))

    def off() -> float:
        with no_prefix(engine):
            return seconds_of(serve, engine, equal_work(count, chance))

    on()
    hits, shares = prefix.hits, []
    for _ in range(rounds):
        with spent_in(prefix) as seconds:
            whole = on()
        shares.append(seconds[0] / whole)
    turns = take_turns({"on": on, "off": off}, 2 * rounds, patience=1.0)
    assert prefix.hits == hits, "traffic: prompts that should miss have hit"
    with_it, without, slower = spread(turns["on"]), spread(turns["off"]), paired(turns["on"], turns["off"]) - 1
    yield Result(
        "cache without hits", f"{median(shares):.2%} of the time", f"{slower:+.2%} in rounds by turns", "<= 0.5%",
        {"what": "cache", "share": round(median(shares), 5), "slower": round(slower, 4), "on_s": round(with_it.median, 3),
         "off_s": round(without.median, 3)}, (with_it, without),
    )  # fmt: skip


def ramp(_: Any, rounds: int) -> Iterator[Result]:
    waits: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
    timed = []
    for number in range(max(2, rounds // 2)):
        for warm, (firsts, gaps) in waits.items():
            llm = model("tiny160m", max_model_len=512, max_num_seqs=32, num_blocks=1024, warm_up=warm)
            timed.append(one_round(partial(_arrive_one_by_one, llm.engine, random.Random(number), firsts, gaps)))
            llm.close()
    figures = {name: {"first_median_ms": round(1e3 * median(firsts)), "first_worst_ms": round(1e3 * max(firsts)),
                      "gap_99th_ms": round(1e3 * sorted(gaps)[len(gaps) * 99 // 100])}
               for name, (firsts, gaps) in zip(("on the way", "before"), waits.values(), strict=True)}  # fmt: skip
    late, early = figures.values()
    yield Result(
        "ramp, captured before", f"{early['first_median_ms']} ms to a first token",
        f"{late['first_median_ms']} on the way; 99th gap {early['gap_99th_ms']} and {late['gap_99th_ms']} ms", "",
        {"what": "ramp", "requests": 30, "seconds_between": 0.15, **figures}, (spread(timed),),
    )  # fmt: skip


def _arrive_one_by_one(engine: Any, chance: random.Random, firsts: list[float], gaps: list[float]) -> None:
    from tinyvllm import SamplingParams

    start = time.perf_counter()
    due = [(0.15 * n, prompt(chance.randint(5, 200), chance)) for n in range(30)]
    last: dict[str, float] = {}
    fresh: set[str] = set()
    while due or engine.has_work():
        now = time.perf_counter() - start
        while due and due[0][0] <= now:
            at, ids = due.pop(0)
            name = f"traffic-{at}"
            engine.add(name, ids, SamplingParams(temperature=0.7, seed=7, max_tokens=60, ignore_eos=True))
            last[name] = at
            fresh.add(name)
        outputs = engine.step() if engine.has_work() else ()
        if not outputs and not engine.has_work():
            time.sleep(0.005)
        now = time.perf_counter() - start
        for output in outputs:
            (firsts if output.request_id in fresh else gaps).append(now - last[output.request_id])
            fresh.discard(output.request_id)
            last[output.request_id] = now


def together(llm: Any, rounds: int) -> Iterator[Result]:
    from tinyvllm import SamplingParams

    engine, count, chance = llm.engine, 16, random.Random(6)
    inflight = engine.scheduler.prefixes.inflight
    min_blocks = inflight.min_blocks

    def arrive(shortest: int, tokens: int) -> float:
        inflight.min_blocks = shortest
        common = prompt(tokens, chance)
        for n in range(count):
            engine.add(f"traffic-{n}", common + prompt(16, chance), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        start = time.perf_counter()
        while engine.has_work():
            engine.step()
        return time.perf_counter() - start

    for tokens in (128, 2048):
        contestants = {"one": partial(arrive, min_blocks, tokens), "each": partial(arrive, 1 << 30, tokens)}
        for run in contestants.values():
            run()
        turns = take_turns(contestants, max(3, rounds // 2), patience=1.0)
        one, each, times = spread(turns["one"]), spread(turns["each"]), paired(turns["each"], turns["one"])
        yield Result(
            f"{count} at once after {tokens} shared tokens", f"{times:.1f} x sooner", f"{one.median:.2f} s after {each.median:.2f} s", "",
            {"what": "together", "requests": count, "tokens": tokens, "own": 16, "one_s": round(one.median, 3),
             "each_s": round(each.median, 3), "times": round(times, 2)}, (one, each),
        )  # fmt: skip
    inflight.min_blocks = min_blocks


def seconds_of(function: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def fill(engine: Any, chance: random.Random) -> None:
    """Every free block cached, as where traffic has never hit for long: from now on each block that is wanted is evicted first."""
    pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
    prefix.reset()
    table = pool.allocate(pool.num_free)
    ids = chance.choices(range(1 << 20), k=len(table) * pool.block_size)
    prefix.publish(prefix.hash_blocks(ids), table, 0, len(table), lambda start, stop: ids[start:stop])
    pool.release(table)


@contextmanager
def spent_in(prefix: Any) -> Iterator[list[float]]:
    """The seconds, in a list of one, that go into what the scheduler and the pool call of a prefix cache meanwhile."""
    spent, names = [0.0], ("extend", "match", "publish", "count")

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            spent[0] += time.perf_counter() - start
            return result

        return call

    evicted = prefix.pool.on_evict
    prefix.pool.on_evict = timed(evicted)
    for name in names:
        setattr(prefix, name, timed(getattr(prefix, name)))
    try:
        yield spent
    finally:
        prefix.pool.on_evict = evicted
        for name in names:
            delattr(prefix, name)


def host(llm: Any, rounds: int) -> Iterator[Result]:
    stepping, chance = Stepping(llm), random.Random(2)
    stepping.begin([prompt(16, chance) for _ in range(64)])
    stepping.steps(2)
    stats, timed = phases(stepping, 16, rounds)
    stepping.stop()
    schedule, prepare = (1e6 * median(getattr(s, name) for s in stats) for name in ("schedule", "prepare"))
    both = sorted(1e6 * (s.schedule + s.prepare) for s in stats)
    whole = 1e3 * median(seconds_in(s) for s in stats)
    yield Result(
        "host, 64 decodes", f"{median(both):.0f} us", f"schedule {schedule:.0f}, prepare {prepare:.0f}; a step {whole:.1f} ms", "<= 150 us",
        {"what": "host", "sequences": 64, "schedule_us": round(schedule, 1), "prepare_us": round(prepare, 1), "us": round(median(both), 1),
         "us_90th": round(both[len(both) * 9 // 10], 1), "step_ms": round(whole, 2)}, (timed,),
    )  # fmt: skip


def phases(stepping: Stepping, count: int, rounds: int) -> tuple[list[Any], Spread]:
    """What the engine's accounts say of each step in rounds of `count` steps, and what those rounds took."""
    stats: list[Any] = []

    def steps() -> None:
        for _ in range(count):
            stepping.steps(1)
            stats.append(stepping.engine.stats.step)

    return stats, spread([one_round(steps) for _ in range(rounds)])


def seconds_in(stats: Any) -> float:
    return float(stats.schedule + stats.prepare + stats.run + stats.sample + stats.output)


def idle(llm: Any, rounds: int) -> Iterator[Result]:
    stepping, chance = Stepping(llm), random.Random(3)
    for batch in (1, 16):
        stepping.begin([prompt(16, chance) for _ in range(batch)])
        stepping.steps(2)
        stats, timed = phases(stepping, 8, rounds)
        stepping.stop()
        share = median(1 - s.run / seconds_in(s) for s in stats)
        step, run = (1e3 * median(values) for values in ([seconds_in(s) for s in stats], [s.run for s in stats]))
        yield Result(
            f"idle, {batch} decoding", f"{share:.2%}", f"{run:.2f} of {step:.2f} ms run", "<= 5%",
            {"what": "idle", "batch": batch, "share": round(share, 5), "step_ms": round(step, 3), "run_ms": round(run, 3)},
            (timed,),
        )  # fmt: skip


def prefix(llm: Any, rounds: int) -> Iterator[Result]:
    engine, chance = llm.engine, random.Random(4)
    stepping = Stepping(llm)
    known, more = prompt(2048, chance), partial(prompt, 16, chance)
    stepping.prefill(known + more())
    stepping.prefill(known + more())  # captures what a hit needs
    contestants = {
        "hit": lambda: seconds_of(stepping.prefill, known + more()),
        "miss": lambda: seconds_of(stepping.prefill, prompt(2048, chance) + more()),
    }
    before = engine.scheduler.prefix.hits
    turns = take_turns(contestants, max(3, rounds // 2), patience=1.0)
    hits, count = engine.scheduler.prefix.hits - before, len(turns["hit"])
    assert hits == 2048 * count, f"traffic: {hits} tokens were hit in {count} prompts"
    hit, miss, times = spread(turns["hit"]), spread(turns["miss"]), paired(turns["miss"], turns["hit"])
    yield Result(
        "prefix of 2048 tokens", f"{times:.0f} x sooner", f"{1e3 * hit.median:.0f} ms after {1e3 * miss.median:.0f} ms", ">= 10 x",
        {"what": "prefix", "tokens": 2048, "own": 16, "hit_ms": round(1e3 * hit.median, 2), "miss_ms": round(1e3 * miss.median, 1),
         "times": round(times, 1)}, (hit, miss),
    )  # fmt: skip


def gap(llm: Any, rounds: int) -> Iterator[Result]:
    engine, decoding, length = llm.engine, 8, 4096
    limits, stepping, chance = engine.scheduler.limits, Stepping(llm), random.Random(5)
    for budget, target in ((64, None), (256, None), (512, None), (512, 0.25)):
        engine.scheduler.limits = replace(limits, max_batched_tokens=budget, max_step_seconds=target)
        stepping.begin([prompt(16, chance) for _ in range(decoding)])
        alone = median(seconds_of(stepping.steps, 1) for _ in range(2 * rounds))
        piece = budget - decoding
        gaps_of(engine, prompt(piece + length % piece, chance))  # captures both shapes
        gaps: list[float] = []
        timed = spread([one_round(partial(_extend, gaps, engine, length, chance))])
        stepping.stop()
        worst, usual = 1e3 * max(gaps), 1e3 * median(gaps)
        name = f"gap, budget {budget}" if target is None else f"gap, target {1e3 * target:.0f} ms"
        yield Result(
            name, f"{worst:.0f} ms", f"usual {usual:.0f} ms, {1e3 * alone:.0f} alone; first token {sum(gaps):.1f} s", "",
            {"what": "gap", "budget": budget, "target_s": target, "decoding": decoding, "prompt": length, "worst_ms": round(worst, 1),
             "median_ms": round(usual, 1), "alone_ms": round(1e3 * alone, 2), "first_token_s": round(sum(gaps), 2)},
            (timed,),
        )  # fmt: skip
    engine.scheduler.limits = limits


def _extend(gaps: list[float], engine: Any, length: int, chance: random.Random) -> None:
    gaps.extend(gaps_of(engine, prompt(length, chance)))


def gaps_of(engine: Any, ids: list[int]) -> list[float]:
    """Seconds of every step until a prompt has its first token; each delays the sequences that decode meanwhile."""
    from tinyvllm import SamplingParams

    engine.add("traffic-gap", ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    gaps, finished = [], False
    while not finished:
        start = time.perf_counter()
        outputs = engine.step()
        gaps.append(time.perf_counter() - start)
        finished = any(output.request_id == "traffic-gap" for output in outputs)
    return gaps


SMALL = {"batching": batching, "cache": cache, "ramp": ramp}
LARGE = {"host": host, "idle": idle, "prefix": prefix, "together": together, "gap": gap}


def model(shape: str, **limits: Any) -> Any:
    with TemporaryDirectory() as folder:
        return load(write_config(SHAPES[shape], Path(folder)), dummy=True, dtype="bfloat16", **limits)


def figures(what: list[str], shape: str, rounds: int, measures: dict[str, Any], **limits: Any) -> Iterator[Result]:
    """The results of those of `measures` that are wanted, on a model that is loaded for them and released afterwards."""
    wanted = [name for name in measures if name in what]
    if not wanted:
        return
    llm = model(shape, **limits)
    for name in wanted:
        print(f"{name} on {shape} ...", flush=True)
        for result in measures[name](llm, rounds):
            record("traffic", {"model": shape, "dtype": "bfloat16", **result.figures}, result.spreads)
            yield result
    llm.close()


def main() -> None:
    every = [*SMALL, *LARGE]
    parser = argparse.ArgumentParser(description="the cost of serving over bare computing")
    parser.add_argument("--what", default=",".join(every), metavar="NAMES", help=f"some of {', '.join(every)}")
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--small", choices=SHAPES, default="tiny160m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    what = options.what.split(",")
    if unknown := [name for name in what if name not in every]:
        parser.error(f"--what: there is no {', '.join(unknown)}; there are {', '.join(every)}")
    results = [
        *figures(what, options.small, options.rounds, SMALL, max_model_len=256, max_num_seqs=16, num_blocks=512),
        *figures(what, options.shape, options.rounds, LARGE, max_model_len=4352, max_num_seqs=64, num_blocks=2048),
    ]
    print(table(["", "measured", "context", "goal"], [[r.name, r.measured, r.context, r.goal] for r in results]))


if __name__ == "__main__":
    main()
