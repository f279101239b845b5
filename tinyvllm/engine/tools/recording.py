"""Reading of a recording: the file that a Recorder wrote, as a Run."""

from __future__ import annotations

import json

from tinyvllm.config.values import expand_home
from tinyvllm.engine.tools.record import FORMAT, Event, advanced_run
from tinyvllm.errors import ArgumentError, FormatError
from tinyvllm.foreign import read_bounded
from tinyvllm.lazy_dataclass import dataclass

READABLE = (1, FORMAT)
MAX_FILE = 256 << 20  # bytes: millions of steps; what is made of them takes several times as many
_ARRIVALS = {"add", "abort", "refused", "hold", "release"}


@dataclass(frozen=True)
class Run:
    """A recording that was read. `schedule` has n, index, start, tokens of every entry, and the rounds, by step."""

    path: str
    header: Event
    arrivals: list[Event]  # add, abort, refused, hold and release events in their order
    schedule: dict[int, tuple[list[int], int]]
    ends: list[Event]
    times: list[tuple[int, float]]  # the time of the clock in a step
    swapped: frozenset[int]  # steps
    drafts: dict[tuple[int, int, int], list[int]]  # of step, n and index
    ahead: frozenset[int]  # steps that were launched before the tokens of the one before them were read
    max_chunk_tokens: dict[int, int]  # what the rates allowed the chunks of steps with decodes, by the step from which on they did
    last_step: int
    complete: bool  # False: the last line is cut off

    @property
    def added(self) -> list[Event]:
        return [event for event in self.arrivals if "add" in event]


def read_run(path: str) -> Run:
    """Read a file that a Recorder wrote. ArgumentError if it cannot be read, FormatError if it is something else or beyond MAX_FILE.

    A last line that is cut off, as by a process that was killed, is skipped, and `complete` is False.
    """
    file = expand_home("replay", path)
    try:
        text = read_bounded(file, MAX_FILE).decode("utf-8")
    except OSError as error:
        raise ArgumentError(f"replay: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"replay: {path} is not UTF-8 text; expected a file that --record wrote") from error
    except ValueError as error:
        raise FormatError(f"replay: {path} cannot be replayed: {error}; its first lines can (head -n)") from error
    lines = text.split("\n")
    events = [_parsed(path, number, line) for number, line in enumerate(lines[:-1], 1) if line]
    if not events or events[0].get("format") not in READABLE or not isinstance(events[0].get("config"), dict):
        raise FormatError(f"replay: {path} does not begin like a recording of format 1 or {FORMAT}; expected a file that --record wrote")
    if events[0]["format"] == 1:
        events = [_from_format_1(event) for event in events]
    return _run_of(path, events, complete=not lines[-1])


def _from_format_1(event: Event) -> Event:
    """An event with the names of format 2."""
    if "add" not in event or "terms" not in event:
        return event
    later = {"options" if name == "terms" else name: value for name, value in event.items()}
    if marks := later.get("params", {}).get("thinking"):
        params = {name: value for name, value in later["params"].items() if name != "thinking"}
        begins = {} if marks.get("begins") in (None, "before", "inside") else {"begins": "after"}  # the third place had another name
        later["params"] = {**params, "reasoning": {**marks, **begins}}
    return later


def _parsed(path: str, number: int, line: str) -> Event:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"replay: {path}:{number} is not JSON: {error}") from error
    if not isinstance(event, dict) or (number > 1 and type(event.get("step")) is not int):
        raise FormatError(f"replay: {path}:{number} is not an event of a recording: {line[:60]!r}")
    return event


def _run_of(path: str, events: list[Event], complete: bool) -> Run:
    header, *rest = events
    try:
        return Run(
            path, header, [e for e in rest if _ARRIVALS & e.keys()], schedule_of(rest), [e for e in rest if "end" in e],
            [(e["step"], e["t"]) for e in rest if "add" not in e and e.get("t") is not None],
            frozenset(e["step"] for e in rest if "swap" in e), drafts_of(rest),
            frozenset(e["step"] for e in rest if "ahead" in e),
            {e["step"]: int(e["chunks"]) for e in rest if "chunks" in e},
            max((e["step"] for e in rest), default=0), complete,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FormatError(f"replay: {path}: an event lacks a field: {error!r}") from error


def schedule_of(events: list[Event]) -> dict[int, tuple[list[int], int]]:
    """The entries that ran, by step, and how many times in a row; repeated steps are written out."""
    schedule: dict[int, tuple[list[int], int]] = {}
    run, rounds = [], 1
    for event in events:
        if "run" in event:
            run, rounds = event["run"], event.get("rounds", 1)
        elif "on" in event:
            run, rounds = advanced_run(run, rounds), event["on"]
        else:
            continue
        schedule[event["step"]] = run, rounds
    return schedule


def drafts_of(events: list[Event]) -> dict[tuple[int, int, int], list[int]]:
    """The drafts that steps have checked, by step, number of the request and index of the sequence."""
    drafts: dict[tuple[int, int, int], list[int]] = {}
    for event in events:
        for i, tokens in event.get("drafts", {}).items():
            n, index = event["run"][4 * int(i) : 4 * int(i) + 2]
            drafts[event["step"], n, index] = [int(token) for token in tokens]
    return drafts
