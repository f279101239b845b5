"""What this machine does at most: bytes that it reads, and products of the formats that a model has. Measured shortly, kept by machine.

A product of one row shows how fast a format is unpacked from the processor's cache, one of many rows how fast it is multiplied.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.cpu.threads import num_threads_wanted
from tinyvllm.backends.registry import architecture_of, backend_for
from tinyvllm.bridge import Captured, copied, synchronize
from tinyvllm.config import VERSION
from tinyvllm.models.config import WeightRecipe
from tinyvllm.ops.linear import Weight, linear
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import row_bytes
from tinyvllm.runner.memory import read_bandwidth
from tinyvllm.runner.source import DTYPES
from tinyvllm.runner.weights import WeightLoader, WeightPlan
from tinyvllm.storage.cache import open_cache
from tinyvllm.weights.convert import DTYPE_FORMATS

FILE = "roof.json"
MAX_KEYS = 8  # machines and versions that are remembered
MAX_FILE = 1 << 20  # bytes
SIDE, ROWS = 2048, 256  # of the matrix: within the caches; rows of a prompt
CHAIN, SMALL = 32, 64  # launches in a row, and the side of their matrix
SECONDS = 0.05  # of one measurement
PROCESSES = 3  # that measure a figure, of which the best counts: other work of the machine makes figures worse, never better


@dataclass(frozen=True)
class ProductRate:
    """Of one format: bytes a second of a product with one row, and operations a second of one with many; 2 a multiply-add."""

    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True)
class Roof:
    """`bandwidth` in bytes a second; `launch_seconds` from one launch of a captured step to the next; `products` by format."""

    bandwidth: float
    launch_seconds: float
    products: dict[str, ProductRate]


@dataclass(frozen=True)
class _Figure:
    """Rates, the best of `processes` processes."""

    rates: tuple[float, ...] = (0.0, 0.0)
    processes: int = 0

    def with_measured(self, rates: tuple[float, ...]) -> _Figure:
        return _Figure(tuple(map(max, rates, self.rates)), self.processes + 1)


def measured_roof(device: str, formats: Iterable[str], again: bool = False) -> Roof:
    """The roof with the products of `formats`, the best that the first PROCESSES processes measured; with `again` from the beginning.

    Kept by device, driver, compiler, threads and version. KernelError and ToolchainError where the products cannot be run.
    """
    placement, cache, formats = Placement(device), open_cache(), tuple(dict.fromkeys(formats))
    key = _key(placement)
    figures = {} if again else _kept(cache.read(FILE, MAX_FILE), key)
    wanted: dict[str, Callable[[], tuple[float, ...]]] = {_BANDWIDTH: lambda: (read_bandwidth(device),)}
    wanted |= {format: partial(_product_rates, placement, format) for format in formats}
    wanted[_LAUNCHES] = lambda: (1 / _launch_seconds(placement),)
    missing = [name for name in wanted if figures.get(name, _Figure()).processes < PROCESSES]
    for name in missing:
        figures[name] = figures.get(name, _Figure()).with_measured(wanted[name]())
    if missing:
        every = _every(cache.read(FILE, MAX_FILE))
        every.pop(key, None)
        held = {name: asdict(figure) for name, figure in figures.items()}
        cache.write(FILE, json.dumps(dict(list(every.items())[-(MAX_KEYS - 1) :]) | {key: held}, indent=1).encode())
    products = {format: ProductRate(*figures[format].rates) for format in formats}
    return Roof(figures[_BANDWIDTH].rates[0], 1 / figures[_LAUNCHES].rates[0], products)


_BANDWIDTH, _LAUNCHES = "bandwidth", "launches"  # next to names of formats
_LENGTHS = {_BANDWIDTH: 1, _LAUNCHES: 1}  # of their rates; a format has two


def _key(placement: Placement) -> str:
    backend = backend_for(placement)
    identity = "" if backend is None else backend.identity(placement)
    threads = num_threads_wanted() if placement.is_cpu else 0
    return f"{VERSION} {placement.device} {architecture_of(placement)} {identity} {threads} threads"


def _every(content: bytes | None) -> dict[str, Any]:
    try:
        every = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return every if isinstance(every, dict) else {}


def _kept(content: bytes | None, key: str) -> dict[str, _Figure]:
    """The figures that the file has under the key, without those that are not sound."""
    held = _every(content).get(key)
    found = {}
    for name, figure in held.items() if isinstance(held, dict) else ():
        rates, processes = (figure.get("rates"), figure.get("processes")) if isinstance(figure, dict) else (None, None)
        if not isinstance(rates, list) or len(rates) != _LENGTHS.get(name, 2) or not all(map(_is_rate, rates)):
            continue
        if type(processes) is int and processes > 0:
            found[name] = _Figure(tuple(rates), processes)
    return found


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


class _AnyFormat(WeightPlan):
    """A plan whose `format` is any that the device holds packed, also one that nothing is quantized to."""

    def wanted(self, recipes: list[WeightRecipe]) -> dict[str, str]:
        return {recipe.name: str(self.format) for recipe in recipes}


class _Owner:
    """What the loader sets the weight of."""

    weight: Tensor | None = None
    bias: Tensor | None = None


class _Model:
    def __init__(self) -> None:
        self.proj = _Owner()


def _weight(placement: Placement, format: str, side: int) -> Weight:
    """A matrix [side, side] of random numbers as the device's kernels read it."""
    dtype = next((dtype for dtype, name in DTYPE_FORMATS.items() if name == format), DTYPES["bfloat16"])
    loader = WeightLoader(None, _AnyFormat(placement, dtype, format))
    recipes = [WeightRecipe("proj.weight", (side, side), ())]
    return loader.load_products(_Model(), {"product": ("proj",)}, recipes)["product"].weight


def _product_rates(placement: Placement, format: str) -> tuple[float, float]:
    """Those of ProductRate."""
    weight = _weight(placement, format, SIDE)
    one, many = (_seconds(placement, partial(_multiply, placement, weight, rows, 1)) for rows in (1, ROWS))
    return SIDE * row_bytes(format, SIDE) / one, 2 * ROWS * SIDE * SIDE / many


def _launch_seconds(placement: Placement) -> float:
    weight = _weight(placement, DTYPE_FORMATS[DTYPES["bfloat16"]], SMALL)
    return _seconds(placement, partial(_multiply, placement, weight, 1, CHAIN)) / CHAIN


def _multiply(placement: Placement, weight: Weight, rows: int, times: int) -> Captured:
    """A captured chain of `times` products of `rows` rows."""
    x = copied(np.full((rows, weight.I), 1e-3, np.float32), placement.device)
    count = copied(np.array([rows], np.int32), placement.device)

    def function() -> Tensor:
        y = x
        for _ in range(times):
            y = linear(y, weight, count)
        return y.contiguous().realize()

    return Captured(function)


def _seconds(placement: Placement, capture: Callable[[], Captured]) -> float:
    """Of the fastest replay within SECONDS; at least one."""
    captured = capture()
    for _ in range(2):  # compiles, captures
        captured()
    synchronize(placement.device)
    best, end = math.inf, time.perf_counter() + SECONDS
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        captured()
        synchronize(placement.device)
        best = min(best, time.perf_counter() - start)
    return best
