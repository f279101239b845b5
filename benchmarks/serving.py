"""Latency against load of any OpenAI server: arrivals by Poisson or by the clock, or clients that always wait for their last answer.

    python -m benchmarks.serving --rates 1,2,4,8 --prompt 16-256 --answer 64 --prefix 128x4 -- --model PATH --max-num-seqs 32
    python -m benchmarks.serving --url http://localhost:8000 --clients 1,8,64

Without --url a server of ours is started, with the options after `--`. Each load runs `--requests` requests, the same for the same seed.
Times are what a client sees: the time to first token counts from the arrival that was drawn, also where the request could only be sent
later, so that a slow server does not slow the load down that it is judged by. Percentiles are of requests (time to first token, end to
end, time per output token) and of gaps between tokens (inter-token latency; tokens that come in one event have no gap between them).
Goodput is how many requests a second kept every limit of --slo. The client's own processor time is in the results: near one core it
has become what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.event_stream import Client, Stream
from benchmarks.harness import Round, one_round, record, spread, table

ROOT = Path(__file__).parents[1]
_WARM = 32  # clients of the warm-up before arrivals
PERCENTS = (50, 90, 95, 99)
WORDS = ["the", "a", "red", "old", "small", "kite", "river", "house", "went", "saw", "said", "was", "very", "day", "and", "then", "we"]


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: `N`, `LOW-HIGH` (uniform), or `lognormal:MEDIAN,SIGMA,MAX`."""

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        if found := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
            low, high = int(found[1]), int(found[2] or found[1])
            if 1 <= low <= high:
                return cls("uniform", (low, high))
        if found := re.fullmatch(r"lognormal:(\d+),([\d.]+),(\d+)", text):
            return cls("lognormal", tuple(map(float, found.groups())))
        raise argparse.ArgumentTypeError(f"lengths are N, LOW-HIGH or lognormal:MEDIAN,SIGMA,MAX, got {text!r}")

    def draw(self, chance: random.Random) -> int:
        if self.kind == "uniform":
            return chance.randint(int(self.numbers[0]), int(self.numbers[1]))
        median, sigma, most = self.numbers
        return max(1, min(int(most), round(chance.lognormvariate(math.log(median), sigma))))


@dataclass(frozen=True)
class Request:
    """When it arrives, in seconds from the start (0 in a closed loop), its body, and how many tokens it wants."""

    arrival: float
    body: bytes
    tokens: int


@dataclass(frozen=True)
class Done:
    """What became of a request: seconds from its arrival."""

    arrival: float
    stream: Stream
    tokens: int

    @property
    def error(self) -> str | None:
        got = (self.stream.usage or {}).get("completion_tokens")
        if self.stream.error is None and got is not None and self.tokens and got != self.tokens:
            return f"{got} tokens instead of {self.tokens}"
        return self.stream.error

    @property
    def generated(self) -> int:
        return (self.stream.usage or {}).get("completion_tokens") or sum(count for _, count in self.stream.times)

    @property
    def ttft(self) -> float:
        return (self.stream.first or self.stream.ended) - self.arrival

    @property
    def e2e(self) -> float:
        return self.stream.ended - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Between tokens: those of one event came together, and so did what came in one read."""
        times = self.stream.times
        found = [later - sooner for (sooner, _), (later, _) in zip(times, times[1:], strict=False)]
        return found + [0.0] * sum(count - 1 for _, count in times)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.generated < 2 or not self.stream.times:
            return None
        return (self.stream.times[-1][0] - self.stream.times[0][0]) / (self.generated - 1)


def arrivals(kind: str, rate: float, count: int, chance: random.Random) -> list[float]:
    """Seconds from the start. Poisson: independent gaps of mean 1 / rate; fixed: all gaps equal."""
    if kind == "fixed":
        return [number / rate for number in range(count)]
    at, found = 0.0, []
    for _ in range(count):
        found.append(at)
        at += chance.expovariate(rate)
    return found


def requests(options: argparse.Namespace, at: Sequence[float], seed: int) -> list[Request]:
    """The requests of one load; prompts differ between loads, or the second would find the first's in the prefix cache."""
    chance = random.Random(f"{options.seed} {seed}")
    size, groups = options.prefix
    prefixes = [_prompt(options, size, random.Random(f"{options.seed} prefix {group}")) for group in range(groups)]
    found = []
    for moment in at:
        tokens = options.answer.draw(chance)
        prompt = _prompt(options, options.prompt.draw(chance), chance)
        if prefixes:
            prompt = chance.choice(prefixes) + prompt
        found.append(Request(moment, json.dumps(_body(options, prompt, tokens, chance)).encode(), tokens if options.ignore_eos else 0))
    return found


def _prompt(options: argparse.Namespace, size: int, chance: random.Random) -> list[Any]:
    """Token ids, or words where the server takes no ids; a word is about a token."""
    return [chance.choice(WORDS) for _ in range(size)] if options.words else [chance.randrange(10, options.vocabulary) for _ in range(size)]


def _body(options: argparse.Namespace, prompt: list[Any], tokens: int, chance: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"model": options.model, "max_tokens": tokens, "temperature": options.temperature, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "seed": chance.randrange(2**31)}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.chat:
        return body | {"messages": [{"role": "user", "content": " ".join(prompt)}]}
    return body | {"prompt": " ".join(prompt) if options.words else prompt}


async def run_load(client: Client, path: str, work: Sequence[Request], clients: int | None) -> list[Done]:
    """All requests: each at its arrival, or where `clients` is given, that many at a time."""
    start = time.perf_counter()

    async def one(request: Request, arrival: float) -> Done:
        return Done(arrival, await client.post(path, request.body), request.tokens)

    if clients is None:
        tasks = []
        for request in work:
            await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
            tasks.append(asyncio.create_task(one(request, start + request.arrival)))
        return list(await asyncio.gather(*tasks))
    waiting, done = iter(work), []

    async def loop() -> None:
        for request in waiting:
            done.append(await one(request, time.perf_counter()))

    await asyncio.gather(*(loop() for _ in range(clients)))
    return done


def figures(done: Sequence[Done], seconds: float, slo: dict[str, float]) -> dict[str, Any]:
    """The results of one load: percentiles in milliseconds, rates a second. Requests that failed are in no percentile."""
    good = [d for d in done if d.error is None]
    kept = [d for d in good if all(value is None or value * 1000 <= slo[name] for name, value in _judged(d, slo))]
    errors: dict[str, int] = {}
    for d in done:
        if d.error is not None:
            errors[d.error] = errors.get(d.error, 0) + 1
    return {
        "requests": len(done),
        "errors": errors,
        "seconds": round(seconds, 3),
        "ttft_ms": percentiles([d.ttft for d in good]),
        "itl_ms": percentiles([gap for d in good for gap in d.gaps]),
        "tpot_ms": percentiles([d.tpot for d in good if d.tpot is not None]),
        "e2e_ms": percentiles([d.e2e for d in good]),
        "requests_s": round(len(good) / seconds, 3),
        "tokens_s": round(sum(d.generated for d in good) / seconds, 1),
        "prompt_tokens_s": round(sum((d.stream.usage or {}).get("prompt_tokens", 0) for d in good) / seconds, 1),
        "goodput_s": round(len(kept) / seconds, 3),
    }


def _judged(d: Done, slo: dict[str, float]) -> Iterator[tuple[str, float | None]]:
    """The times of a request that have limits; its inter-token latency is that of its 95th percentile."""
    for name in slo:
        if name == "itl":
            yield name, float(np.percentile(d.gaps, 95)) if d.gaps else None
        else:
            yield name, getattr(d, name)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of seconds, in milliseconds; {} of none."""
    if not values:
        return {}
    found = {f"p{p}": value for p, value in zip(PERCENTS, np.percentile(values, PERCENTS), strict=True)} | {"mean": np.mean(values)}
    return {name: round(float(value) * 1000, 2) for name, value in found.items()}


def parse_slo(text: str) -> dict[str, float]:
    limits = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not limits or set(limits) - {"ttft", "itl", "tpot", "e2e"} or not all(re.fullmatch(r"[\d.]+", limit) for limit in limits.values()):
        raise argparse.ArgumentTypeError(f"limits are milliseconds of ttft, itl, tpot and e2e, such as ttft=500,itl=50; got {text!r}")
    return {name: float(limit) for name, limit in limits.items()}


def parse_prefix(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"--prefix is TOKENSxGROUPS, such as 128x4, got {text!r}")
    return int(found[1]), int(found[2])


def ready_url(stderr: Iterable[str]) -> str:
    """The URL of a server's ready line; other lines may come before. SystemExit with all of them if there is none."""
    lines = []
    for line in stderr:
        if line.startswith("ready: "):
            return line.split()[1]
        lines.append(line)
    raise SystemExit(f"serving: the server did not start: {''.join(lines)}")


@contextlib.contextmanager
def own_server(options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(url, process id) of a server of ours on a free port."""
    command = [sys.executable, str(ROOT / "main.py"), "serve", "--port", "0", "--no-access-log", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        yield ready_url(process.stderr), process.pid
    finally:
        process.terminate()
        process.wait(60)


async def first_model(client: Client) -> str:
    """The name of the first model that the server lists."""
    reader, writer = await asyncio.open_connection(*client.address)
    writer.write(f"GET {client.root}/v1/models HTTP/1.0\r\n{client.headers}\r\n".encode())
    answer = await reader.read()
    writer.close()
    body = answer.partition(b"\r\n\r\n")[2]
    try:
        name: str = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise SystemExit(f"serving: /v1/models answers {answer[:200]!r}: give --model NAME") from None
    return name


def measure(options: argparse.Namespace, url: str, pids: Sequence[int]) -> list[dict[str, Any]]:
    """The results of every load, in their order."""
    lines = []
    loads = [("clients", float(c)) for c in options.clients] or [("rate", r) for r in options.rates]
    with asyncio.Runner() as runner:
        client = Client(url, options.api_key)
        if options.model is None:
            options.model = runner.run(first_model(client))
        path = "/v1/chat/completions" if options.chat else "/v1/completions"
        together = int(max(options.clients, default=_WARM))  # what is made at first use, as a batch of each size, is no part of the times
        runner.run(run_load(client, path, requests(options, [0.0] * options.warmup, -1), together))
        for number, (kind, load) in enumerate(loads):
            closed = kind == "clients"
            chance = random.Random(f"{options.seed} {number} arrivals")
            at = [0.0] * options.requests if closed else arrivals(options.arrivals, load, options.requests, chance)
            done: list[Done] = []
            work, spent = requests(options, at, number), time.process_time()

            def once(work: Sequence[Request] = work, done: list[Done] = done, clients: int | None = int(load) if closed else None) -> None:
                done += runner.run(run_load(client, path, work, clients))

            round_ = one_round(once, pids)
            cost = {"client_cpu": round((time.process_time() - spent) / round_.seconds, 3), "others": round(round_.others, 2)}
            lines.append({kind: load, **figures(done, round_.seconds, options.slo), **cost})
            print(_row(lines[-1]), flush=True)
        client.close()
    return lines


def _row(line: dict[str, Any]) -> str:
    kind = "clients" if "clients" in line else "rate"
    ttft, itl = line["ttft_ms"].get("p50"), line["itl_ms"].get("p50")
    failed = f", {sum(line['errors'].values())} failed: {next(iter(line['errors']))}" if line["errors"] else ""
    return f"{kind} {line[kind]:g}: {line['tokens_s']} tok/s, first token {ttft} ms, between tokens {itl} ms (medians){failed}"


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """One row a load."""
    kind = "clients" if "clients" in lines[0] else "rate"
    columns = [(what, p) for what in ("ttft", "itl", "e2e") for p in ("p50", "p95", "p99")]
    header = [kind, "req/s", "goodput", "tok/s", *(f"{what} {p}" for what, p in columns), "failed", "client"]
    rows: list[list[object]] = []
    for line in lines:
        times = [line[f"{what}_ms"].get(p) for what, p in columns]
        rates = [line[name] for name in (kind, "requests_s", "goodput_s", "tokens_s")]
        rows.append([*rates, *times, sum(line["errors"].values()), line["client_cpu"]])
    return table(header, rows)


def draw(lines: Sequence[dict[str, Any]], title: str, picture: Path) -> bool:
    """Latencies and goodput against load, a panel each; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kind = "clients" if "clients" in lines[0] else "rate"
    load = [line[kind] for line in lines]
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True)
    names = (("ttft_ms", "time to first token, ms"), ("itl_ms", "between tokens, ms"), ("e2e_ms", "end to end, ms"))
    for panel, (field, label) in zip(panels.flat, names, strict=False):
        for name, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
            panel.plot(load, [line[field].get(name) for line in lines], "C0" + style, marker=".", label=name)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=8)
    last = panels.flat[3]
    last.plot(load, [line["requests_s"] for line in lines], "0.5", marker=".", label="answered")
    last.plot(load, [line["goodput_s"] for line in lines], "C2", marker=".", label="within the limits")
    last.set_ylabel("requests a second")
    last.set_ylim(bottom=0)
    last.legend(fontsize=8)
    for panel in panels[1]:
        panel.set_xlabel("clients" if kind == "clients" else "requests a second that arrive")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    return True


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(own options, those of the server to start)."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    own, server = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(description="latency against load of an OpenAI server", epilog="after --: options of `main.py serve`")
    parser.add_argument("--url", help="a server that runs; without it one is started")
    parser.add_argument("--api-key")
    parser.add_argument("--model", help="its name at the server; the first that it lists")
    parser.add_argument("--rates", type=_numbers, default=[1.0, 2.0, 4.0], metavar="R,...", help="arrivals a second")
    parser.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson")
    parser.add_argument("--clients", type=_numbers, default=[], metavar="N,...", help="instead: clients that wait for their answers")
    parser.add_argument("--requests", type=int, default=64, help="of each load")
    parser.add_argument("--warmup", type=int, default=2 * _WARM, metavar="N", help="requests before the first load")
    parser.add_argument("--prompt", type=Lengths.parse, default=Lengths.parse("16-128"), metavar="LENGTHS", help="after the shared prefix")
    parser.add_argument("--answer", type=Lengths.parse, default=Lengths.parse("64"), metavar="LENGTHS")
    parser.add_argument("--prefix", type=parse_prefix, default=(0, 0), metavar="TOKENSxGROUPS", help="begin with one of GROUPS prefixes")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions; with --words")
    parser.add_argument("--words", action="store_true", help="prompts of words, for servers that take no token ids")
    parser.add_argument("--vocabulary", type=int, default=1000, metavar="V", help="prompts are of token ids from 10 to V")
    parser.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="for servers that do not know the field")
    parser.add_argument("--temperature", type=float, default=0.0)
    limits = parse_slo("ttft=1000,itl=100")
    parser.add_argument("--slo", type=parse_slo, default=limits, metavar="ttft=MS,...", help="limits of a good answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    parser.add_argument("--record", action="store_true", help="append to results/serving.jsonl, if the machine was quiet")
    options = parser.parse_args(own)
    options.words = options.words or options.chat
    if options.url and server:
        parser.error("options after -- are for a server that this command starts; --url names a running one")
    return options, server


def main() -> None:
    options, server = parse(sys.argv[1:])
    with own_server(server) if options.url is None else contextlib.nullcontext((options.url, 0)) as (url, pid):
        lines = measure(options, url, [pid] if pid else [])
    print("\n" + summary(lines))
    what = {
        "model": options.model, "server": " ".join(server) or options.url, "arrivals": "closed" if options.clients else options.arrivals,
        "prompt": options.prompt.numbers, "answer": options.answer.numbers, "prefix": options.prefix, "slo_ms": options.slo,
        "requests": options.requests, "seed": options.seed, "loads": lines,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(what, indent=1) + "\n")
    title = f"{options.model}: prompts of {options.prompt.numbers}, answers of {options.answer.numbers} tokens"
    if options.picture and not draw(lines, title, options.picture):
        print("no picture: matplotlib is not installed", file=sys.stderr)
    if options.record:
        record("serving", what, [spread([Round(line["seconds"], line["others"]) for line in lines])])


if __name__ == "__main__":
    main()
