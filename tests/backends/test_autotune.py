"""Choosing between candidates for a kernel: within its budget, by the figures, and remembered."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tinyvllm.backends import autotune
from tinyvllm.backends.autotune import FILE, MARGIN, TURNS, Tuner, name_of
from tinyvllm.errors import KernelError
from tinyvllm.storage.cache import open_cache


@dataclass(frozen=True)
class Cut:
    rows: int
    staged: bool = False


DEFAULT, *OTHERS = CANDIDATES = [Cut(4), Cut(2), Cut(8), Cut(8, True)]


class Machine:
    """A clock that only work advances: `compiling` seconds to prepare a candidate, and the seconds of each launch."""

    def __init__(self, seconds: dict[Cut, float], compiling: float = 0.01):
        self.now, self.seconds, self.compiling = 0.0, seconds, compiling
        self.compiled: list[Cut] = []
        self.launches: list[Cut] = []

    def clock(self) -> float:
        return self.now

    def timed(self, cut: Cut):
        self.now += self.compiling
        self.compiled.append(cut)
        if self.seconds[cut] < 0:
            raise KernelError("launch: too many threads")

        def launch() -> float:
            self.launches.append(cut)
            self.now += self.seconds[cut]
            turn = self.launches.count(cut)
            return self.seconds[cut] * (0.1 if turn == 1 else 1 + 0.5 * (turn % 2))  # what does not count, and noise

        return launch


def seconds(*each: float) -> dict[Cut, float]:
    return dict(zip(CANDIDATES, each, strict=True))


def tuner(machine: Machine, path=None, budget: float = 2.0) -> Tuner:
    return Tuner("Apple M2 Max", None if path is None else open_cache(path), budget, machine.clock)


def choose(tuner: Tuner, machine: Machine, shape: str = "O=64 I=32", source: str = "a") -> Cut:
    """The choice once all that waits has been timed."""
    tuner.choose("matvec", shape, CANDIDATES, machine.timed, source)
    while tuner.time_next():
        pass
    return tuner.choose("matvec", shape, CANDIDATES, machine.timed, source)


def test_a_choice_waits_for_nothing_and_timing_is_in_slices(tmp_path):
    """One candidate a slice, then one that compares them: what comes meanwhile waits for a compilation at most."""
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    one = tuner(machine, tmp_path)
    for shape in ("O=64 I=32", "O=128 I=32", "O=64 I=32"):
        assert one.choose("matvec", shape, CANDIDATES, machine.timed, "a") == DEFAULT
    assert machine.now == 0 and not machine.compiled, "nothing was timed"
    slices = []
    while one.time_next():
        slices.append((len(machine.compiled), len(machine.launches), one.changes))
        assert len(slices) in (5, 10) or one.choose("matvec", "O=128 I=32", CANDIDATES, machine.timed, "a") == DEFAULT
    each = [(n, n, 0) for n in range(1, 5)] + [(4, 4 * (1 + TURNS), 1)]
    assert slices[:5] == each and len(slices) == 10, "two kernels, though one was asked for twice"
    assert one.changes == 2 and one.choose("matvec", "O=64 I=32", CANDIDATES, machine.timed, "a") == Cut(8)
    again = tuner(machine, tmp_path)
    assert again.choose("matvec", "O=64 I=32", CANDIDATES, machine.timed, "a") == Cut(8) and not again.time_next() and again.changes == 0


def test_what_waits_is_bounded_and_can_be_dropped():
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    one = tuner(machine)
    for i in range(autotune.MAX_WAITING + 5):
        one.choose("matvec", f"shape {i}", CANDIDATES, machine.timed, "a")
    assert len(one._waiting) == autotune.MAX_WAITING
    one.time_next()
    one.drop_waiting()
    assert not one.time_next() and not one._waiting and one.changes == 0
    assert choose(one, machine, "shape 1") == Cut(8), "asked for again"


def test_a_device_that_fails_ends_the_timing_of_that_kernel_only():
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    one = tuner(machine)

    def broken(cut: Cut):
        raise RuntimeError("the device is gone")

    one.choose("matvec", "first", CANDIDATES, broken, "a")
    one.choose("matvec", "second", CANDIDATES, machine.timed, "a")
    with pytest.raises(RuntimeError, match="the device is gone"):
        one.time_next()
    while one.time_next():
        pass
    assert one.choose("matvec", "second", CANDIDATES, machine.timed, "a") == Cut(8)
    assert one.choose("matvec", "first", CANDIDATES, machine.timed, "a") == DEFAULT


def test_the_fastest_is_taken_and_asked_for_once():
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    one = tuner(machine)
    assert choose(one, machine) == Cut(8)
    assert machine.compiled == CANDIDATES and machine.launches == CANDIDATES * (1 + TURNS), "in turns, the first of each not counted"
    assert choose(one, machine) == Cut(8) and len(machine.compiled) == 4
    machine.seconds = seconds(0.001, 0.005, 0.002, 0.003)
    assert choose(one, machine, "O=128 I=32") == DEFAULT, "another shape, another choice"


def test_little_gain_is_noise():
    machine = Machine(seconds(0.004, 0.004 * (1 - MARGIN / 2), 0.004, 0.004 * (1 - MARGIN / 3)))
    assert choose(tuner(machine), machine) == DEFAULT


def test_what_does_not_run_here_is_not_taken():
    machine = Machine(seconds(0.004, -1, 0.005, 0.003))
    assert choose(tuner(machine), machine) == Cut(8, True)
    machine = Machine(seconds(-1, -1, 0.005, -1))
    assert choose(tuner(machine), machine) == Cut(8)
    machine = Machine(seconds(-1, -1, -1, -1))
    assert choose(tuner(machine), machine) == DEFAULT, "and the caller that launches it gets the reason"


def test_figures_are_remembered(tmp_path):
    path = tmp_path / "made"
    machine = Machine(seconds(0.004, 0.005, -1, 0.003))
    choose(tuner(machine, path), machine)
    (kept,) = json.loads(open_cache(path).read(FILE))["Apple M2 Max"].values()
    assert set(kept) == {name_of(variant) for variant in CANDIDATES} and name_of(Cut(8, True)) == "rows=8 staged=1"
    later = Machine(seconds(0.001, 0.001, 0.001, 0.001))
    assert choose(tuner(later, path), later) == Cut(8, True) and not later.compiled
    other = Tuner("Apple M1", open_cache(path), 2.0, later.clock)
    assert choose(other, later) == DEFAULT and len(later.compiled) == 4, "another GPU"
    assert set(json.loads(open_cache(path).read(FILE))) == {"Apple M1", "Apple M2 Max"}
    assert choose(tuner(later, path), later, source="b") == DEFAULT and len(later.compiled) == 8, "another kernel"


def test_two_seconds_in_all(tmp_path):
    path = tmp_path
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003), compiling=0.4)
    one = tuner(machine, path)
    assert choose(one, machine) == Cut(8)
    assert 1.2 < machine.now < 2.0 and machine.compiled == CANDIDATES[:3], "half of the time for compiling, and what has begun is finished"
    assert choose(one, machine, "another") in (DEFAULT, Cut(2)) and machine.now < 2.0 + 2 * 0.5
    spent = machine.now
    for i in range(5):
        assert choose(one, machine, f"shape {i}") == DEFAULT
    assert machine.now == spent


def test_the_next_process_times_what_is_left(tmp_path):
    path = tmp_path
    machine = Machine(seconds(0.004, 0.005, 0.006, 0.003), compiling=0.6)
    assert choose(tuner(machine, path), machine) == DEFAULT and machine.compiled == CANDIDATES[:2]
    slower = Machine(seconds(0.008, 0.010, 0.012, 0.006), compiling=0.1)  # the GPU is warm: all takes twice as long
    assert choose(tuner(slower, path), slower) == Cut(8, True)
    assert slower.compiled == [DEFAULT, Cut(8), Cut(8, True)], "the default as the measure"
    last = Machine(seconds(9, 9, 9, 9))
    assert choose(tuner(last, path), last) == Cut(8, True) and not last.compiled


def test_a_removed_candidate_is_not_chosen(tmp_path):
    path = tmp_path
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    choose(tuner(machine, path), machine)
    left = [cut for cut in CANDIDATES if cut != Cut(8)]
    assert tuner(machine, path).choose("matvec", "O=64 I=32", left, machine.timed, "a") == Cut(8, True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Apple M2 Max": 3}', '{"Apple M2 Max": {"k": {"v": "x"}}}', '{"A": {"k": []}}'])
def test_a_broken_file_is_replaced(tmp_path, text):
    path = tmp_path
    assert open_cache(path).write(FILE, text.encode())
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    assert choose(tuner(machine, path), machine) == Cut(8)
    later = Machine(seconds(1, 1, 1, 1))
    assert choose(tuner(later, path), later) == Cut(8) and not later.compiled


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    assert choose(tuner(machine, tmp_path / "file"), machine) == Cut(8)


def test_the_switch(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path))
    machine = Machine(seconds(0.004, 0.005, 0.002, 0.003))
    for value, wanted in (("0", DEFAULT), ("1", Cut(8))):
        monkeypatch.setenv("TINYVLLM_AUTOTUNE", value)
        autotune.tuner.cache_clear()
        assert autotune.tuned("Apple M2 Max", "matvec", "O=64", CANDIDATES, machine.timed, "a") == DEFAULT
        while autotune.time_next():
            pass
        assert autotune.tuned("Apple M2 Max", "matvec", "O=64", CANDIDATES, machine.timed, "a") == wanted
    assert (tmp_path / "autotune.json").is_file()
    autotune.tuner.cache_clear()
