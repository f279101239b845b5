"""A recorded day of traffic with another drafter, without running the target: what it would have gained.

The recording (`--record`) holds the tokens of every output. With exact acceptance they would have been the same with any drafter, so a
draft is right exactly if it is in the recording. Each step of the simulation lets the drafter guess for the sequences that run, accepts
what the recording confirms, and moves a virtual clock by the cost of its rows; requests arrive at their recorded times. The result is
compared with the same simulation without drafts: what it leaves out (preemption, chunked prefill, prefix cache) is left out of both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from tinyvllm.engine.speculation import IDLE_TOKENS, PROMPT_TOKENS
from tinyvllm.engine.tools.record import Event
from tinyvllm.engine.tools.recording import Run
from tinyvllm.errors import ArgumentError, FormatError
from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.drafters import config_of
from tinyvllm.lab.sweep import PLAIN, DrafterSpec
from tinyvllm.lab.target import DraftCounts
from tinyvllm.request import RequestOptions, SamplingParams
from tinyvllm.request import Sequence as TokenSequence
from tinyvllm.speculate.opening import open_controller, open_lookup
from tinyvllm.speculate.protocol import Controller, Draft, Drafter, DraftRequest, LookupDrafter
from tinyvllm.speculate.watch import Watch
from tinyvllm.speculative import HEADS, LOOKUPS, SpeculativeConfig

MIN_SAMPLES = 3  # steps of a number of rows, before its median is a point of the curve


@dataclass(frozen=True)
class Recorded:
    """One continuation of a recorded request: when it arrived, in milliseconds, its tokens, and whose texts it may share."""

    arrival: float
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    options: RequestOptions
    tenant: str


@dataclass(frozen=True)
class Traffic:
    """What the simulation needs of a recording. `skipped` counts requests without an end, and those of beam search."""

    sequences: tuple[Recorded, ...]
    max_num_seqs: int
    skipped: int


def traffic_of(run: Run) -> Traffic:
    """The sequences of a recording in the order of their arrival. FormatError if an event is not what a recorder writes."""
    ends: dict[str, deque[Event]] = {}
    for end in run.ends:
        ends.setdefault(end["end"], deque()).append(end)  # an id may be used again
    sequences: list[Recorded] = []
    skipped = 0
    try:
        for event in run.added:
            mine = ends.get(event["add"])
            ended = mine.popleft() if mine else None
            if ended is None or event.get("beams"):
                skipped += 1
                continue
            sequences += _recorded(event, ended)
        return Traffic(tuple(sorted(sequences, key=lambda one: one.arrival)), int(run.header["config"]["max_num_seqs"]), skipped)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"lab: {run.path}: an event of the recording lacks a field: {error!r}") from error


def _recorded(event: Event, end: Event) -> list[Recorded]:
    """A sequence for each continuation with output."""
    options = event["options"]
    own = RequestOptions(key=options.get("key", ""), cache_salt=options.get("cache_salt"))
    tenant = f"{own.cache_salt or ''}\0{own.key}"
    prompt = tuple(map(int, event["prompt"]))
    return [Recorded(1000 * float(event["t"]), prompt, tuple(map(int, tokens)), own, tenant) for tokens in end["tokens"] if tokens]


def costs_of(run: Run) -> StepCosts | None:
    """Milliseconds of a step by rows, from the recorded times of steps of decodes; None if they are of fewer than two numbers of rows."""
    times = dict(run.times)
    samples: dict[int, list[float]] = {}
    for step, (entries, rounds) in run.schedule.items():
        counts = entries[3::4]
        if step in times and step + 1 in times and counts and all(count == 1 for count in counts):
            samples.setdefault(len(counts), []).append(1000 * (times[step + 1] - times[step]) / rounds)
    points = [(rows, median(each)) for rows, each in samples.items() if len(each) >= MIN_SAMPLES and median(each) > 0]
    return StepCosts.of(points) if len(points) > 1 else None


@dataclass
class Outcome:
    """What a simulation did. Milliseconds are of the virtual clock: `busy` while any sequence ran, `latencies` from arrivals to ends."""

    drafter: str
    k: int | None
    counts: DraftCounts = field(default_factory=DraftCounts)
    tokens: int = 0
    busy: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens after the first of each sequence, by its turns."""
        turns = self.counts.turns or 0
        return (turns + sum(self.counts.accepted)) / turns if turns else 1.0


@dataclass
class _Running:
    recorded: Recorded
    sequence: TokenSequence

    @property
    def num_missing(self) -> int:
        return len(self.recorded.output) - len(self.sequence.output_token_ids)

    def following(self, count: int) -> tuple[int, ...]:
        """The next recorded tokens."""
        known = len(self.sequence.output_token_ids)
        return self.recorded.output[known : known + count]


class Simulation:
    """One drafter over the whole traffic. `clock` measures what the drafter itself takes, which counts as time of its step."""

    def __init__(
        self,
        traffic: Traffic,
        costs: StepCosts,
        spec: DrafterSpec = PLAIN,
        k: int | None = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._traffic, self._costs, self._clock = traffic, costs, clock
        self._drafter: Drafter | None = None
        self._controller: Controller | None = None
        self._watch: Watch | None = None
        if spec.speculates:
            config = check_lookup(spec, k)
            self._drafter = open_lookup(config)
            self._controller = open_controller(config, self._drafter)
            if isinstance(self._drafter, LookupDrafter) and self._controller.pauses:
                self._watch = Watch(self._drafter)
        self.outcome = Outcome(spec.label, k, DraftCounts(draft_ms=0.0))
        self._now = 0.0
        self._running: list[_Running] = []

    def run(self, advance: Callable[[], None] = lambda: None) -> Outcome:
        """Simulate to the end; `advance` is called for each sequence that ends."""
        waiting = deque(enumerate(self._traffic.sequences))
        while waiting or self._running:
            if not self._running:
                while isinstance(self._drafter, LookupDrafter) and self._drafter.learn_past(IDLE_TOKENS):
                    pass
                self._now = max(self._now, waiting[0][1].arrival)
            while waiting and waiting[0][1].arrival <= self._now and len(self._running) < self._traffic.max_num_seqs:
                self._start(*waiting.popleft())
            self._end_finished(advance)
            if self._running:
                self._step()
                self._end_finished(advance)
        return self.outcome

    def _start(self, number: int, recorded: Recorded) -> None:
        """The prompt's step, which draws the first token."""
        sequence = TokenSequence(number, str(number), list(recorded.prompt), SamplingParams(max_tokens=None), options=recorded.options)
        running = _Running(recorded, sequence)
        self._pass(self._costs(len(recorded.prompt)))
        if isinstance(self._drafter, LookupDrafter):
            self._drafter.learn_past(PROMPT_TOKENS)
        self._append(running, recorded.output[:1])
        self._running.append(running)

    def _step(self) -> None:
        drafts = self._drafts()
        rows = 0
        for running, draft in zip(self._running, drafts, strict=True):
            right = running.following(len(draft) + 1)
            accepted = next((i for i, token in enumerate(draft) if right[i] != token), len(draft))
            self.outcome.counts.add_chain(len(draft), accepted)
            if self._controller is not None and draft:
                self._controller.observe(running.sequence, len(draft), accepted)
            if self._watch is not None and accepted:
                self._watch.trust(running.sequence)
            rows += 1 + len(draft)
            self._append(running, right[: accepted + 1])
        counts = self.outcome.counts
        counts.turns, counts.steps = (counts.turns or 0) + len(self._running), counts.steps + 1
        milliseconds = self._costs(rows)
        if self._controller is not None:
            num_sequences = len(self._running)
            self._controller.observe_step(num_sequences, rows - num_sequences, milliseconds / 1000)
        self._pass(milliseconds)

    def _drafts(self) -> list[list[int]]:
        """The drafts of each running sequence, none longer than what the recording can confirm."""
        if self._drafter is None or self._controller is None:
            return [[] for _ in self._running]
        started, sequences = self._clock(), [running.sequence for running in self._running]
        candidates = self._running
        if self._watch is not None:
            recurring = {sequence.sequence_id for sequence in self._watch.recurring(self._running)}
            candidates = [running for running in self._running if running.sequence.sequence_id in recurring]
        chosen = dict[int, list[int]]()
        if candidates:
            limits = self._controller.limits([running.sequence for running in candidates], len(sequences))
            each = [(r, min(limit, r.num_missing - 1)) for r, limit in zip(candidates, limits, strict=True)]
            chosen = self._chosen([DraftRequest(r.sequence, n, r.recorded.tenant) for r, n in each if n > 0], len(sequences))
        seconds = self._clock() - started
        self.outcome.counts.draft_ms = (self.outcome.counts.draft_ms or 0.0) + 1000 * seconds
        self._pass(1000 * seconds)
        return [chosen.get(sequence.sequence_id, []) for sequence in sequences]

    def _chosen(self, requests: list[DraftRequest], num_sequences: int) -> dict[int, list[int]]:
        assert self._drafter is not None and self._controller is not None
        if not requests:
            return {}
        drafts: list[Draft] = self._drafter.propose(requests)
        numbers = self._controller.choose(requests, drafts, num_sequences)
        each = zip(requests, drafts, numbers, strict=True)
        return {request.sequence.sequence_id: draft.tokens[: min(number, request.max_drafts)] for request, draft, number in each}

    def _append(self, running: _Running, tokens: Sequence[int]) -> None:
        running.sequence.output_token_ids += tokens
        self.outcome.tokens += len(tokens)
        if self._drafter is not None:
            self._drafter.observe(running.sequence, len(tokens))

    def _end_finished(self, advance: Callable[[], None]) -> None:
        for running in [one for one in self._running if not one.num_missing]:
            self._running.remove(running)
            self.outcome.latencies.append(self._now - running.recorded.arrival)
            if self._drafter is not None and self._controller is not None:
                self._drafter.forget(running.sequence)
                self._controller.forget(running.sequence)
            if self._watch is not None:
                self._watch.forget(running.sequence)
            advance()

    def _pass(self, milliseconds: float) -> None:
        self._now += milliseconds
        self.outcome.busy += milliseconds


def check_lookup(spec: DrafterSpec, k: int | None) -> SpeculativeConfig:
    """Its configuration. ArgumentError for a drafter that computes with a model: the recording has tokens and no hidden states."""
    config = config_of(spec, k)
    texts = [method for method in LOOKUPS if method not in HEADS]
    if config.method not in texts:
        raise ArgumentError(
            f"--traffic: the drafter {spec.label!r} runs a model, and a recording has tokens alone; give " + " or ".join(texts)
        )
    return config


HEADINGS = ("drafter", "k", "tokens", "accepted", "tokens/step", "steps", "busy s", "speed-up", "latency ms", "drafting ms/step")


def table(outcomes: Sequence[Outcome]) -> str:
    """A table in Markdown, the first outcome being the one without drafts; latencies are medians."""
    rows = [HEADINGS, *(_cells(one, outcomes[0]) for one in outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])


def _cells(one: Outcome, plain: Outcome) -> tuple[str, ...]:
    drafted, steps = sum(one.counts.drafted), max(1, one.counts.steps)
    accepted = f"{100 * sum(one.counts.accepted) / drafted:.1f}%" if drafted else ""
    k = "" if one is plain else "auto" if one.k is None else str(one.k)
    drafting = "" if one is plain else f"{(one.counts.draft_ms or 0.0) / steps:.3f}"
    figures = (f"{one.tokens_per_step:.2f}", str(one.counts.steps), f"{one.busy / 1000:.2f}", f"{plain.busy / one.busy:.2f}")
    return (one.drafter, k, str(one.tokens), accepted, *figures, f"{median(one.latencies):.0f}", drafting)
