"""A runner whose weights are stand-ins of the model's formats and sizes, to time steps before the weights are there.

Stand-ins of one size share memory once there is more of it than caches hold. So a step reads as many bytes from memory as that of the
real model, also if this machine has no room for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields
from statistics import median
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp
from tinygrad.dtype import DType

from tinyvllm.bridge import Captured, copied, synchronize
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.host_memory import megabytes
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import WeightRecipe
from tinyvllm.models.projections import Product
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import RowWeight, pack_panels, pack_tile_regions, row_bytes
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.ahead import layer_kinds
from tinyvllm.runner.kv import KVPool, Layers
from tinyvllm.runner.memory import free_memory
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.outlined import Held, WeightOutline, matrix_bytes
from tinyvllm.runner.prepare import StepInputs, shape_of
from tinyvllm.runner.runner import Runner
from tinyvllm.runner.step import Logits, PreparedStep
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.scheduler import Scheduled
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.dummy import dummy_tensors, random_matrix
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import place_bytes

DISTINCT_BYTES = 512 << 20  # of weights, and of keys and values: caches hold less
PATTERN_BYTES = 16 << 20  # of keys and values
PATTERN_ROWS = 256  # of a matrix
EMBEDDED = 4096  # rows of an embedding table that are written: tokens of a rehearsal are below
SECONDS, RUNS = 0.4, 5  # of one measurement, and runs at least
WHOLE_SECONDS = 0.5  # of a prompt's prefill; a longer one is rehearsed with one layer of each kind


class StandIns(WeightOutline):
    """The loader with numbers of its own: it decides as `WeightLoader` does, and reads no weights."""

    def __init__(self, checkpoint: Checkpoint | None, plan: WeightPlan):
        super().__init__(checkpoint, plan)
        self._made: dict[tuple[Layout, str, int], deque[Tensor]] = {}
        self._distinct = 0

    @property
    def maps_all(self) -> bool:
        return True  # of what is shared, no more memory is taken than `check_room` has counted

    def _matrix(self, layout: Layout, format: str, O: int, I: int) -> Tensor:
        nbytes = matrix_bytes(layout, format, O, I)
        made = self._made.setdefault((layout, format, nbytes), deque())
        if made and self._distinct >= DISTINCT_BYTES:
            made.rotate()
        else:
            made.appendleft(place_bytes(stand_in(layout, format, O, I), self._plan.placement.device))
            self._distinct += nbytes
        return made[0]

    def _rows(self, recipe: WeightRecipe) -> RowWeight:
        format, (rows, columns) = self._format(recipe), recipe.shape
        row, known = row_bytes(format, columns), random_matrix("", format, PATTERN_ROWS, columns).reshape(-1)
        table = _filled(rows * row, min(rows, EMBEDDED) * row, known)
        return RowWeight(place_bytes(table, self._plan.placement.device), format, rows, columns)

    def _plain_tensors(self, recipes: list[WeightRecipe], dtype: DType) -> dict[str, Tensor]:
        return dummy_tensors(recipes, self._plan.placement.device, dtype)

    def _concatenated(self, biases: list[Tensor]) -> Tensor:
        return WeightLoader._concatenated(self, biases)

    def _in_order(self, block: Any, group: Any, product: Product, order: np.ndarray) -> Product:
        columns = copied(np.arange(len(order), dtype=np.int32), self._plan.placement.device)
        return Product(product.weight, product.bias, columns)


@dataclass(frozen=True)
class RehearsedModel(OpenedModel):
    """A model whose weights will be stand-ins, and whose layers share keys and values of `kv_bytes` a layer once that is enough."""

    kv_bytes: int = 0

    @classmethod
    def of(cls, opened: OpenedModel, kv_bytes: int) -> RehearsedModel:
        return cls(**{field.name: getattr(opened, field.name) for field in fields(OpenedModel)}, kv_bytes=kv_bytes)

    @property
    def kv_layers(self) -> int:
        """How many layers have keys and values of their own: more than caches hold."""
        return min(self.config.kv_layers, ceil_div(DISTINCT_BYTES, self.kv_bytes))

    @property
    def block_bytes(self) -> int:
        return self.kv_layers * self.block.nbytes if self.kv_layers < self.config.kv_layers else super().block_bytes

    def group_bytes(self, size: int) -> int:
        return min(size, self.kv_layers) * self.block.nbytes

    @property
    def keeps_steps(self) -> bool:
        return False  # a captured step on disk would be found by an engine, whose buffers are other ones

    def loader(self, progress: Callable[[int, int, str], None] | None = None) -> WeightLoader:
        return StandIns(self.stored, self.plan)

    def pool(self, layers: int, num_blocks: int, groups: Layers | None = None) -> KVPool:
        placement = self.plan.placement
        pool = KVPool(layers, num_blocks, self.block_size, self.block, placement.device, groups, self.kv_layers, self.own_shapes)
        if placement.is_cpu:  # pages that are not written are all the same page of zeros
            nbytes = num_blocks * pool.block_bytes
            pool.write([*range(num_blocks)], _filled(nbytes, nbytes, _pattern()))
        return pool


class RehearsedRunner(Runner):
    """A runner on stand-ins. Unless `computes_prompts`, the tokens of prompts take no time: their keys and values are there already."""

    def __init__(self, config: EngineConfig, opened: OpenedModel, kv_bytes: int):
        """`kv_bytes` are those of all contexts in a layer."""
        super().__init__(config, opened.plan.placement.device, opened=RehearsedModel.of(opened, kv_bytes))
        self.computes_prompts = False
        self._uncomputed: dict[int, Logits] = {}  # by rows

    def launch(self, step: PreparedStep) -> Logits:
        if self.computes_prompts or not step.plan.inputs.shape.chunks:
            return super().launch(step)
        rows = step.num_logits
        if rows not in self._uncomputed:
            logits = copied(np.zeros((rows, self.config.vocab_size), np.float32), self.device)
            self._uncomputed[rows] = Logits(logits, copied(np.zeros(rows, np.int32), self.device))
        return self._uncomputed[rows]

    def long_prefill(self, tokens: int) -> float | None:
        """Seconds of the prefill of `tokens` tokens by those of the first layer and of one layer of each kind, without the host's work.

        None if all layers take less than WHOLE_SECONDS.
        """
        count = self.groups.blocks.count * ceil_div(tokens, self.pool.block_size)
        table = [block % self.pool.num_blocks for block in range(count)]  # of windows there may be fewer
        ids = [i % min(EMBEDDED, self.config.vocab_size) for i in range(tokens)]
        entry = Scheduled(Sequence(0, "", ids, SamplingParams(), block_table=table), 0, tokens, 1)
        inputs = self._inputs(shape_of([], [entry]))
        blocks = inputs.fill([], [entry], self.pool.block_size)
        first, *others = layer_kinds(self.model, self.caches, self._constants, inputs.batch(1))
        seconds = self._seconds(inputs, blocks, [first])
        if seconds * (1 + len(others)) < WHOLE_SECONDS:
            return None
        added = {kind: self._seconds(inputs, blocks, [first, 1 + others.index(kind)]) - seconds for kind in dict.fromkeys(others)}
        return seconds + sum(added[kind] for kind in others)

    def _seconds(self, inputs: StepInputs, blocks: int, layers: Iterable[int]) -> float:
        """Of the step with these layers: the median of some runs."""
        model, all_blocks, chosen = self.model, self.model.blk, list(layers)

        def function(num_blocks: int | UOp = 1) -> tuple[Tensor, ...]:
            caches = [self.caches[layer] for layer in chosen]
            results = model.forward_batch(inputs.batch(num_blocks), caches, **self._constants)
            results = tuple(one.contiguous() for one in results if one is not None)
            Tensor.realize(*results)
            return results

        captured = Captured(function, {"num_blocks": (1, self._table_width)})
        values = {"num_blocks": blocks} if self._table_width > 1 else {}
        model.blk = [all_blocks[layer] for layer in chosen]
        try:
            return _median_seconds(lambda: captured(**values), self.device)
        finally:
            model.blk = all_blocks


def stand_in(layout: Layout, format: str, O: int, I: int) -> np.ndarray:
    """uint8: a matrix of small random numbers, whose rows are some rows again and again.

    A step must be finite: a router that gets a NaN chooses no experts, and a token without a logit ends its request.
    """
    rows = random_matrix("", format, PATTERN_ROWS, I)
    if layout is Layout.ROWS:
        regions, count = [rows.reshape(-1)], O
    else:
        regions = pack_tile_regions(format, rows) if layout is Layout.TILES else [pack_panels(format, rows)]
        count = 16 * ceil_div(O, 16)
    memory, first = allocate(matrix_bytes(layout, format, O, I)), 0
    for region in regions:
        part = memory[first : first + region.size * count // PATTERN_ROWS]
        part[:] = np.resize(region, part.size)
        first += part.size
    return memory


def check_room(opened: OpenedModel, held: Iterable[Held], kv_bytes: int) -> None:
    """OutOfMemoryError if stand-ins would take more than half of the free memory."""
    kv = RehearsedModel.of(opened, kv_bytes).kv_layers * kv_bytes
    needed, free = sum({one.nbytes for one in held}) + DISTINCT_BYTES + kv, free_memory(opened.plan.placement.device)
    if needed > free // 2:
        raise OutOfMemoryError(f"to measure its steps takes {megabytes(needed)}, more than half of the {megabytes(free)} that are free")


def _pattern() -> np.ndarray:
    """Bytes that are ordinary numbers of either sign in every cache: none is a NaN, infinite, or so small that processors slow down."""
    numbers: np.ndarray = np.random.default_rng(0).integers(0, 256, PATTERN_BYTES, np.uint8) & 0x8F | 0x30
    return numbers


def _filled(nbytes: int, written: int, pattern: np.ndarray) -> np.ndarray:
    """uint8 [nbytes], the first `written` of which are the pattern again and again."""
    memory = allocate(nbytes)
    for start in range(0, written, len(pattern)):
        part = memory[start : min(start + len(pattern), written)]
        part[:] = pattern[: len(part)]
    return memory


def _median_seconds(run: Callable[[], object], device: str) -> float:
    for _ in range(2):  # compiles and captures; the first replay
        run()
    synchronize(device)
    spans, end = list[float](), time.perf_counter() + SECONDS
    while len(spans) < RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        synchronize(device)
        spans.append(time.perf_counter() - start)
    return median(spans)
