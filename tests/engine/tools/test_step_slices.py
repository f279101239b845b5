import json
import random

import numpy as np

from tinyvllm.engine.tools.step_slices import StepNote, StepSlices


def step(at: float, *phases: str, end: bool = True) -> list[str | float]:
    """Marks of a step at `at` seconds whose phases take 1, 2, 3 ... microseconds, and its rest one more."""
    marks: list[str | float] = ["step", at]
    for number, phase in enumerate((*phases, *(["end"] if end else [])), start=1):
        marks += [phase, at + 1e-6 * number * (number + 1) / 2]
    return marks


def events(slices: StepSlices, marks: list[str | float], notes: list[StepNote]) -> list[dict[str, object]]:
    found = json.loads("[" + ",".join(slices.texts(marks, notes)) + "]")
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def test_steps_of_several_kinds() -> None:
    slices = StepSlices(7, 10.0, {"run": "wait"})
    marks = [*step(10.0000005, "schedule", "run"), *step(11.0000005, "run"), *step(11111.0000005, "schedule", "run")]
    notes = [StepNote(1, 1, True), StepNote(200, 3, False), StepNote(12, 12, False)]
    found = events(slices, marks, notes)
    assert [(e["name"], e["ts"], e["dur"]) for e in found] == [
        ("step", 0, 6), ("schedule", 0, 1), ("wait", 1, 2),
        ("step", 1_000_000, 3), ("wait", 1_000_000, 1),
        ("step", 11_101_000_000, 6), ("schedule", 11_101_000_000, 1), ("wait", 11_101_000_001, 2),
    ]  # fmt: skip
    assert [e["args"] for e in found if "args" in e] == [
        {"rows": 1, "sequences": 1, "sampled": True},
        {"rows": 200, "sequences": 3, "sampled": False},
        {"rows": 12, "sequences": 12, "sampled": False},
    ]
    assert {(e["ph"], e["pid"], e["tid"]) for e in found} == {("X", 1, 7)}


def test_steps_that_raised_have_no_text() -> None:
    slices = StepSlices(1, 0.0, {})
    failed = step(1.0, "schedule", end=False)
    marks = [*failed, *failed, *step(2.0, "schedule"), *failed, *step(3.0, "schedule"), *failed]
    found = events(slices, marks, [StepNote(1, 1, False)] * 2)
    assert [e["ts"] for e in found if e["name"] == "step"] == [2_000_000, 3_000_000] and len(found) == 4
    assert slices.texts(failed, []) == []
    found = events(slices, [*failed, *step(2.0, "schedule")] * 2, [StepNote(1, 1, False)] * 2)  # each after one that failed
    assert [e["ts"] for e in found] == [2_000_000] * 4


def test_numbers_of_all_sizes() -> None:
    chance, slices = random.Random(1), StepSlices(1, 0.0, {})
    for size in (1, 2, 64):
        marks: list[str | float] = []
        notes, expected, at = [], [], 0
        for _ in range(size):
            first, second, third = (chance.randrange(10 ** chance.randrange(1, 8)) for _ in range(3))
            notes.append(StepNote(chance.randrange(10 ** chance.randrange(1, 5)), chance.randrange(10), False))
            times = np.cumsum([at, first, second, third]).tolist()
            for name, time in zip(("step", "a", "b", "end"), times, strict=True):
                marks += [name, (time + 0.5) / 1e6]
            expected.append((times[0], first + second + third, notes[-1].rows, times[0], first, times[1], second))
            at = times[-1] + 1
        found = json.loads("[" + ",".join(slices.texts(marks, notes)) + "]")
        assert [
            (one["ts"], one["dur"], one["args"]["rows"], a["ts"], a["dur"], b["ts"], b["dur"])
            for one, a, b in zip(found[::3], found[1::3], found[2::3], strict=True)
        ] == expected
