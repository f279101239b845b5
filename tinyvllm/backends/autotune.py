"""Which way of dividing a kernel's work is fastest here: candidates are timed while the engine is idle, the figures are kept on disk.

Until a kernel's candidates are timed, its default is used: no request waits for a measurement. All candidates give the same bits, so the
choice may change from one run to the next, and from one capture to the next; a captured step keeps the kernel that it has. A process
spends `BUDGET` seconds in total, compiling included; the next process times what is left, until every candidate has its figure. Until then
the best of those that have one is used. Another candidate replaces the default only if it is better by `MARGIN`: clocks of GPUs rise and
fall by more than that within a second, so candidates are timed in turns, and the best time of each counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tinyvllm.backends.source import kernel_source
from tinyvllm.config.switches import environment
from tinyvllm.errors import KernelError
from tinyvllm.storage.cache import CacheFolder, open_cache

BUDGET = 2.0  # seconds of a process
MARGIN = 0.03  # of the default's time
TURNS = 5  # launches of each candidate that count, after one that does not
MAX_WAITING = 256  # kernels whose candidates wait to be timed; more keep their defaults until they are asked for again
FILE = "autotune.json"
_NEVER = float("inf")

Candidate = TypeVar("Candidate")


def name_of(candidate: Any) -> str:
    """A candidate, a dataclass of numbers and switches, as text: "rows=4 simds=8 staged=1"."""
    return " ".join(f"{field.name}={int(getattr(candidate, field.name))}" for field in dataclasses.fields(candidate))


class _Race:
    """The timing of one kernel's candidates, in slices: one candidate is prepared in each, and the last compares them."""

    def __init__(self, key: str, named: dict[str, Any], missing: list[str], timed: Callable[[Any], Callable[[], float]]):
        self.key, self.default, self._named, self._timed = key, next(iter(named)), named, timed
        # the default again with the new ones: figures of different moments are not comparable
        self._names = [self.default, *(name for name in missing if name != self.default)]
        self._ready: dict[str, Callable[[], float]] = {}
        self._seconds: dict[str, float] = {}
        self._spent = 0.0

    @property
    def names(self) -> Iterable[str]:
        return self._named

    @property
    def begun(self) -> bool:
        return self._spent > 0

    def advance(self, budget: float, clock: Callable[[], float]) -> dict[str, float] | None:
        """Run the next slice. None before the end, then seconds of as many candidates as the budget allows, infinity if one does not run.

        `budget` is what the process has left.
        """
        start, whole = clock(), budget + self._spent
        if self._names and (self._spent < whole / 2 or len(self._ready) < 2):  # the other half is for the turns
            self._prepare(self._names.pop(0))
            self._spent += clock() - start
            return None
        for _ in range(TURNS):
            for name, launch in self._ready.items():
                self._seconds[name] = min(self._seconds.get(name, _NEVER), launch())
            if clock() - start >= budget:
                break
        return self._seconds

    def _prepare(self, name: str) -> None:
        try:
            self._ready[name] = self._timed(self._named[name])
            self._ready[name]()  # the first launch is slower
        except KernelError:
            self._ready.pop(name, None)
            self._seconds[name] = _NEVER


class Tuner:
    """Choices for one GPU, named by `gpu`, such as "Apple M2 Max": chips of a family differ in cores and bandwidth.

    `cache` keeps the figures, None keeps nothing; `clock` is what the budget is measured with.
    """

    def __init__(self, gpu: str, cache: CacheFolder | None, budget: float = BUDGET, clock: Callable[[], float] = time.perf_counter):
        self._gpu, self._cache, self._remaining, self._clock = gpu, cache, budget, clock
        self._lock = threading.Lock()
        self._figures = _read(cache).get(gpu, {})
        self._waiting: dict[str, _Race] = {}  # kernels that were chosen without figures, first asked first
        self.untimed = 0  # choices that were made without all figures
        self.changes = 0  # kernels whose choice has changed since it was asked for

    def choose(
        self, stem: str, shape: str, candidates: list[Candidate], timed: Callable[[Candidate], Callable[[], float]], source: str = ""
    ) -> Candidate:
        """One of `candidates`, the first of which is the default, for a kernel at a shape: the best by the figures there are.

        Where some are missing, the kernel waits for `time_next`. `timed` prepares (compiles) a candidate and returns a function that
        launches it once and returns the seconds; a candidate that raises KernelError is excluded. `source` identifies the kernel's
        source: figures of another source do not count.
        """
        key = f"{stem} {shape} {source}".strip()
        named = {name_of(candidate): candidate for candidate in candidates}
        with self._lock:
            default, known = next(iter(named)), self._figures.get(key, {})
            missing = [name for name in named if name not in known]
            self.untimed += bool(missing) and len(named) > 1
            if missing and self._remaining > 0 and len(named) > 1 and len(self._waiting) < MAX_WAITING:
                self._waiting.setdefault(key, _Race(key, named, missing, timed))
            return named[_best(known, named, default)]

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def time_next(self) -> bool:
        """Prepare one candidate of the kernel that has waited longest, or compare its candidates; whether that was anything to do.

        Launches on the device past any graph: no step may be in flight. Raises what the device raises; that kernel waits no more.
        """
        with self._lock:
            race = next(iter(self._waiting.values()), None)
            if race is None or (self._remaining <= 0 and not race.begun):
                self._waiting.clear()
                return False
            del self._waiting[race.key]
            start = self._clock()
            seconds = race.advance(self._remaining, self._clock)
            self._remaining -= self._clock() - start
            if seconds is None:
                self._waiting = {race.key: race} | self._waiting
            else:
                self._keep(race, seconds)
            return True

    def _keep(self, race: _Race, fresh: dict[str, float]) -> None:
        """Add a race's figures to those of earlier processes, by what its default took then and now."""
        known = self._figures.get(race.key, {})
        then, now = known.get(race.default, _NEVER), fresh.get(race.default, _NEVER)
        scale = then / now if max(then, now) < _NEVER else 1.0
        figures = {name: seconds * scale for name, seconds in fresh.items()} | known
        self.changes += _best(figures, race.names, race.default) != _best(known, race.names, race.default)
        self._figures[race.key] = figures
        _write(self._cache, self._gpu, race.key, figures)

    def drop_waiting(self) -> None:
        """Time nothing that was asked until now: its arguments are going to be freed."""
        with self._lock:
            self._waiting.clear()


def _best(figures: dict[str, float], names: Iterable[str], default: str) -> str:
    """The name with the least seconds, if that is less than the default's by MARGIN."""
    best = min(names, key=lambda name: figures.get(name, _NEVER))
    return best if figures.get(best, _NEVER) < figures.get(default, _NEVER) * (1 - MARGIN) else default


def _read(cache: CacheFolder | None) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds by GPU, kernel and candidate; nothing if there is no file, or one of another format."""
    content = None if cache is None else cache.read(FILE)
    if content is None:
        return {}
    try:
        return {
            gpu: {key: {name: float(seconds) for name, seconds in figures.items()} for key, figures in kernels.items()}
            for gpu, kernels in json.loads(content).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _write(cache: CacheFolder | None, gpu: str, key: str, figures: dict[str, float]) -> None:
    """Add one kernel's figures to those of other processes in the file. A folder that cannot be written keeps nothing."""
    if cache is None:
        return
    every = _read(cache)
    every.setdefault(gpu, {})[key] = figures
    cache.write(FILE, json.dumps(every, indent=1, sort_keys=True).encode())


@functools.cache
def tuner(gpu: str) -> Tuner | None:
    """The tuner of this process for a GPU; None if TINYVLLM_AUTOTUNE=0 asks for the defaults."""
    if not environment(os.environ).get("TINYVLLM_AUTOTUNE", True):
        return None
    _tuners[gpu] = Tuner(gpu, open_cache())
    return _tuners[gpu]


_tuners: dict[str, Tuner] = {}  # those that `tuner` has made, the newest of each GPU


def time_next() -> bool:
    """`Tuner.time_next` of the first GPU that has kernels waiting; False if none has."""
    return any(each.time_next() for each in list(_tuners.values()))


def is_waiting() -> bool:
    """Whether a kernel waits to be timed."""
    return any(each.is_waiting for each in _tuners.values())


def changes() -> int:
    """How often a kernel's choice has changed in this process: captures made before have the slower one."""
    return sum(each.changes for each in _tuners.values())


def untimed() -> int:
    """How often a kernel was chosen in this process while figures of its candidates were missing."""
    return sum(each.untimed for each in _tuners.values())


def figures_digest() -> str:
    """A digest of the figures on disk, by which kernels are chosen; the empty string where there are none."""
    content = open_cache().read(FILE)
    return "" if content is None else hashlib.sha256(content).hexdigest()


def drop_waiting() -> None:
    """`Tuner.drop_waiting` of every GPU."""
    for each in list(_tuners.values()):
        each.drop_waiting()


_paused = [False]


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Within it, kernels get their defaults, and nothing is timed."""
    before, _paused[0] = _paused[0], True
    try:
        yield
    finally:
        _paused[0] = before


def tuned(
    gpu: str, stem: str, shape: str, candidates: list[Candidate], timed: Callable[[Candidate], Callable[[], float]], source: str
) -> Candidate:
    """The candidate to use on `gpu`: see `Tuner.choose`. The first one, which is the default, if tuning is off."""
    of_gpu = None if _paused[0] else tuner(gpu)
    return candidates[0] if of_gpu is None else of_gpu.choose(stem, shape, candidates, timed, source)


@functools.cache
def source_digest(backend: str, stem: str) -> str:
    """A few letters that change when the kernel's source does."""
    return hashlib.sha256(kernel_source(backend, stem).encode()).hexdigest()[:12]
