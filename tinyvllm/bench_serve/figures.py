"""What the times of a load's requests come to, under the names of vLLM's serving benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyvllm.bench_serve.run import Done, Load
from tinyvllm.errors import ArgumentError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
ITL_PERCENTILE = 95  # of the gaps of one request, for its goodput
Figures = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The figures of one request, in seconds from its beginning; `error` is why it counts as failed."""

    error: str | None
    input_tokens: int
    output_tokens: int
    ttft: float
    tpot: float | None
    itl: tuple[float, ...]
    e2el: float

    def judged(self, metric: str) -> float | None:
        """The time that a goodput limits: a request's inter-token latency is that of its 95th percentile."""
        if metric == "itl":
            return float(np.percentile(self.itl, ITL_PERCENTILE)) if self.itl else None
        value: float | None = getattr(self, metric)
        return value


def outcome_of(done: Done) -> Outcome:
    """Times of a request. Tokens are those of the server's usage, or else events with text. An answer of another length than the one
    that the request forced counts as failed.
    """
    stream, usage = done.stream, done.stream.usage or {}
    events = sum(count for _, count in stream.times)
    output = usage.get("completion_tokens", events)
    error, wanted = stream.error, done.request.output_tokens
    if error is None and not stream.times:
        error = "an answer without text"
    if error is None and wanted and "completion_tokens" in usage and output != wanted:
        error = f"{output} tokens instead of {wanted}: the server does not know ignore_eos, or the context ended"
    first = stream.first if stream.first is not None else stream.ended
    last = stream.times[-1][0] if stream.times else stream.ended
    gaps = [later - sooner for (sooner, _), (later, _) in zip(stream.times, stream.times[1:], strict=False)]
    gaps += [0.0] * sum(count - 1 for _, count in stream.times)  # tokens that came in one read
    tpot = (last - first) / (output - 1) if output > 1 and stream.times else None
    return Outcome(
        error,
        usage.get("prompt_tokens", done.request.input_tokens),
        output,
        first - done.began,
        tpot,
        tuple(gaps),
        stream.ended - done.began,
    )


def figures_of(load: Load, outcomes: Sequence[Outcome], percentiles: Sequence[float], goodput: Mapping[str, float]) -> Figures:
    """Counts, rates a second and times in milliseconds. Requests that failed are counted and named, and are in nothing else."""
    good = [one for one in outcomes if one.error is None]
    seconds = load.seconds
    inputs, outputs = sum(one.input_tokens for one in good), sum(one.output_tokens for one in good)
    figures: Figures = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(one.error for one in outcomes if one.error is not None).most_common()),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_is_good(one, goodput) for one in good) / seconds if goodput else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": peak_concurrency(load.done),
    }
    for metric in METRICS:
        values = [value for one in good for value in _values(one, metric)]
        figures |= statistics_of(metric, values, percentiles)
    return figures


def _values(one: Outcome, metric: str) -> Sequence[float]:
    if metric == "itl":
        return one.itl
    value = getattr(one, metric)
    return () if value is None else (value,)


def _is_good(one: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether a request kept every limit, which are milliseconds; what a request does not have, as gaps of one token, it keeps."""
    times = ((one.judged(metric), limit) for metric, limit in goodput.items())
    return all(value is None or value * 1000 <= limit for value, limit in times)


def statistics_of(metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> Figures:
    """mean_ttft_ms, median, std (of the population, as vLLM has it), p99: milliseconds, None of nothing. Percentiles are interpolated."""
    values = np.asarray(seconds) * 1000
    names = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    found = [values.mean(), np.median(values), values.std(), *np.percentile(values, percentiles)] if len(values) else [None] * len(names)
    return {f"{name}_{metric}_ms": None if value is None else float(value) for name, value in zip(names, found, strict=True)}


def peak_concurrency(done: Sequence[Done]) -> int:
    """The most requests that were under way at the same time."""
    changes = sorted([(one.stream.ended, -1) for one in done] + [(one.began, 1) for one in done])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def parse_goodput(entries: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds, such as ["ttft:200", "tpot:50"]. ArgumentError for any other text."""
    limits: dict[str, float] = {}
    for entry in entries:
        metric, _, text = entry.partition(":")
        limit = positive_number(text)
        if metric not in METRICS or limit is None:
            raise ArgumentError(f"--goodput: expected METRIC:MILLISECONDS with a metric of {', '.join(METRICS)}, got {entry[:60]!r}")
        if metric in limits:
            raise ArgumentError(f"--goodput: {metric} is there twice")
        limits[metric] = limit
    return limits


def positive_number(text: str) -> float | None:
    """A finite number above 0, None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
