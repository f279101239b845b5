"""Which variant of a kernel is fastest here: a few are timed at first use, within seconds of a process, and the figures kept on disk.

What is chosen between gives the same bits, so the choice may change from one run to the next: how work is cut, not what is computed. A
process spends `BUDGET` seconds in all, compiling included; what it has no time for is timed by the next one, until every variant has its
figure. Until then the best of those that have one is taken. Another variant takes the default's place only if it is better by `MARGIN`:
clocks of GPUs rise and fall by more than that within a second, so that variants are timed in turns, and the best time of each counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tinyvllm.backends.source import kernel_source
from tinyvllm.bridge import gpu_name
from tinyvllm.config import cache_folder, environment
from tinyvllm.errors import KernelError

BUDGET = 2.0  # seconds of a process
MARGIN = 0.03  # of the default's time
TURNS = 5  # launches of each variant that count, beside one that does not
FILE = "autotune.json"
_NEVER = float("inf")

Variant = TypeVar("Variant")


def name_of(variant: Any) -> str:
    """A variant, a dataclass of numbers and switches, in letters: "rows=4 simds=8 staged=1"."""
    return " ".join(f"{field.name}={int(getattr(variant, field.name))}" for field in dataclasses.fields(variant))


class Tuner:
    """Choices for one GPU, named by `gpu`, such as "Apple M2 Max": chips of a family differ in cores and bandwidth.

    `path` is the file that figures are kept in, None for none; `clock` says what the budget is counted in.
    """

    def __init__(self, gpu: str, path: Path | None, budget: float = BUDGET, clock: Callable[[], float] = time.perf_counter):
        self._gpu, self._path, self._left, self._clock = gpu, path, budget, clock
        self._lock = threading.Lock()
        self._made: dict[str, str] = {}  # choices of this process, which stay: a captured step and its neighbour use the same kernel
        self._figures = _read(path).get(gpu, {})

    def choose(
        self, stem: str, shape: str, variants: list[Variant], timed: Callable[[Variant], Callable[[], float]], source: str = ""
    ) -> Variant:
        """One of `variants`, the first of which is the default, for a kernel at a shape.

        `timed` makes a variant ready (compiles) and gives what launches it once and says how many seconds that took; a KernelError of it
        strikes the variant out. `source` stands for what the kernel is made of: figures of another one do not count.
        """
        key = f"{stem} {shape} {source}".strip()
        named = {name_of(variant): variant for variant in variants}
        with self._lock:
            if self._made.get(key) not in named:
                self._made[key] = self._best(key, named, timed)
            return named[self._made[key]]

    def _best(self, key: str, named: dict[str, Variant], timed: Callable[[Variant], Callable[[], float]]) -> str:
        default, known = next(iter(named)), self._figures.get(key, {})
        missing = [name for name in named if name not in known]
        if missing and self._left > 0 and len(named) > 1:
            # the default again beside the new ones: figures of different moments say little of each other
            fresh = self._time([default, *(name for name in missing if name != default)], named, timed)
            then, now = known.get(default, _NEVER), fresh.get(default, _NEVER)
            scale = then / now if max(then, now) < _NEVER else 1.0
            known = {name: seconds * scale for name, seconds in fresh.items()} | known
            self._figures[key] = known
            _write(self._path, self._gpu, key, known)
        best = min(named, key=lambda name: known.get(name, _NEVER))
        return best if known.get(best, _NEVER) < known.get(default, _NEVER) * (1 - MARGIN) else default

    def _time(self, names: list[str], named: dict[str, Variant], timed: Callable[[Variant], Callable[[], float]]) -> dict[str, float]:
        """Seconds of as many of these as the budget allows; infinitely many for a variant that does not run here."""
        start, left = self._clock(), self._left
        ready: dict[str, Callable[[], float]] = {}
        seconds: dict[str, float] = {}
        for name in names:
            if self._clock() - start >= left / 2 and len(ready) > 1:  # the other half is for the turns
                break
            try:
                ready[name] = timed(named[name])
                ready[name]()  # the first launch finds nothing in place
            except KernelError:
                ready.pop(name, None)
                seconds[name] = _NEVER
        for _ in range(TURNS):
            for name, launch in ready.items():
                seconds[name] = min(seconds.get(name, _NEVER), launch())
            if self._clock() - start >= left:
                break
        self._left = max(0.0, left - (self._clock() - start))
        return seconds


def _read(path: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    """By GPU, kernel and variant: seconds. Of a file that cannot be read, or is somebody else's, nothing."""
    try:
        found = json.loads(path.read_text()) if path is not None else {}
        return {
            gpu: {key: {name: float(seconds) for name, seconds in figures.items()} for key, figures in kernels.items()}
            for gpu, kernels in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path | None, gpu: str, key: str, figures: dict[str, float]) -> None:
    """Put one kernel's figures into the file, beside what other processes have put there. A folder that cannot be written keeps nothing."""
    if path is None:
        return
    every = _read(path)
    every.setdefault(gpu, {})[key] = figures
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(every, indent=1, sort_keys=True))
        fresh.replace(path)
    except OSError:
        pass


@functools.cache
def tuner(gpu: str) -> Tuner | None:
    """The one of this process for a GPU; None where TINYVLLM_AUTOTUNE=0 wants the defaults."""
    return Tuner(gpu, cache_folder() / FILE) if environment(os.environ).get("TINYVLLM_AUTOTUNE", True) else None


def tuned(device: str, stem: str, shape: str, variants: list[Variant], timed: Callable[[Variant], Callable[[], float]]) -> Variant:
    """What to take of a Metal kernel's variants on `device`: see `Tuner.choose`. The default, which is the first, where nobody may tune."""
    found = tuner(gpu_name(device))
    return variants[0] if found is None else found.choose(stem, shape, variants, timed, _source_of(stem))


@functools.cache
def _source_of(stem: str, backend: str = "metal") -> str:
    """A few letters that change when the kernel's source does."""
    return hashlib.sha256(kernel_source(backend, stem).encode()).hexdigest()[:12]
