"""`tinyvllm bench serve`: latency against load of an OpenAI server, in the figures of vLLM's serving benchmark."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tinyvllm.bench_serve.workload import CHAT, COMPLETIONS, FIRST_TOKEN, Lengths, Prompt, RandomPrompts, arrivals, requests
from tinyvllm.cli.bench import numbers
from tinyvllm.cli.jsonl import BadLine, read_prompts
from tinyvllm.cli.new_file import new_file
from tinyvllm.cli.progress import Progress
from tinyvllm.errors import ArgumentError, TinyvllmError
from tinyvllm.foreign import parse_json
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.version import VERSION

if TYPE_CHECKING:
    from tinyvllm.bench_serve.client import Client
    from tinyvllm.bench_serve.report import Report
    from tinyvllm.bench_serve.run import Done

MAX_PROMPTS, MAX_LOADS, MAX_CONCURRENCY = 1_000_000, 64, 65_536
MAX_DATASET = 100_000  # prompts of a file
MAX_SECONDS = 86_400.0
MIN_BURSTINESS = 0.01  # gaps of smaller shapes are zeros and a few hours
WARM_UP = -1  # number of the load before the first
Record = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What is measured: each rate with each limit of concurrency, all requests with `common` fields."""

    loads: list[tuple[float, int | None]]
    prompts: RandomPrompts | list[Prompt]
    common: Mapping[str, Any]
    goodput: Mapping[str, float]
    metrics: list[str]
    percentiles: list[float]

    def drawn(self, count: int, seed: int, load: int) -> list[Prompt]:
        """The prompts of a load. Those of a file come in its order, each load after the last."""
        if isinstance(self.prompts, RandomPrompts):
            return self.prompts.draw(count, seed, load)
        first = max(load, 0) * count % len(self.prompts)
        return [*self.prompts[first:], *self.prompts[:first]]


def run(options: argparse.Namespace) -> int:
    setup = setup_of(options)
    from tinyvllm.bench_serve.client import Client
    from tinyvllm.bench_serve.report import FORMATS, Report

    write = FORMATS.get(options.output_format)
    if write is None:
        raise ArgumentError(f"--output-format: {options.output_format!r} is not one of {', '.join(FORMATS)}")
    client = Client(options.base_url, options.api_key, seconds=options.timeout)
    with contextlib.ExitStack() as stack:
        publish = stack.enter_context(new_file(options.output or "-"))
        draw = stack.enter_context(new_file(options.plot)) if options.plot else None
        model, loads = asyncio.run(measured(client, setup, options))
        report = Report(about(options, setup, model), loads, setup.metrics, setup.percentiles)
        publish(write(report))
        if draw is not None:
            draw(picture(report, f"{model}, {options.dataset}"))
    if options.output not in (None, "-"):
        sys.stdout.write(FORMATS["md"](report))
    return 0 if all(load["completed"] for load in loads) else 1


# --- options


def setup_of(options: argparse.Namespace) -> Setup:
    """The loads, checked before anything is sent. ArgumentError names the option that is wrong."""
    from tinyvllm.bench_serve.figures import METRICS, parse_goodput, positive_number

    _check_numbers(options)
    metrics = [word.strip() for word in options.percentile_metrics.split(",")]
    if unknown := [metric for metric in metrics if metric not in METRICS]:
        raise ArgumentError(f"--percentile-metrics: expected some of {', '.join(METRICS)}, got {unknown[0][:60]!r}")
    percentiles = [value for word in options.metric_percentiles.split(",") if (value := positive_number(word)) is not None and value <= 100]
    if len(percentiles) != options.metric_percentiles.count(",") + 1:
        text = options.metric_percentiles[:60]
        raise ArgumentError(f"--metric-percentiles: expected numbers up to 100, separated by commas, got {text!r}")
    goodput = parse_goodput([word for entry in options.goodput for word in entry.split(",")])
    return Setup(_loads(options), _prompts(options), _common(options), goodput, metrics, percentiles)


def _check_numbers(options: argparse.Namespace) -> None:
    for flag, value, low, high in (
        ("--num-prompts", options.num_prompts, 1, MAX_PROMPTS),
        ("--num-warmups", options.num_warmups, 0, MAX_PROMPTS),
        ("--random-prefix-len", options.random_prefix_len, 0, 1 << 20),
        ("--random-num-prefixes", options.random_num_prefixes, 1, 1 << 16),
        ("--random-vocabulary", options.random_vocabulary, FIRST_TOKEN + 1, 1 << 24),
        ("--output-len", options.output_len, 1, 1 << 22),
        ("--timeout", options.timeout, 0.001, MAX_SECONDS),
        ("--ready-check-timeout-sec", options.ready_check_timeout_sec, 0, MAX_SECONDS),
    ):
        if not low <= value <= high:
            raise ArgumentError(f"{flag}: expected {low} to {high}, got {value}")
    if not options.burstiness >= MIN_BURSTINESS:
        raise ArgumentError(f"--burstiness: expected {MIN_BURSTINESS} or more, or inf, got {options.burstiness}")
    if options.endpoint not in (COMPLETIONS, CHAT):
        raise ArgumentError(f"--endpoint: expected {COMPLETIONS} or {CHAT}, got {options.endpoint[:60]!r}")


def _loads(options: argparse.Namespace) -> list[tuple[float, int | None]]:
    """Each rate with each limit of concurrency."""
    from tinyvllm.bench_serve.figures import positive_number

    rates = [math.inf if word.strip() == "inf" else positive_number(word) for word in options.request_rate.split(",")]
    if None in rates:
        raise ArgumentError(f"--request-rate: expected numbers above 0 or inf, separated by commas, got {options.request_rate[:60]!r}")
    limits: list[int | None] = [None]
    if options.max_concurrency is not None:
        limits = [*numbers("--max-concurrency", options.max_concurrency, 1, MAX_CONCURRENCY)]
    loads = [(rate, limit) for rate in rates if rate is not None for limit in limits]
    if len(loads) > MAX_LOADS:
        raise ArgumentError(f"bench serve: expected at most {MAX_LOADS} loads, got {len(loads)}: every rate with every concurrency")
    return loads


def _prompts(options: argparse.Namespace) -> RandomPrompts | list[Prompt]:
    if options.dataset == "random":
        return RandomPrompts(
            Lengths.parse("--random-input-len", options.random_input_len),
            Lengths.parse("--random-output-len", options.random_output_len),
            options.random_vocabulary,
            options.random_words or options.endpoint == CHAT,
            options.random_prefix_len,
            options.random_num_prefixes,
        )
    prompts = []
    for job in read_prompts(options.dataset, "--dataset"):
        if isinstance(job, BadLine):
            raise job.error
        prompts.append(Prompt(job.prompt_fields, job.sampling))
        if len(prompts) > MAX_DATASET:
            raise ArgumentError(f"--dataset {options.dataset}: expected at most {MAX_DATASET} prompts")
    if not prompts:
        raise ArgumentError(f"--dataset {options.dataset} has no prompt")
    return prompts


def _common(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of every request but the model's name."""
    common = {"max_tokens": options.output_len, "temperature": options.temperature} | ({"ignore_eos": True} if options.ignore_eos else {})
    if options.extra_body is None:
        return common
    try:
        extra = parse_json(options.extra_body.encode())
    except ValueError as error:
        raise ArgumentError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ArgumentError(f"--extra-body: expected a JSON object, got {options.extra_body[:60]!r}")
    return common | extra


# --- measuring


async def measured(client: Client, setup: Setup, options: argparse.Namespace) -> tuple[str, list[Record]]:
    """The model's name at the server, and a record of each load."""
    from tinyvllm.bench_serve.run import run_load, wait_until_ready

    def tell(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr)

    listed = await wait_until_ready(client, options.ready_check_timeout_sec, tell=tell)
    model = options.model or listed
    if model is None:
        raise TinyvllmError(f"bench serve: {client.url} does not list its models: give --model NAME")
    setup_common = {"model": model, **setup.common}
    work = requests(setup.drawn(options.num_warmups, options.seed, WARM_UP), [0.0] * options.num_warmups, options.endpoint,
                    setup_common, options.seed)  # fmt: skip
    together = max((limit or options.num_warmups for _, limit in setup.loads), default=1)
    warm = await run_load(client, options.endpoint, work, max(1, together))
    if work and all(done.stream.error for done in warm.done):
        raise TinyvllmError(f"bench serve: every request of the warm-up failed: {warm.done[0].stream.error}")
    loads = []
    for number, (rate, limit) in enumerate(setup.loads):
        prompts = setup.drawn(options.num_prompts, options.seed, number)
        chance = random.Random(f"{options.seed} {number} arrivals")
        at = arrivals(rate, options.burstiness, options.num_prompts, chance)
        work = requests(prompts, at, options.endpoint, setup_common, options.seed + number)
        loads.append(await _one_load(client, setup, options, work, rate, limit))
    client.close()
    return model, loads


async def _one_load(
    client: Client, setup: Setup, options: argparse.Namespace, work: Sequence[Any], rate: float, limit: int | None
) -> Record:
    from tinyvllm.bench_serve.figures import figures_of, outcome_of
    from tinyvllm.bench_serve.run import run_load

    progress, spent = Progress(len(work), 0, "requests", options.quiet), time.process_time()

    def on_done(done: Done) -> None:
        progress.add(done.stream.error is not None)

    try:
        load = await run_load(client, options.endpoint, work, limit, on_done)
    finally:
        progress.close()
    outcomes = [outcome_of(done) for done in load.done]
    record: Record = {"request_rate": "inf" if rate == math.inf else rate, "max_concurrency": limit}
    record |= figures_of(load, outcomes, setup.percentiles, setup.goodput)
    record["client_cpu"] = (time.process_time() - spent) / load.seconds
    return record | ({"requests": [asdict(outcome) for outcome in outcomes]} if options.save_detailed else {})


# --- results


def about(options: argparse.Namespace, setup: Setup, model: str) -> Record:
    """What was measured, and with what."""
    what: Record = {"version": VERSION, "base_url": options.base_url, "model": model, "endpoint": options.endpoint}
    what |= {"dataset": options.dataset, "num_prompts": options.num_prompts, "seed": options.seed}
    what["burstiness"] = "inf" if options.burstiness == math.inf else options.burstiness
    if isinstance(setup.prompts, RandomPrompts):
        what |= {"random_input_len": setup.prompts.input.text, "random_output_len": setup.prompts.output.text}
        what |= {"random_prefix_len": setup.prompts.prefix, "random_num_prefixes": setup.prompts.prefixes}
    return what | {"goodput": " ".join(f"{metric}:{limit:g}" for metric, limit in setup.goodput.items())}


def picture(report: Report, title: str) -> str:
    """The panels of a report as one SVG file, one below the other."""
    from tinyvllm.bench_serve.report import panels
    from tinyvllm.lab.charts import Chart, Series
    from tinyvllm.lab.svg import stacked

    charts = []
    for panel in panels(report):
        series = tuple(Series(name, tuple(points)) for name, points in panel.lines.items() if points)
        if series:
            charts.append(Chart(panel.title, f"{panel.title} ({title})", panel.x, panel.y, series))
    return stacked(charts)
