"""Metrics of an engine for Prometheus: vLLM's names, buckets and labels, and `tinyvllm:` names for those that vLLM does not have.

The hot path adds to plain integers and lists; a scrape builds metric families from them. Only a scrape needs prometheus_client, which comes
with the extra `server`. Names and buckets are those of vLLM 0.33, so that its dashboards show this engine (docs/metrics.md).
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from tinyvllm.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PHASES = ("schedule", "prepare", "run", "sample", "output")
REASONS = ("stop", "length", "abort", "error", "deadline")  # of an end
REFUSALS = ("max_num_queued_reqs", "max_num_queued_tokens", "deadline")


@dataclass(slots=True)
class StepStats:
    """The figures of one step, filled in by the engine.

    schedule, prepare, run, sample, output  seconds of each phase; `run` is the wait for the device
    running, waiting, deferred  sequences after the step; `deferred` of the waiting ones wait for another that computes their prefix
    prompt_tokens       tokens of prompts computed, also those computed again after a preemption
    generated_tokens    tokens drawn or forced; forced_tokens of them followed from a grammar without a draw
    num_drafts          drafts checked: one a sequence and step, of one token or more
    draft_tokens, accepted_tokens  tokens of these drafts, and those of them that were accepted
    accepted_per_pos    accepted tokens by their place in the draft, from its first
    queried_tokens, cached_tokens  tokens of prompts looked up in the prefix cache, and found there
    blocks_used, blocks_cached, blocks_free  blocks of the pool: held by a sequence, kept for later, neither
    tokens_held         tokens whose keys and values are in used blocks; a shared block counts once
    recomputed, swapped  sequences preempted, by what happens to their blocks
    swapped_out, swapped_in  bytes moved to the host and back
    evictions           cached blocks evicted
    waits_first         seconds from arrival to first token of the requests that got it in this step
    waits_next          seconds since the last token of every other sequence that got one
    """

    schedule: float = 0.0
    prepare: float = 0.0
    run: float = 0.0
    sample: float = 0.0
    output: float = 0.0
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    queried_tokens: int = 0
    cached_tokens: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    tokens_held: int = 0
    recomputed: int = 0
    swapped: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    evictions: int = 0
    waits_first: list[float] = field(default_factory=list)
    waits_next: list[float] = field(default_factory=list)


@dataclass(slots=True)
class FinishedRequest:
    """A finished request. Times are seconds of one clock, None for an event that did not happen; lists have an item a continuation."""

    arrival: float
    finished: float
    scheduled: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    n: int = 1
    max_tokens: int | None = None
    preemptions: int = 0


@dataclass
class EnergyTotals:
    """Joules since the start, written by the engine that measures them (docs/energy.md).

    active, idle  of steps: above the idle machine, and what the idle machine draws in the same time
    counters      of the whole machine, by counter
    idle_watts    what the idle machine draws
    not_measured  why the rest is not measured, by part or counter
    """

    active: float = 0.0
    idle: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    idle_watts: float = 0.0
    not_measured: Mapping[str, str] = field(default_factory=dict)

    def sentence(self, tokens: int) -> str:
        """The joules of all steps, by `tokens` generated, and what is not in them."""
        missing = [f"{part} not measured: {reason}" for part, reason in self.not_measured.items()]
        if not self.counters:
            return f"energy: {'; '.join(missing)}"
        each = f" ({self.active / tokens:.3g} J a token)" if tokens else ""
        return "; ".join([f"{self.active:.1f} J above idle{each}, {self.idle:.1f} J idle", *missing])


class Histogram:
    """Counts of values by upper bounds (a value equal to a bound is below it), and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by bound, in Prometheus' form. They come from a copy, as the engine continues to count."""
        total, out = 0, []
        for bound, count in zip([*(str(float(b)) for b in self.bounds), "+Inf"], list(self.counts), strict=True):
            total += count
            out.append((bound, float(total)))
        return out


def add_counts(counts: list[int], more: list[int]) -> None:
    """Add `more` to `counts`, place by place; both may be of any length."""
    counts += [0] * (len(more) - len(counts))
    for i, count in enumerate(more):
        counts[i] += count


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_tokens`."""
    bounds, ten = [], 1
    while ten <= max_tokens:
        bounds += [float(m * ten) for m in (1, 2, 5) if m * ten <= max_tokens]
        ten *= 10
    return tuple(bounds)


_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_STEP_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_COMPILE_SECONDS = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class EngineMetrics:
    """One engine's numbers, since its start. One thread writes; any may scrape.

    `max_model_len` bounds the buckets of token counts. `cache_config` becomes the labels of `vllm:cache_config_info`.
    """

    energy: EnergyTotals | None = None  # where the engine measures it

    def __init__(
        self, model_name: str, engine: str = "0", max_model_len: int = 8192, cache_config: Mapping[str, object] | None = None
    ) -> None:
        self.model_name, self.engine = model_name, engine
        self.cache_config = {name: str(value) for name, value in (cache_config or {}).items()}
        self.last = StepStats()  # gauges are those of the last step
        self.block_size = int(str(self.cache_config.get("block_size", 16)))
        self.steps = {phase: Histogram(_STEP_SECONDS) for phase in PHASES}
        self.first, self.next = Histogram(_FIRST), Histogram(_NEXT)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.grammars = Histogram(_COMPILE_SECONDS)
        self.requests = {name: Histogram(_REQUEST) for name in ("e2e", "queue", "inference", "prefill", "decode")}
        self.per_token = Histogram(_NEXT)
        counts = token_bounds(max_model_len)
        self.sizes = {name: Histogram(counts) for name in ("prompt", "generation", "max", "max_tokens", "computed")}
        self.n, self.preempted = Histogram((1.0, 2.0, 5.0, 10.0, 20.0)), Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))
        self.ended = dict.fromkeys(REASONS, 0)
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.prompt_tokens = self.generated_tokens = self.forced_tokens = 0
        self.num_drafts = self.draft_tokens = self.accepted_tokens = 0
        self.accepted_per_pos = [0]
        self.queried_tokens = self.cached_tokens = self.evictions = 0
        self.recomputed = self.swapped = self.swapped_out = self.swapped_in = 0
        self._registry: CollectorRegistry | None = None

    def step(self, stats: StepStats) -> None:
        """Count a step. `stats` is kept until the next one: give a new object each time."""
        self.last = stats
        for phase, seconds in zip(self.steps.values(), (stats.schedule, stats.prepare, stats.run, stats.sample, stats.output), strict=True):
            phase.observe(seconds)
        if tokens := stats.prompt_tokens + stats.generated_tokens:
            self.step_tokens.observe(tokens)
        self.prompt_tokens += stats.prompt_tokens
        self.generated_tokens += stats.generated_tokens
        self.forced_tokens += stats.forced_tokens
        if stats.num_drafts:
            self._count_drafts(stats)
        self.queried_tokens += stats.queried_tokens
        self.cached_tokens += stats.cached_tokens
        self.evictions += stats.evictions
        self.recomputed += stats.recomputed
        self.swapped += stats.swapped
        self.swapped_out += stats.swapped_out
        self.swapped_in += stats.swapped_in
        for seconds in stats.waits_first:
            self.first.observe(seconds)
        if stats.waits_next:
            counts, bounds = self.next.counts, self.next.bounds  # the one loop over sequences
            for seconds in stats.waits_next:
                counts[bisect_left(bounds, seconds)] += 1
            self.next.sum += sum(stats.waits_next)

    def _count_drafts(self, stats: StepStats) -> None:
        self.num_drafts += stats.num_drafts
        self.draft_tokens += stats.draft_tokens
        self.accepted_tokens += stats.accepted_tokens
        add_counts(self.accepted_per_pos, stats.accepted_per_pos)

    def request_finished(self, request: FinishedRequest) -> None:
        """Count a finished request, whatever its end. Times of events that did not happen (a first token, a step) are not observed."""
        self.n.observe(request.n)
        self.preempted.observe(request.preemptions)
        self.requests["e2e"].observe(request.finished - request.arrival)
        if request.scheduled is not None:
            self.requests["queue"].observe(request.scheduled - request.arrival)
            self.requests["inference"].observe(request.finished - request.scheduled)
            if request.first_token is not None:
                self.requests["prefill"].observe(request.first_token - request.scheduled)
        if request.first_token is not None:
            decode = request.finished - request.first_token
            self.requests["decode"].observe(decode)
            if (longest := max(request.generated, default=0)) > 1:
                self.per_token.observe(decode / (longest - 1))
        self.sizes["prompt"].observe(request.prompt_tokens)
        self.sizes["computed"].observe(request.prompt_tokens - request.cached_tokens)
        self.sizes["max"].observe(max(request.generated, default=0))
        if request.max_tokens is not None:
            self.sizes["max_tokens"].observe(request.max_tokens)
        for count in request.generated:
            self.sizes["generation"].observe(count)
        for reason in request.reasons:
            self.ended[reason] = self.ended.get(reason, 0) + 1

    def rejected(self, reason: str) -> None:
        """Count a request that admission control refused; `reason` is one of REFUSALS."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def grammar_compiled(self, seconds: float) -> None:
        self.grammars.observe(seconds)

    @property
    def registry(self) -> CollectorRegistry:
        """This engine's own registry. ImportError without prometheus_client."""
        if self._registry is None:
            self._registry = registry_of([self])
        return self._registry


class NoMetrics:
    """EngineMetrics without prometheus_client: the same methods, which do nothing."""

    registry = None
    energy: EnergyTotals | None = None

    def step(self, stats: StepStats) -> None: ...

    def request_finished(self, request: FinishedRequest) -> None: ...

    def rejected(self, reason: str) -> None: ...

    def grammar_compiled(self, seconds: float) -> None: ...


def engine_metrics(
    model_name: str, engine: str = "0", max_model_len: int = 8192, cache_config: Mapping[str, object] | None = None
) -> EngineMetrics | NoMetrics:
    """An engine's metrics if prometheus_client is installed, else metrics that do nothing."""
    if importlib.util.find_spec("prometheus_client") is None:
        return NoMetrics()
    return EngineMetrics(model_name, engine, max_model_len, cache_config)


def registry_of(engines: Iterable[EngineMetrics]) -> CollectorRegistry:
    """One registry for several engines: each name occurs once, with the samples of every engine."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Scrape(list(engines)))  # type: ignore[arg-type]  # any object with `collect` is a collector
    return registry


class _Scrape:
    def __init__(self, engines: list[EngineMetrics]):
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        for family in _FAMILIES:
            yield family.metric(self._engines)


# --- the families


Labelled = dict[tuple[str, ...], "float | Histogram"]  # by the values of the family's own labels, in order


@dataclass(frozen=True)
class Family:
    """A name with its samples: `read` gives an engine's values by the values of `labels`, which follow model_name and engine."""

    kind: str  # "gauge", "counter" or "histogram"
    name: str
    meaning: str
    read: Callable[[EngineMetrics], Labelled]
    labels: tuple[str, ...] = ()

    def metric(self, engines: list[EngineMetrics]) -> Metric:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names = ["model_name", "engine", *self.labels]
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, self.meaning, labels=names)
            for engine in engines:
                for values, found in self.read(engine).items():
                    assert isinstance(found, Histogram)
                    histogram.add_metric([engine.model_name, engine.engine, *values], found.buckets(), found.sum)
            return histogram
        metric = (CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily)(self.name, self.meaning, labels=names)
        for engine in engines:
            for values, number in self.read(engine).items():
                assert not isinstance(number, Histogram)
                metric.add_metric([engine.model_name, engine.engine, *values], number)
        return metric


@dataclass(frozen=True)
class _CacheInfo(Family):
    """A 1 whose labels are the cache's configuration."""

    def metric(self, engines: list[EngineMetrics]) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        names = sorted({name for engine in engines for name in engine.cache_config})
        metric = GaugeMetricFamily(self.name, self.meaning, labels=["model_name", "engine", *names])
        for engine in engines:
            metric.add_metric([engine.model_name, engine.engine, *(engine.cache_config.get(name, "") for name in names)], 1)
        return metric


def _one(read: Callable[[EngineMetrics], float | Histogram]) -> Callable[[EngineMetrics], Labelled]:
    return lambda m: {(): read(m)}


def _by(read: Callable[[EngineMetrics], Mapping[str, float | Histogram]]) -> Callable[[EngineMetrics], Labelled]:
    return lambda m: {(name,): value for name, value in read(m).items()}


def _energy(read: Callable[[EnergyTotals], Mapping[str, float]]) -> Callable[[EngineMetrics], Labelled]:
    return lambda m: {} if m.energy is None else {(name,): value for name, value in list(read(m.energy).items())}


def _usage(m: EngineMetrics) -> float:
    return m.last.blocks_used / max(1, m.last.blocks_used + m.last.blocks_cached + m.last.blocks_free)


def _fragmentation(m: EngineMetrics) -> float:
    slots = m.last.blocks_used * m.block_size
    return max(0.0, 1 - m.last.tokens_held / slots) if slots else 0.0


_FAMILIES = (
    Family("gauge", "vllm:num_requests_running", "Sequences in the running batch.", _one(lambda m: m.last.running)),
    Family("gauge", "vllm:num_requests_waiting", "Sequences in the queue.", _one(lambda m: m.last.waiting)),
    Family(
        "gauge", "vllm:num_requests_waiting_by_reason", "Sequences in the queue, by what they wait for.",
        _by(lambda m: {"capacity": m.last.waiting - m.last.deferred, "deferred": m.last.deferred}), ("reason",),
    ),
    Family("gauge", "vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences hold; 1 is all.", _one(_usage)),
    _CacheInfo("gauge", "vllm:cache_config_info", "The KV cache's configuration, as labels.", lambda m: {}),
    Family("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", _one(lambda m: m.queried_tokens)),
    Family("counter", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", _one(lambda m: m.cached_tokens)),
    Family("counter", "vllm:num_preemptions", "Sequences preempted.", _one(lambda m: m.recomputed + m.swapped)),
    Family("counter", "vllm:prompt_tokens", "Prompt tokens computed or found cached.", _one(lambda m: m.prompt_tokens + m.cached_tokens)),
    Family(
        "counter", "vllm:prompt_tokens_by_source", "Prompt tokens, by where their keys and values came from.",
        _by(lambda m: {"local_compute": m.prompt_tokens, "local_cache_hit": m.cached_tokens}), ("source",),
    ),
    Family("counter", "vllm:prompt_tokens_cached", "Prompt tokens that needed no computing.", _one(lambda m: m.cached_tokens)),
    Family("counter", "vllm:generation_tokens", "Tokens generated.", _one(lambda m: m.generated_tokens)),
    Family("counter", "vllm:spec_decode_num_drafts", "Drafts checked, one a sequence and step.", _one(lambda m: m.num_drafts)),
    Family("counter", "vllm:spec_decode_num_draft_tokens", "Tokens of drafts.", _one(lambda m: m.draft_tokens)),
    Family("counter", "vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted.", _one(lambda m: m.accepted_tokens)),
    Family(
        "counter", "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place in the draft.",
        _by(lambda m: {str(i): count for i, count in enumerate(list(m.accepted_per_pos))}), ("position",),
    ),  # fmt: skip
    Family("counter", "vllm:request_success", "Finished continuations, by reason.", _by(lambda m: dict(m.ended)), ("finished_reason",)),
    Family("counter", "vllm:admission_rejections", "Requests refused, by reason.", _by(lambda m: dict(m.refused)), ("reason",)),
    Family("histogram", "vllm:time_to_first_token_seconds", "From arrival to the first token.", _one(lambda m: m.first)),
    Family("histogram", "vllm:inter_token_latency_seconds", "From a sequence's token to its next.", _one(lambda m: m.next)),
    Family(
        "histogram", "vllm:request_time_per_output_token_seconds", "Mean time between a request's tokens.", _one(lambda m: m.per_token)
    ),
    Family("histogram", "vllm:e2e_request_latency_seconds", "From arrival to the end.", _one(lambda m: m.requests["e2e"])),
    Family("histogram", "vllm:request_queue_time_seconds", "From arrival to the first step.", _one(lambda m: m.requests["queue"])),
    Family("histogram", "vllm:request_inference_time_seconds", "From the first step to the end.", _one(lambda m: m.requests["inference"])),
    Family("histogram", "vllm:request_prefill_time_seconds", "From first step to first token.", _one(lambda m: m.requests["prefill"])),
    Family("histogram", "vllm:request_decode_time_seconds", "From the first token to the end.", _one(lambda m: m.requests["decode"])),
    Family("histogram", "vllm:request_prompt_tokens", "Tokens of a prompt.", _one(lambda m: m.sizes["prompt"])),
    Family("histogram", "vllm:request_generation_tokens", "Tokens of a continuation.", _one(lambda m: m.sizes["generation"])),
    Family("histogram", "vllm:iteration_tokens_total", "Tokens of a step, of prompts and generated.", _one(lambda m: m.step_tokens)),
    Family(
        "histogram", "vllm:request_max_num_generation_tokens", "Tokens of the longest continuation.", _one(lambda m: m.sizes["max"])
    ),
    Family("histogram", "vllm:request_params_n", "The parameter n.", _one(lambda m: m.n)),
    Family("histogram", "vllm:request_params_max_tokens", "The parameter max_tokens, if set.", _one(lambda m: m.sizes["max_tokens"])),
    Family("histogram", "vllm:request_num_preemptions", "Preemptions of a request.", _one(lambda m: m.preempted)),
    Family(
        "histogram", "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", _one(lambda m: m.sizes["computed"])
    ),
    Family("histogram", "tinyvllm:step_seconds", "Time of a step, by phase.", _by(lambda m: m.steps), ("phase",)),
    Family(
        "gauge", "tinyvllm:block_pool_blocks", "KV blocks: held by sequences, kept for later, free.",
        _by(lambda m: {"used": m.last.blocks_used, "cached": m.last.blocks_cached, "free": m.last.blocks_free}), ("state",),
    ),
    Family("gauge", "tinyvllm:kv_fragmentation_ratio", "Share of the slots in used blocks that hold no token.", _one(_fragmentation)),
    Family("counter", "tinyvllm:prefix_cache_evictions", "Cached blocks evicted.", _one(lambda m: m.evictions)),
    Family(
        "counter", "tinyvllm:preemptions", "Sequences preempted, by what happened to their blocks.",
        _by(lambda m: {"recompute": m.recomputed, "swap": m.swapped}), ("kind",),
    ),
    Family(
        "counter", "tinyvllm:swap_bytes", "Bytes of KV blocks moved between device and host.",
        _by(lambda m: {"out": m.swapped_out, "in": m.swapped_in}), ("direction",),
    ),
    Family("counter", "tinyvllm:energy_joules", "Joules of steps: above the idle machine, and of the idle machine.",
           _energy(lambda e: {"active": e.active, "idle": e.idle} if e.counters else {}), ("part",)),
    Family("counter", "tinyvllm:energy_counter_joules", "Joules of the whole machine since the start.",
           _energy(lambda e: e.counters), ("counter",)),
    Family("gauge", "tinyvllm:energy_idle_watts", "What the idle machine draws.",
           lambda m: {(): m.energy.idle_watts} if m.energy is not None and m.energy.counters else {}),
    Family("gauge", "tinyvllm:energy_not_measured", "A 1 for each part whose energy is not measured, with the reason.",
           lambda m: {} if m.energy is None else dict.fromkeys(list(m.energy.not_measured.items()), 1), ("part", "reason")),
    Family("histogram", "tinyvllm:grammar_compile_seconds", "Time to compile a request's grammar.", _one(lambda m: m.grammars)),
    Family("counter", "tinyvllm:forced_tokens", "Generated tokens forced by a grammar.", _one(lambda m: m.forced_tokens)),
)  # fmt: skip
