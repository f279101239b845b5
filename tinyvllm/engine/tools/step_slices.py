"""The slices of a trace's steps as text: of many steps together, by arithmetic on arrays.

A step of a small model takes 0.3 ms, and its trace may take 2% of that. Its eight slices have sixteen numbers; formatted one step at a time
they took 9 us. Here a step's text is a row of bytes that differs from the others only in its digits. Numbers of one column have the width
of the largest, with spaces before the others, which JSON allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

MAX_LAYOUTS = 64  # that are kept: orders of phases and widths of numbers, of which a run has a handful
_NUMBER = "\0"  # is a number in the text of a layout
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
        self._layouts: dict[tuple[_Kind, tuple[int, ...]], _Layout] = {}

    def texts(self, marks: list[str | float], notes: Iterable[StepNote]) -> list[str]:
        """Events, those of several steps in one text, with a comma between them. A step that failed has no end, no note and no text."""
        names, at = marks[::2], (1e6 * (np.array(marks[1::2], np.float64) - self._start)).astype(np.int64)
        return [self._text(kind, at, steps) for kind, steps in _by_kind(names, list(notes)).items()]

    def _text(self, kind: _Kind, at: np.ndarray, steps: list[tuple[int, StepNote]]) -> str:
        """The slices of steps of one kind."""
        marks = at[np.array([start for start, _ in steps])[:, None] + np.arange(len(kind) + 1)]
        numbers = np.empty((len(steps), 2 * len(kind) + 2), np.int64)
        numbers[:, 0], numbers[:, 1] = marks[:, 0], marks[:, -1] - marks[:, 0]
        numbers[:, 2:4] = [(note.rows, note.sequences) for _, note in steps]
        numbers[:, 4::2], numbers[:, 5::2] = marks[:, :-2], np.diff(marks[:, :-1])
        widths = tuple(len(str(most)) for most in numbers.max(axis=0).tolist())
        if (layout := self._layouts.get((kind, widths))) is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[kind, widths] = _Layout(self._template(kind), widths)
        return layout.text(numbers)

    def _template(self, kind: _Kind) -> str:
        """Whole microseconds: the digits of fractions would be a third of the text."""
        sampled, *phases = kind
        begin, times = f'{{"ph":"X","pid":1,"tid":{self._thread},"name":', f'"ts":{_NUMBER},"dur":{_NUMBER}'
        about = f'"args":{{"rows":{_NUMBER},"sequences":{_NUMBER},"sampled":{"true" if sampled else "false"}}}'
        named = [self._names.get(str(phase), str(phase)) for phase in phases]
        return _BETWEEN.join([f'{begin}"step",{times},{about}}}', *(f'{begin}"{name}",{times}}}' for name in named)])


def _by_kind(names: list[str | float], notes: list[StepNote]) -> dict[_Kind, list[tuple[int, StepNote]]]:
    """The steps of each kind: where their marks begin, and their notes."""
    steps: dict[_Kind, list[tuple[int, StepNote]]] = {}
    period = names.index("end") + 1 if notes else 0
    if notes and names == names[:period] * len(notes) and names.count("step") == len(notes):  # usual, and twice as fast
        phases = tuple(names[1 : period - 1])
        for number, note in enumerate(notes):
            steps.setdefault((note.sampled, *phases), []).append((number * period, note))
        return steps
    start = 0
    for note in notes:
        end = names.index("end", start)
        while "step" in (later := tuple(names[start + 1 : end])):  # one that failed
            start += 1 + later.index("step")
        steps.setdefault((note.sampled, *later), []).append((start, note))
        start = end + 1
    return steps


class _Layout:
    """A text with numbers of known widths, and where their digits are."""

    def __init__(self, template: str, widths: Sequence[int]):
        """`template` has a NUL for each number."""
        parts = template.split(_NUMBER)
        filled = "".join(part + " " * width for part, width in zip(parts, (*widths, 0), strict=True)) + _BETWEEN
        self._row = np.frombuffer(filled.encode("ascii"), np.uint8)
        cells, columns, powers, at = [], [], [], 0
        for column, (part, width) in enumerate(zip(parts, widths, strict=False)):
            at += len(part) + width
            for power in range(width):
                cells.append(at - 1 - power)
                columns.append(column)
                powers.append(10**power)
        self._cells, self._columns, self._powers = np.array(cells), np.array(columns), np.array(powers, np.int64)

    def text(self, numbers: np.ndarray) -> str:
        """One text a row of `numbers` int64 [steps, columns], none of them negative."""
        rows = np.empty((len(numbers), len(self._row)), np.uint8)
        rows[:] = self._row
        quotients = numbers[:, self._columns] // self._powers
        rows[:, self._cells] = np.where((quotients > 0) | (self._powers == 1), quotients % 10 + ord("0"), ord(" "))
        return rows.tobytes().decode("ascii")[: -len(_BETWEEN)]
