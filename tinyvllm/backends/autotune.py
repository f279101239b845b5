"""Which way of dividing a kernel's work is fastest here: a few candidates are timed at first use, and the figures are kept on disk.

All candidates give the same bits, so the choice may change from one run to the next. A process spends `BUDGET` seconds in total, compiling
included; the next process times what is left, until every candidate has its figure. Until then the best of those that have one is used.
Another candidate replaces the default only if it is better by `MARGIN`: clocks of GPUs rise and fall by more than that within a second, so
candidates are timed in turns, and the best time of each counts.
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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tinyvllm.backends.source import kernel_source
from tinyvllm.config import environment
from tinyvllm.errors import KernelError
from tinyvllm.storage.cache import CacheFolder, open_cache

BUDGET = 2.0  # seconds of a process
MARGIN = 0.03  # of the default's time
TURNS = 5  # launches of each candidate that count, after one that does not
FILE = "autotune.json"
_NEVER = float("inf")

Candidate = TypeVar("Candidate")


def name_of(candidate: Any) -> str:
    """A candidate, a dataclass of numbers and switches, as text: "rows=4 simds=8 staged=1"."""
    return " ".join(f"{field.name}={int(getattr(candidate, field.name))}" for field in dataclasses.fields(candidate))


class Tuner:
    """Choices for one GPU, named by `gpu`, such as "Apple M2 Max": chips of a family differ in cores and bandwidth.

    `cache` keeps the figures, None keeps nothing; `clock` is what the budget is measured with.
    """

    def __init__(self, gpu: str, cache: CacheFolder | None, budget: float = BUDGET, clock: Callable[[], float] = time.perf_counter):
        self._gpu, self._cache, self._remaining, self._clock = gpu, cache, budget, clock
        self._lock = threading.Lock()
        self._choices: dict[str, str] = {}  # of this process, never changed: all captured steps use the same kernel
        self._figures = _read(cache).get(gpu, {})

    def choose(
        self, stem: str, shape: str, candidates: list[Candidate], timed: Callable[[Candidate], Callable[[], float]], source: str = ""
    ) -> Candidate:
        """One of `candidates`, the first of which is the default, for a kernel at a shape.

        `timed` prepares (compiles) a candidate and returns a function that launches it once and returns the seconds; a candidate that
        raises KernelError is excluded. `source` identifies the kernel's source: figures of another source do not count.
        """
        key = f"{stem} {shape} {source}".strip()
        named = {name_of(candidate): candidate for candidate in candidates}
        with self._lock:
            if self._choices.get(key) not in named:
                self._choices[key] = self._best(key, named, timed)
            return named[self._choices[key]]

    def _best(self, key: str, named: dict[str, Candidate], timed: Callable[[Candidate], Callable[[], float]]) -> str:
        default, known = next(iter(named)), self._figures.get(key, {})
        missing = [name for name in named if name not in known]
        if missing and self._remaining > 0 and len(named) > 1:
            # the default again with the new ones: figures of different moments are not comparable
            fresh = self._time([default, *(name for name in missing if name != default)], named, timed)
            then, now = known.get(default, _NEVER), fresh.get(default, _NEVER)
            scale = then / now if max(then, now) < _NEVER else 1.0
            known = {name: seconds * scale for name, seconds in fresh.items()} | known
            self._figures[key] = known
            _write(self._cache, self._gpu, key, known)
        best = min(named, key=lambda name: known.get(name, _NEVER))
        return best if known.get(best, _NEVER) < known.get(default, _NEVER) * (1 - MARGIN) else default

    def _time(self, names: list[str], named: dict[str, Candidate], timed: Callable[[Candidate], Callable[[], float]]) -> dict[str, float]:
        """Seconds of as many candidates as the budget allows; infinity for one that does not run here."""
        start, budget = self._clock(), self._remaining
        ready: dict[str, Callable[[], float]] = {}
        seconds: dict[str, float] = {}
        for name in names:
            if self._clock() - start >= budget / 2 and len(ready) > 1:  # the other half is for the turns
                break
            try:
                ready[name] = timed(named[name])
                ready[name]()  # the first launch is slower
            except KernelError:
                ready.pop(name, None)
                seconds[name] = _NEVER
        for _ in range(TURNS):
            for name, launch in ready.items():
                seconds[name] = min(seconds.get(name, _NEVER), launch())
            if self._clock() - start >= budget:
                break
        self._remaining = max(0.0, budget - (self._clock() - start))
        return seconds


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
    return Tuner(gpu, open_cache()) if environment(os.environ).get("TINYVLLM_AUTOTUNE", True) else None


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
