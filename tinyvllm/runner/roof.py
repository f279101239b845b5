"""What this machine does at most: bytes that it reads, and products of the formats that a model has. Measured shortly, kept by machine.

A product of one row shows how fast a format is unpacked from the processor's cache, one of many rows how fast it is multiplied.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
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
CHAIN, SMALL = 32, 256  # launches in a row, and the side of their matrix
SECONDS = 0.05  # of one measurement


@dataclass(frozen=True)
class ProductRate:
    """Of one format: bytes a second of a product with one row, and operations a second of one with many; 2 a multiply-add."""

    bytes_per_second: float
    operations_per_second: float


@dataclass
class Roof:
    """`bandwidth` in bytes a second; `launch_seconds` from one launch of a captured step to the next; `products` by format."""

    bandwidth: float = 0.0
    launch_seconds: float = 0.0
    products: dict[str, ProductRate] = field(default_factory=dict)


def measured_roof(device: str, formats: Iterable[str], again: bool = False) -> Roof:
    """The roof with the products of `formats`: as an earlier process on this machine measured it, the rest now; all of it with `again`.

    Kept by device, driver, compiler, threads and version. KernelError and ToolchainError where the products cannot be run.
    """
    placement, cache = Placement(device), open_cache()
    key = _key(placement)
    roof = Roof() if again else _kept(cache.read(FILE, MAX_FILE), key)
    missing = [format for format in dict.fromkeys(formats) if format not in roof.products]
    if not missing and roof.bandwidth and roof.launch_seconds:
        return roof
    roof.bandwidth = roof.bandwidth or read_bandwidth(device)
    for format in missing:
        roof.products[format] = _product_rate(placement, format)
    roof.launch_seconds = roof.launch_seconds or _launch_seconds(placement)
    every = _every(cache.read(FILE, MAX_FILE))
    every.pop(key, None)
    every = dict(list(every.items())[-(MAX_KEYS - 1) :]) | {key: asdict(roof)}
    cache.write(FILE, json.dumps(every, indent=1).encode())
    return roof


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


def _kept(content: bytes | None, key: str) -> Roof:
    """What the file has under the key, an empty roof where that is not sound."""
    held: Any = _every(content).get(key)
    try:
        products = {name: ProductRate(*map(_rate, (rate["bytes_per_second"], rate["operations_per_second"])))
                    for name, rate in held["products"].items()}  # fmt: skip
        return Roof(_rate(held["bandwidth"]), _rate(held["launch_seconds"]), products)
    except (TypeError, KeyError, AttributeError, ValueError):
        return Roof()


def _rate(value: Any) -> float:
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ValueError(value)
    return value


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


def _product_rate(placement: Placement, format: str) -> ProductRate:
    weight = _weight(placement, format, SIDE)
    one, many = (_seconds(placement, partial(_multiply, placement, weight, rows, 1)) for rows in (1, ROWS))
    return ProductRate(SIDE * row_bytes(format, SIDE) / one, 2 * ROWS * SIDE * SIDE / many)


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
