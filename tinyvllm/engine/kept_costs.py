"""What steps cost on this machine, on disk: read when an engine starts, written when it is closed, in the cache folder.

It depends on shapes and kernels, not on what the weights are: models of one shape share a file. Times of another day are the beginning;
the engine's own steps replace them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import TYPE_CHECKING

from tinyvllm.config.engine import EngineConfig
from tinyvllm.foreign import parse_json, quoted
from tinyvllm.speculate.cost_curve import StepCosts
from tinyvllm.storage.cache import open_cache
from tinyvllm.version import VERSION

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Runner

MAX_POINTS = 1024  # of a file: numbers of sequences and drafts in the buckets of the curves
MAX_ROWS = 1 << 20  # sequences, and drafts, of a step
MAX_SECONDS = 600.0  # of a step


class KeptCosts:
    """The `costs` of one model's shape, kernels and machine, under a name made of all that its times depend on."""

    def __init__(self, runner: Runner, config: EngineConfig, method: str):
        """`method` of guessing: some have the step compute hidden states."""
        shape = [str(runner.config), sorted(map(str, runner.weight_formats)), str(runner.weight_layout), str(runner.dtype)]
        options = [config.kv_cache_dtype, config.block_size, config.enable_cascade, method]
        ranks = [config.tensor_parallel_size, config.context_parallel_size]
        machine = [platform.node(), runner.placement.kind, runner.architecture, runner.variants(), runner.num_threads(), ranks]
        name = json.dumps([shape, options, machine, os.environ.get("TINYVLLM_KERNELS"), VERSION])
        self.place = f"costs/{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self._before: dict[tuple[int, int], float] = {}  # as read or written last
        self.costs = self._read()

    def _read(self) -> StepCosts:
        """As they were kept; empty where there is no file, or where its content is none: that is logged."""
        cache = open_cache()
        content = cache.read(self.place)
        if content is not None:
            try:
                self._before = _points_of(content)
            except ValueError as error:
                cache.discard(self.place, str(error))
        return StepCosts(_without_losses(self._before))

    def save(self) -> None:
        """Keep what is measured, if it is not what was read."""
        points = self.costs.points()
        content = {f"{n}+{k}" if k else str(n): seconds for (n, k), seconds in points.items()}
        if points and points != self._before and open_cache().write(self.place, json.dumps(content).encode()):
            self._before = points


def _without_losses(points: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """The points but for drafts that add as much as the steps that they would save: these are measured again. Other processes that were
    busy for the three steps of a first try would have kept a machine from drafts for good.
    """
    plain = StepCosts(points).plain
    return {(n, k): seconds for (n, k), seconds in points.items() if not k or seconds < k * plain.seconds(n)}


def _points_of(content: bytes) -> dict[tuple[int, int], float]:
    """Seconds by number of sequences and drafts. ValueError for anything that is no such file."""
    value = parse_json(content)
    if not isinstance(value, dict) or len(value) > MAX_POINTS:
        raise ValueError(f"expected at most {MAX_POINTS} numbers of rows with their seconds, got {quoted(value)}")
    return dict(_point_of(rows, seconds) for rows, seconds in value.items())


def _point_of(rows: str, seconds: object) -> tuple[tuple[int, int], float]:
    """Of "n" sequences, or what drafts add as "n+k"."""
    counts = rows.split("+", 1)
    for count in counts:
        if not (count.isascii() and count.isdecimal() and len(count) <= 8 and 1 <= int(count) <= MAX_ROWS):
            raise ValueError(f"a number of rows must be 1 to {MAX_ROWS}, got {quoted(rows)}")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{rows} rows must take more than 0 and at most {MAX_SECONDS:g} s, got {quoted(seconds)}")
    return (int(counts[0]), int(counts[1]) if counts[1:] else 0), float(seconds)
