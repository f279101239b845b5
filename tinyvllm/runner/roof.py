"""What this machine does at most: bytes that it reads, and products of the formats that a model has. Measured shortly, kept by machine.

Products of few rows are measured with as many bytes of matrices as the model has, so that they come from the same cache or memory.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.backends.collecting import collecting_kernels
from tinyvllm.backends.cpu.threads import num_threads_wanted
from tinyvllm.backends.registry import architecture_of, backend_for
from tinyvllm.bridge import Captured, copied, synchronize
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import WeightRecipe
from tinyvllm.ops.linear import Weight, linear
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import row_bytes
from tinyvllm.runner.memory import READ_BYTES, read_bandwidth
from tinyvllm.runner.source import DTYPES
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.storage.cache import open_cache
from tinyvllm.version import VERSION
from tinyvllm.weights.convert import DTYPE_FORMATS

FILE = "roof.json"
MAX_KEYS = 8  # machines and versions that are remembered
MAX_FILE = 1 << 20  # bytes
SIDE = 2048  # of a matrix
ROWS = (1, 4, 16, 64, 256)  # of the products that are measured
READING_ROWS = 16  # a product of more rows multiplies for longer than it reads: one matrix will do
MIN_BYTES, MAX_BYTES = 4 << 20, READ_BYTES  # of the matrices
CHAIN, SMALL = 32, 64  # launches one after the other, and the side of their matrix
SECONDS = 0.05  # of one measurement
PROCESSES = 3  # that measure a figure, of which the best counts: other work of the machine makes figures worse, never better


@dataclass(frozen=True)
class ProductRate:
    """Of one format: numbers of a matrix a second, in products with ROWS rows."""

    numbers_per_second: tuple[float, ...]

    def seconds(self, rows: float) -> float:
        """For one number of a matrix in a product with `rows` rows: between those of ROWS in a straight line, beyond them in proportion."""
        known = [1 / rate for rate in self.numbers_per_second]
        return known[-1] * rows / ROWS[-1] if rows > ROWS[-1] else float(np.interp(rows, ROWS, known))

    @property
    def operations_per_second(self) -> float:
        """With many rows; 2 a multiply-add."""
        return 2 * ROWS[-1] * self.numbers_per_second[-1]


@dataclass(frozen=True)
class Roof:
    """`bandwidth` in bytes a second; `launch_seconds` from one launch of a captured step to the next; `products` by format."""

    bandwidth: float
    launch_seconds: float
    products: dict[str, ProductRate]


_Measure = Callable[[], tuple[float, ...]]


@dataclass(frozen=True)
class _Figure:
    """Rates, the best of `processes` processes."""

    rates: tuple[float, ...] = ()
    processes: int = 0

    def with_measured(self, rates: tuple[float, ...]) -> _Figure:
        return _Figure(tuple(map(max, rates, self.rates or rates)), self.processes + 1)


def measured_roof(device: str, formats: Iterable[str], nbytes: int = MAX_BYTES, again: bool = False) -> Roof:
    """The roof with the products of `formats`, the best that the first PROCESSES processes measured; with `again` from the beginning.

    `nbytes` is what a step reads of matrices. Kept by device, driver, compiler, threads and version. KernelError and ToolchainError where
    the products cannot be run.
    """
    placement, formats = Placement(device), tuple(dict.fromkeys(formats))
    size = _working_set(nbytes)
    wanted: dict[str, _Measure] = {_BANDWIDTH: lambda: (read_bandwidth(device),)}
    wanted[_LAUNCHES] = lambda: (1 / _launch_seconds(placement),)
    wanted |= {_named(format, size): lambda format=format: _product_rates(placement, format, size) for format in formats}  # type: ignore[misc]
    figures = _measured(placement, wanted, again)
    products = {format: ProductRate(figures[_named(format, size)].rates) for format in formats}
    return Roof(figures[_BANDWIDTH].rates[0], 1 / figures[_LAUNCHES].rates[0], products)


def measured_bandwidth(device: str, nbytes: int = READ_BYTES) -> float:
    """Bytes a second that the device reads, the best that the first PROCESSES processes measured, with `nbytes` a pass."""
    return _measured(Placement(device), {_BANDWIDTH: lambda: (read_bandwidth(device, nbytes=nbytes),)})[_BANDWIDTH].rates[0]


def _measured(placement: Placement, wanted: dict[str, _Measure], again: bool = False) -> dict[str, _Figure]:
    """The figures of these names, those measured that too few processes have measured yet."""
    cache, key = open_cache(), _key(placement)
    figures = {} if again else _kept(cache.read(FILE, MAX_FILE), key)
    missing = [name for name in wanted if figures.get(name, _Figure()).processes < PROCESSES]
    for name in missing:
        figures[name] = figures.get(name, _Figure()).with_measured(wanted[name]())
    if missing:
        every = _every(cache.read(FILE, MAX_FILE))
        every.pop(key, None)
        held = {name: asdict(figure) for name, figure in figures.items()}
        cache.write(FILE, json.dumps(dict(list(every.items())[-(MAX_KEYS - 1) :]) | {key: held}, indent=1).encode())
    return figures


def kept_operations(device: str, formats: Iterable[str]) -> float:
    """Operations a second of the fastest product of many rows that was measured for one of `formats`; 0 if none was. Measures nothing."""
    figures = _kept(open_cache().read(FILE, MAX_FILE), _key(Placement(device)))
    rates = [ProductRate(figure.rates) for name, figure in figures.items() if name.partition(" ")[0] in formats]
    return max((rate.operations_per_second for rate in rates if len(rate.numbers_per_second) == len(ROWS)), default=0.0)


def _working_set(nbytes: int) -> int:
    """The next power of two, so that models of nearly one size share figures, within MIN_BYTES and MAX_BYTES."""
    return min(max(1 << (nbytes - 1).bit_length(), MIN_BYTES), MAX_BYTES)


def _named(format: str, size: int) -> str:
    return f"{format} {size >> 20} MiB"


_BANDWIDTH, _LAUNCHES = "bandwidth", "launches"  # next to products
_LENGTHS = {_BANDWIDTH: 1, _LAUNCHES: 1}  # of their rates


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
        if not isinstance(rates, list) or len(rates) != _LENGTHS.get(name, len(ROWS)) or not all(map(_is_rate, rates)):
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


class _Matrix:
    """What the loader sets the weight of."""

    weight: Tensor | None = None
    bias: Tensor | None = None


def _weights(placement: Placement, format: str, side: int, count: int) -> list[Weight]:
    """Matrices [side, side] of random numbers as the device's kernels read them."""
    dtype = next((dtype for dtype, name in DTYPE_FORMATS.items() if name == format), DTYPES["bfloat16"])
    loader, names = WeightLoader(None, _AnyFormat(placement, dtype, format)), [f"matrix{i}" for i in range(count)]
    recipes = [WeightRecipe(f"{name}.weight", (side, side), ()) for name in names]
    products = loader.load_products(SimpleNamespace(**{name: _Matrix() for name in names}), {name: (name,) for name in names}, recipes)
    return [product.weight for product in products.values()]


def _product_rates(placement: Placement, format: str, size: int) -> tuple[float, ...]:
    """Those of ProductRate, with `size` bytes of matrices."""
    weights = _weights(placement, format, SIDE, max(1, size // (SIDE * row_bytes(format, SIDE))))
    _compile_ahead(placement, weights[0])
    rates = []
    for rows in ROWS:
        some = weights if rows <= READING_ROWS else weights[:1]
        rates.append(len(some) * SIDE * SIDE / _seconds(placement, _multiply(placement, some, rows)))
    return tuple(rates)


def _compile_ahead(placement: Placement, weight: Weight) -> None:
    """Start to compile the kernels of all ROWS together."""
    backend = backend_for(placement)
    if backend is None:
        return
    with collecting_kernels() as kernels:
        for rows in ROWS:
            x = Tensor.empty(rows, weight.I, dtype=dtypes.float32, device=placement.device)
            linear(x, weight, Tensor.empty(1, dtype=dtypes.int32, device=placement.device))
    backend.compile_ahead(kernels, placement)


def _launch_seconds(placement: Placement) -> float:
    weights = _weights(placement, DTYPE_FORMATS[DTYPES["bfloat16"]], SMALL, 1)
    return _seconds(placement, _multiply(placement, weights * CHAIN, 1)) / CHAIN


def _multiply(placement: Placement, weights: list[Weight], rows: int) -> Captured:
    """The captured products of `rows` rows with each of the weights."""
    x = copied(np.full((rows, weights[0].I), 1e-3, np.float32), placement.device)
    count = copied(np.array([rows], np.int32), placement.device)

    def function() -> tuple[Tensor, ...]:
        return tuple(linear(x, weight, count).contiguous().realize() for weight in weights)

    return Captured(function)


def _seconds(placement: Placement, captured: Captured) -> float:
    """Of the fastest replay within SECONDS; at least one."""
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
