"""Comparison of a recording with the events of its replay: the first token and the first step that differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field

from tinyvllm.engine.tools.record import Event
from tinyvllm.engine.tools.recording import Run, schedule_of
from tinyvllm.lazy_dataclass import dataclass

_CUT = ("abort", "deadline")  # reasons that depend on the step: in another schedule the output may be longer or shorter


@dataclass(frozen=True)
class Difference:
    """The first token that differs. `step` is the recorded step that computed it, None if that is not known."""

    request_id: str
    continuation: int
    index: int
    expected: object
    got: object
    step: int | None


@dataclass
class Outcome:
    """The result of a replay. `step` is the first step whose schedule differs, with both runs of (request, continuation, start, tokens)."""

    requests: int = 0  # that finished in the recording
    tokens: int = 0
    difference: Difference | None = None
    step: int | None = None
    expected: list[tuple[str, int, int, int]] = field(default_factory=list)
    got: list[tuple[str, int, int, int]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    refused: int = 0  # in the recording

    @property
    def identical(self) -> bool:
        return self.difference is None and self.step is None


def compare(run: Run, events: list[Event], tokens_only: bool = False, skipped: list[str] | None = None) -> Outcome:
    """Compare a recording with the events of a replay."""
    skipped = skipped or []
    expected = [end for end in run.ends if end["end"] not in skipped]
    tokens = sum(len(ids) for end in expected for ids in end["tokens"])
    outcome = Outcome(len(expected), tokens, skipped=skipped, refused=sum("refused" in event for event in run.arrivals))
    outcome.difference = _first_difference(run, expected, [event for event in events if "end" in event], tokens_only)
    if not tokens_only:
        _compare_schedules(run, schedule_of(events), [event["add"] for event in events if "add" in event], outcome)
    return outcome


def _first_difference(run: Run, expected: list[Event], got: list[Event], tokens_only: bool) -> Difference | None:
    """The differing token that was computed first; among equals the request that ended first in the recording."""
    ends: dict[str, list[Event]] = {}
    for event in got:
        ends.setdefault(event["end"], []).append(event)  # an id may be used again
    differences: list[Difference] = []
    for end in expected:
        mine = ends.get(end["end"], [])
        if not mine:
            differences.append(Difference(end["end"], 0, 0, end["reasons"], "no end", end["step"]))
            continue
        differences += _differences(run, end, mine.pop(0), tokens_only)
    return min(differences, key=lambda d: math.inf if d.step is None else d.step, default=None)


def _differences(run: Run, end: Event, mine: Event, tokens_only: bool) -> Iterator[Difference]:
    cut = tokens_only and any(reason in _CUT for reason in (*end["reasons"], *mine["reasons"]))
    if cut and any("beams" in event for event in run.added if event["add"] == end["end"]):
        return  # the best beams so far depend on the step at which the search was cut off
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
    positions = {n: len(run.added[n]["prompt"]) + index - 1 for n in numbers}
    last = None
    for step, (entries, rounds) in run.schedule.items():
        for n, i, start, count in zip(*(entries[k::4] for k in range(4)), strict=True):
            if n in positions and i == continuation and start <= positions[n] < start + count * rounds:
                last = step
    return last


def _compare_schedules(run: Run, got: dict[int, tuple[list[int], int]], names: list[str], outcome: Outcome) -> None:
    """Name the first step that differs. What a recording that is cut off would have had after its last step is not known."""
    end = max(run.schedule, default=0)
    for step in sorted(step for step in {*run.schedule, *got} if run.complete or step <= end):
        first, second = run.schedule.get(step, ([], 1)), got.get(step, ([], 1))
        if first != second:
            outcome.step = step
            outcome.expected = _named(first[0], [event["add"] for event in run.added])
            outcome.got = _named(second[0], names)
            return


def _named(run: list[int], names: list[str]) -> list[tuple[str, int, int, int]]:
    rows = zip(*(run[k::4] for k in range(4)), strict=True)
    return [(names[n] if 0 <= n < len(names) else "?", index, start, count) for n, index, start, count in rows]
