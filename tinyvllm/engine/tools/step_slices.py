"""The slices of a trace's steps as text: of many steps together, as one text with numbers.

A step of a small model takes 0.3 ms, and its trace may take 2% of that. Its eight slices have sixteen numbers; formatted one step at a
time, with code that the step has driven out of the processor's caches, they took 9 us, together 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

_BETWEEN = ",\n"  # two events


class StepNote(NamedTuple):
    """What a step's slice says of it but for its time."""

    rows: int
    sequences: int
    sampled: bool


_Kind = tuple[bool | str | float, ...]  # of a step: whether it was sampled, and its phases


class StepSlices:
    """Makes texts of steps from their marks: a name and a time at its start ("step"), at the end of each phase, and at its end ("end")."""

    def __init__(self, thread: int, start: float, names: Mapping[str, str]):
        """`thread` is the trace's, `start` a time of the marks' clock in seconds; `names` are those of phases that are renamed."""
        self._thread, self._start, self._names = thread, start, names

    def texts(self, marks: list[str | float], notes: Iterable[StepNote]) -> list[str]:
        """Events, those of several steps in one text, with a comma between them. A step that raised has no end, no note and no text."""
        names, at = marks[::2], (1e6 * (np.array(marks[1::2], np.float64) - self._start)).astype(np.int64)
        return [self._text(kind, at, steps) for kind, steps in _by_kind(names, list(notes)).items()]

    def _text(self, kind: _Kind, at: np.ndarray, steps: list[tuple[int, StepNote]]) -> str:
        """The slices of steps of one kind."""
        marks = at[np.array([start for start, _ in steps])[:, None] + np.arange(len(kind) + 1)]
        numbers = np.empty((len(steps), 2 * len(kind) + 2), np.int64)
        numbers[:, 0], numbers[:, 1] = marks[:, 0], marks[:, -1] - marks[:, 0]
        numbers[:, 2:4] = [(note.rows, note.sequences) for _, note in steps]
        numbers[:, 4::2], numbers[:, 5::2] = marks[:, :-2], np.diff(marks[:, :-1])
        return _BETWEEN.join([self._template(kind)] * len(steps)) % tuple(numbers.ravel().tolist())

    def _template(self, kind: _Kind) -> str:
        """Of one step, with a %d for each number. Whole microseconds: the digits of fractions would be a third of the text."""
        sampled, *phases = kind
        begin, times = f'{{"ph":"X","pid":1,"tid":{self._thread},"name":', '"ts":%d,"dur":%d'
        about = f'"args":{{"rows":%d,"sequences":%d,"sampled":{"true" if sampled else "false"}}}'
        named = [self._names.get(str(phase), str(phase)) for phase in phases]
        return _BETWEEN.join([f'{begin}"step",{times},{about}}}', *(f'{begin}"{name}",{times}}}' for name in named)])


def _by_kind(names: list[str | float], notes: list[StepNote]) -> dict[_Kind, list[tuple[int, StepNote]]]:
    """The steps of each kind: where their marks begin, and their notes."""
    steps: dict[_Kind, list[tuple[int, StepNote]]] = {}
    starts = [place for place, name in enumerate(names) if name == "step"]
    ended = ((start, end - 1) for start, end in zip(starts, [*starts[1:], len(names)], strict=True) if names[end - 1] == "end")
    for (start, end), note in zip(ended, notes, strict=True):
        kind = (note.sampled,) if end == start + 1 else (note.sampled, *names[start + 1 : end])
        steps.setdefault(kind, []).append((start, note))
    return steps
