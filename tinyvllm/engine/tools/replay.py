"""A recorded run once more: the same arrivals and aborts before the same steps, and where what comes out differs from what came.

What times decided is taken from the record: the clock shows what it showed, who was refused is not asked for again, and blocks are swapped
in the steps in which they were. Everything else the engine decides anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tinyvllm.config import EngineConfig, nearest, resolve
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.segments import Segment
from tinyvllm.engine.tools.record import FORMAT, SWITCHES, Event, Recorder, fingerprint, onward
from tinyvllm.errors import ArgumentError, FormatError, RequestError
from tinyvllm.request import BeamSearchParams, RequestOptions, SamplingParams, StructuredOutputsParams
from tinyvllm.scheduler import Rates

_FROM_OUTSIDE = {"add", "abort", "refused", "hold", "release"}
_CUT = ("abort", "deadline")  # reasons whose moment depends on the step, so that another schedule leaves more or fewer tokens


@dataclass(frozen=True)
class Run:
    """A recorded file, read. `schedule` holds n, index, start, tokens of every entry, and the rounds, by step."""

    path: str
    header: Event
    arrivals: list[Event]  # what came in: add, abort, refused, hold and release events in their order
    schedule: dict[int, tuple[list[int], int]]
    ends: list[Event]
    times: list[tuple[int, float]]  # what the clock showed in a step
    swapped: frozenset[int]  # steps
    last_step: int
    whole: bool  # False: the last line is cut off

    @property
    def added(self) -> list[Event]:
        return [event for event in self.arrivals if "add" in event]


@dataclass(frozen=True)
class Difference:
    """The first token that differs. `step` is the recorded step that computed it, None where that is not known."""

    request_id: str
    continuation: int
    index: int
    expected: object
    got: object
    step: int | None


@dataclass
class Outcome:
    """What a replay found. `step` is the first step whose schedule differs, with both runs of (request, continuation, start, tokens)."""

    requests: int = 0  # that were over in the record
    tokens: int = 0
    difference: Difference | None = None
    step: int | None = None
    expected: list[tuple[str, int, int, int]] = field(default_factory=list)
    got: list[tuple[str, int, int, int]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    refused: int = 0  # in the record

    @property
    def identical(self) -> bool:
        return self.difference is None and self.step is None


# --- reading


def read_run(path: str) -> Run:
    """A file that a Recorder has written. ArgumentError if it is not there, FormatError if it is something else.

    A last line that is cut off, as of a process that was killed, is passed over and told by `whole`.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"replay: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"replay: {path} is no text; expected what --record has written") from error
    lines = text.split("\n")
    events = [_parsed(path, number, line) for number, line in enumerate(lines[:-1], 1) if line]
    if not events or events[0].get("format") != FORMAT or not isinstance(events[0].get("config"), dict):
        raise FormatError(f"replay: {path} does not begin like a record of format {FORMAT}; expected what --record has written")
    return _sorted_out(path, events, whole=not lines[-1])


def _parsed(path: str, number: int, line: str) -> Event:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise FormatError(f"replay: {path}:{number} is not JSON: {error}") from error
    if not isinstance(event, dict) or (number > 1 and type(event.get("step")) is not int):
        raise FormatError(f"replay: {path}:{number} is no event of a record: {line[:60]!r}")
    return event


def _sorted_out(path: str, events: list[Event], whole: bool) -> Run:
    header, *rest = events
    try:
        return Run(
            path, header, [e for e in rest if _FROM_OUTSIDE & e.keys()], schedule_of(rest), [e for e in rest if "end" in e],
            [(e["step"], e["t"]) for e in rest if "add" not in e and e.get("t") is not None],
            frozenset(e["step"] for e in rest if "swap" in e), max((e["step"] for e in rest), default=0), whole,
        )  # fmt: skip
    except (KeyError, TypeError, IndexError) as error:
        raise FormatError(f"replay: {path}: an event of the record lacks something: {error!r}") from error


def schedule_of(events: list[Event]) -> dict[int, tuple[list[int], int]]:
    """By step, what ran, with the steps written out that only went on, and how many times over."""
    found: dict[int, tuple[list[int], int]] = {}
    run, rounds = [], 1
    for event in events:
        if "run" in event:
            run, rounds = event["run"], event.get("rounds", 1)
        elif "on" in event:
            run, rounds = onward(run, rounds), event["on"]
        else:
            continue
        found[event["step"]] = run, rounds
    return found


# --- running


def config_of(run: Run, overrides: dict[str, Any]) -> EngineConfig:
    """The recorded engine's configuration with `overrides` in place of its own. ArgumentError for what is no option of this version."""
    settings = dict(run.header["config"])
    known = [f.name for f in fields(EngineConfig)]
    for name, value in list(settings.items()):
        if name not in known:
            hint = nearest(name, known)
            raise ArgumentError(f"replay: {run.path} was recorded with {name}={value!r}, which this version does not know{hint}")
    # what a folder held at the time is not in the record
    settings |= {"record": None, "prefix_cache_dir": None} | overrides
    if overrides.get("kv_memory") is not None and "num_blocks" not in overrides:
        settings["num_blocks"] = None
    return resolve(settings.pop("model"), **settings)


def replay(run: Run, config: EngineConfig, tokens_only: bool = False, say: Callable[[str], None] = lambda text: None) -> Outcome:
    """Run it again and compare. With `tokens_only` the schedule may differ: then times do not count, and a request that was cut off need
    only agree as far as both go.

    `say` gets remarks about what is not as it was. ArgumentError where the record cannot be run: a request with functions in it
    (`tokens_only` leaves it out), or a model that is another than the recorded one.
    """
    left_out = [event["add"] for event in run.added if "functions" in event]
    if left_out and not tokens_only:
        raise ArgumentError(
            f"replay: request {left_out[0]} has logits processors, and functions cannot be recorded; --tokens-only leaves it out and "
            "compares the others"
        )
    events: list[Event] = []
    clock = _RecordedClock(run) if not tokens_only else time.monotonic
    engine = Engine(config, recorder=Recorder(events.append), clock=clock)
    try:
        _check(run, engine, config, say)
        if not tokens_only:
            engine.scheduler.rates = _RecordedRates()
        _drive(run, _Arrivals(engine, clock, tokens_only, say), tokens_only)
    finally:
        engine.close()
    return compare(run, events, tokens_only, left_out)


def _check(run: Run, engine: Engine, config: EngineConfig, say: Callable[[str], None]) -> None:
    checkpoint = engine.runner.checkpoint
    if fingerprint(checkpoint.config, checkpoint.tensors) != run.header.get("fingerprint"):
        if config.model == run.header["config"]["model"]:
            raise ArgumentError(f"replay: {config.model} is not the model that it was when {run.path} was recorded; --model names another")
        say(f"another model than the recorded {run.header['config']['model']}")
    for name in ("device", "dtype"):
        now = str(engine.config.device if name == "device" else engine.runner.dtype)
        then = str(run.header["config"]["device"] if name == "device" else run.header.get("dtype"))
        if now != then:
            say(f"{name} {now}, recorded with {then}")
    switches = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    if switches != run.header.get("switches"):
        say(f"environment {switches or 'without switches'}, recorded with {run.header.get('switches') or 'none'}")
    if run.header["config"].get("prefix_cache_dir"):
        say("recorded with a prefix cache from disk, which is empty here: the schedule may differ")
    if not run.whole:
        say("the record's last line is cut off")


class _RecordedClock:
    """Shows what the recorded engine's clock showed. `step` and `now` are set by whoever drives the engine."""

    def __init__(self, run: Run):
        self._times = dict(run.times)
        self.now = run.added[0]["t"] if run.added else 0.0

    def turn_to(self, step: int) -> None:
        self.now = self._times.get(step, self.now)

    def __call__(self) -> float:
        return self.now


class _RecordedRates(Rates):
    """Rates by which a swap costs nothing while `swaps` is set and too much else, and nobody would be late."""

    swaps = False

    @property
    def prefill_token(self) -> float | None:
        return math.inf if self.swaps else 0.0

    @property
    def decode_step(self) -> float | None:
        return 0.0


def _drive(run: Run, arrivals: _Arrivals, tokens_only: bool) -> None:
    engine, clock = arrivals.engine, arrivals.clock
    late: dict[int, list[str]] = {}
    for event in run.ends if tokens_only else ():
        if "deadline" in event["reasons"]:
            late.setdefault(event["step"], []).append(event["end"])
    step = 0
    waiting = iter(run.arrivals)
    arrival = next(waiting, None)
    while arrival is not None or step < run.last_step or (tokens_only and engine.has_work()):
        while arrival is not None and arrival["step"] <= step:
            arrivals.take(arrival)
            arrival = next(waiting, None)
        step += 1
        for request_id in late.get(step, ()):
            engine.abort(request_id)
        if isinstance(clock, _RecordedClock):
            clock.turn_to(step)
        rates = engine.scheduler.rates
        if isinstance(rates, _RecordedRates):
            rates.swaps = step in run.swapped
        engine.step()
        if isinstance(rates, _RecordedRates):
            rates.swaps = False  # between steps they tell who would be late


class _Arrivals:
    """What came in between the steps, done to another engine."""

    def __init__(self, engine: Engine, clock: Callable[[], float], tokens_only: bool, say: Callable[[str], None]):
        self.engine, self.clock = engine, clock
        self._tokens_only, self._say = tokens_only, say
        self._tried: dict[int, Event] = {}  # the first event of each segment that is not held: it has the tokens
        self._segments: dict[int, Segment] = {}

    def take(self, event: Event) -> None:
        if "abort" in event:
            self.engine.abort(event["abort"])
        elif "add" in event and "functions" not in event:
            self._add(event)
        elif "hold" in event:
            self._hold(event)
        elif "release" in event and (segment := self._segments.pop(event["release"], None)) is not None:
            segment.release()

    def _add(self, event: Event) -> None:
        if isinstance(self.clock, _RecordedClock):
            self.clock.now = event["t"]
        options = dict(event["terms"])
        if self._tokens_only:
            options = {name: value for name, value in options.items() if "deadline" not in name}
        self.engine.add(event["add"], list(event["prompt"]), _params(event), None, RequestOptions(**options))

    def _hold(self, event: Event) -> None:
        """One try, as then. With other limits it may end otherwise; that is said, and the run goes on."""
        number, segments, held = event["hold"], self.engine.segments, False
        first = self._tried.setdefault(number, event)
        with contextlib.suppress(RequestError):  # too many blocks, or no prefix cache
            segment = segments.new(first["tokens"], [], None, first.get("salt"))
            if held := segments.hold(segment):
                self._segments[number] = segment
        if held != event["held"]:
            words = ("is not held", "was") if event["held"] else ("is held", "was not")
            self._say(f"segment {number} {words[0]} before step {event['step'] + 1}, and {words[1]} in the record")
        if event["held"]:
            del self._tried[number]


def _params(event: Event) -> SamplingParams | BeamSearchParams:
    given = dict(event["params"])
    if event.get("beams"):
        return BeamSearchParams(**given)
    if given.get("logit_bias"):
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    if given.get("structured_outputs"):
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)


# --- comparing


def compare(run: Run, events: list[Event], tokens_only: bool = False, left_out: list[str] | None = None) -> Outcome:
    """What was recorded against the events of a replay."""
    left_out = left_out or []
    expected = [end for end in run.ends if end["end"] not in left_out]
    tokens = sum(len(ids) for end in expected for ids in end["tokens"])
    outcome = Outcome(len(expected), tokens, left_out=left_out, refused=sum("refused" in event for event in run.arrivals))
    outcome.difference = _first_difference(run, expected, [event for event in events if "end" in event], tokens_only)
    if not tokens_only:
        _compare_schedules(run, schedule_of(events), [event["add"] for event in events if "add" in event], outcome)
    return outcome


def _first_difference(run: Run, expected: list[Event], got: list[Event], tokens_only: bool) -> Difference | None:
    """Of the requests in the order of their recorded ends, the one whose differing token was computed first."""
    ends: dict[str, list[Event]] = {}
    for event in got:
        ends.setdefault(event["end"], []).append(event)  # a name may be used again
    found: list[Difference] = []
    for end in expected:
        mine = ends.get(end["end"], [])
        if not mine:
            found.append(Difference(end["end"], 0, 0, end["reasons"], "no end", end["step"]))
            continue
        found += _differences(run, end, mine.pop(0), tokens_only)
    return min(found, key=lambda d: math.inf if d.step is None else d.step, default=None)


def _differences(run: Run, end: Event, mine: Event, tokens_only: bool) -> Iterator[Difference]:
    cut = tokens_only and any(reason in _CUT for reason in (*end["reasons"], *mine["reasons"]))
    if cut and any("beams" in event for event in run.added if event["add"] == end["end"]):
        return  # the best of a search so far is nothing that another schedule would have to agree with
    if len(end["tokens"]) != len(mine["tokens"]):
        yield Difference(end["end"], 0, 0, f"{len(end['tokens'])} continuations", f"{len(mine['tokens'])}", end["step"])
        return
    parts = zip(end["tokens"], mine["tokens"], end["reasons"], mine["reasons"], strict=True)
    for i, (ours, theirs, reason, now) in enumerate(parts):
        both = min(len(ours), len(theirs))
        at = next((k for k in range(both) if ours[k] != theirs[k]), both)
        if at < both or (not cut and (len(ours), reason) != (len(theirs), now)):
            first, second = (ids[at] if at < len(ids) else f"the end ({why})" for ids, why in ((ours, reason), (theirs, now)))
            yield Difference(end["end"], i, at, first, second, _step_of(run, end["end"], i, at))


def _step_of(run: Run, request_id: str, continuation: int, index: int) -> int | None:
    """The recorded step that drew a token: it computed the token before it, and was the last to do so."""
    numbers = [n for n, event in enumerate(run.added) if event["add"] == request_id]
    places = {n: len(run.added[n]["prompt"]) + index - 1 for n in numbers}
    found = None
    for step, (entries, rounds) in run.schedule.items():
        for n, i, start, count in zip(*(entries[k::4] for k in range(4)), strict=True):
            if n in places and i == continuation and start <= places[n] < start + count * rounds:
                found = step
    return found


def _compare_schedules(run: Run, got: dict[int, tuple[list[int], int]], names: list[str], outcome: Outcome) -> None:
    for step in sorted({*run.schedule, *got}):
        first, second = run.schedule.get(step, ([], 1)), got.get(step, ([], 1))
        if first != second:
            outcome.step = step
            outcome.expected = _named(first[0], [event["add"] for event in run.added])
            outcome.got = _named(second[0], names)
            return


def _named(run: list[int], names: list[str]) -> list[tuple[str, int, int, int]]:
    rows = zip(*(run[k::4] for k in range(4)), strict=True)
    return [(names[n] if 0 <= n < len(names) else "?", index, start, count) for n, index, start, count in rows]
