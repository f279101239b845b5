"""How long a model's steps take before its weights are there: the steps themselves run on stand-ins of the same formats and sizes.

Stand-ins of one size share memory once there is more of it than caches hold. So a step reads as many bytes from memory as that of the
real model, also if this machine has no room for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp
from tinygrad.dtype import DType

from tinyvllm.bridge import Captured, copied, synchronize
from tinyvllm.config import EngineConfig
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.host_memory import megabytes
from tinyvllm.integers import ceil_div
from tinyvllm.models.config import WeightRecipe
from tinyvllm.models.projections import Product
from tinyvllm.quant.layouts import RowWeight, row_bytes
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.ahead import layer_kinds
from tinyvllm.runner.kv import KVPool
from tinyvllm.runner.memory import free_memory
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.outlined import Held, WeightOutline
from tinyvllm.runner.prepare import StepInputs, shape_of
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.scheduler import Scheduled
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import place_bytes, to_device

DISTINCT_BYTES = 512 << 20  # of weights, and of keys and values: caches hold less
PATTERN_BYTES = 16 << 20
EMBEDDED = 4096  # rows of an embedding table that are written: tokens of rehearsed steps are below
SECONDS, RUNS = 0.4, 5  # of one measurement, and runs at least
WHOLE_SECONDS = 0.5  # of a prompt's prefill; a longer one is rehearsed with one layer of each kind
# Seconds of the engine's own work in a step, and for each sequence, where the device does not run meanwhile: the benchmark of
# speculation has 122 us with one sequence and 1,074 with 64 (Python 3.11, Zen 5).
HOST_STEP, HOST_SEQUENCE = 107e-6, 15e-6


@dataclass(frozen=True)
class StepSeconds:
    """Of a step that decodes a token of one sequence, a token of each of several, and of the prefill of a prompt."""

    decode: float
    decode_all: float
    prompt: float


class StandIns(WeightOutline):
    """The loader with numbers of its own: it decides as `WeightLoader` does, and reads no weights."""

    def __init__(self, checkpoint: Checkpoint | None, plan: WeightPlan):
        super().__init__(checkpoint, plan)
        self._made: dict[int, deque[Tensor]] = {}
        self._pattern, self._distinct = _pattern(), 0

    def _empty(self, nbytes: int) -> Tensor:
        made = self._made.setdefault(nbytes, deque())
        if made and self._distinct >= DISTINCT_BYTES:
            made.rotate()
        else:
            made.appendleft(place_bytes(_filled(nbytes, nbytes, self._pattern), self._plan.placement.device))
            self._distinct += nbytes
        return made[0]

    def _rows(self, recipe: WeightRecipe) -> RowWeight:
        format, (rows, columns) = self._format(recipe), recipe.shape
        row = row_bytes(format, columns)
        table = _filled(rows * row, min(rows, EMBEDDED) * row, self._pattern)
        return RowWeight(place_bytes(table, self._plan.placement.device), format, rows, columns)

    def _plain_tensors(self, recipes: list[WeightRecipe], dtype: DType) -> dict[str, Tensor]:
        device, storage = self._plan.placement.device, np.dtype(f"V{dtype.itemsize}")  # numpy has no bfloat16
        tensors = {}
        for recipe in recipes:
            nbytes = prod(recipe.shape) * dtype.itemsize
            numbers = _filled(nbytes, nbytes, self._pattern).view(storage).reshape(recipe.shape)
            tensors[recipe.name] = to_device(numbers, device, dtype)
        return tensors

    def _concatenated(self, biases: list[Tensor]) -> Tensor:
        return WeightLoader._concatenated(self, biases)

    def _in_order(self, block: Any, group: Any, product: Product, order: np.ndarray) -> Product:
        columns = copied(np.arange(len(order), dtype=np.int32), self._plan.placement.device)
        return Product(product.weight, product.bias, columns)


def rehearsed_seconds(
    config: EngineConfig, opened: OpenedModel, held: Iterable[Held], sequences: int, context: int, prompt: int
) -> StepSeconds:
    """Seconds of decodes with contexts of `context` tokens, of one sequence and of `sequences`, and of a prompt of `prompt` tokens.

    `opened.model` has the stand-ins afterwards. OutOfMemoryError if they would take more than half of the free memory; KernelError and
    ToolchainError where the steps cannot be run.
    """
    device = opened.plan.placement.device
    kv = min(opened.config.num_blocks, _kv_layers(opened, sequences, context)) * _layer_bytes(opened, sequences, context)
    needed, free = sum({one.nbytes for one in held}) + DISTINCT_BYTES + kv, free_memory(device)
    if needed > free // 2:
        raise OutOfMemoryError(f"to measure its steps takes {megabytes(needed)}, more than half of the {megabytes(free)} that are free")
    steps = _Steps(config, opened, sequences, context)
    prefill = steps.prefill(prompt)
    return StepSeconds(steps.decode(1), steps.decode(sequences), prefill)


class _Steps:
    """The steps of a model on stand-ins. Every sequence has `context` tokens."""

    def __init__(self, config: EngineConfig, opened: OpenedModel, sequences: int, context: int):
        self._config, self._model, self._device = config, opened.model, opened.plan.placement.device
        self._waits = opened.plan.placement.is_cpu  # the device and the host take turns
        StandIns(opened.stored, opened.plan).load(opened.model, opened.recipes)
        self._blocks = ceil_div(context, config.block_size)
        self._context, self._caches = context, _caches(opened, sequences, context)
        arrays = opened.model.constants(context, config.max_model_len or opened.config.max_context)
        self._constants = {name: copied(np.asarray(array), self._device) for name, array in arrays.items()}

    def decode(self, sequences: int) -> float:
        """Seconds of a decode of `sequences` sequences."""
        inputs, blocks = self._inputs([Scheduled(self._sequence(n), self._context - 1, 1, 1) for n in range(sequences)], [])
        return self._seconds(inputs, blocks, range(len(self._model.blk))) + self._host(sequences)

    def prefill(self, tokens: int) -> float:
        """Seconds of the prefill of `tokens` tokens. If that takes long, only the first layer and one of each kind run."""
        inputs, blocks = self._inputs([], [Scheduled(self._sequence(0), 0, tokens, 1)])
        first, *others = layer_kinds(self._model, self._caches, self._constants, inputs.batch(1))
        seconds = self._seconds(inputs, blocks, [first])
        if seconds * (1 + len(others)) < WHOLE_SECONDS:
            return self._seconds(inputs, blocks, range(1 + len(others))) + self._host(1)
        added = {kind: self._seconds(inputs, blocks, [first, 1 + others.index(kind)]) - seconds for kind in dict.fromkeys(others)}
        seconds += sum(added[kind] for kind in others)
        return seconds + self._host(1)

    def _host(self, sequences: int) -> float:
        return HOST_STEP + sequences * HOST_SEQUENCE if self._waits else 0.0

    def _sequence(self, number: int) -> Sequence:
        tokens = [(7 * i + number) % min(EMBEDDED, self._model.config.vocab_size) for i in range(self._context)]
        table = [*range(number * self._blocks, (number + 1) * self._blocks)]
        return Sequence(number, "", tokens, SamplingParams(), block_table=table)

    def _inputs(self, singles: list[Scheduled], chunks: list[Scheduled]) -> tuple[StepInputs, int]:
        """The inputs of a step, on the device, and the blocks of a context."""
        inputs = StepInputs(shape_of(singles, chunks), self._blocks, self._device, cascade=self._config.enable_cascade)
        return inputs, inputs.fill(singles, chunks, self._config.block_size)

    def _seconds(self, inputs: StepInputs, blocks: int, layers: Iterable[int]) -> float:
        """Of the step with these layers: the median of some runs."""
        model, all_blocks, chosen = self._model, self._model.blk, list(layers)

        def function(num_blocks: int | UOp = 1) -> tuple[Tensor, ...]:
            caches = [self._caches[layer] for layer in chosen]
            results = model.forward_batch(inputs.batch(num_blocks), caches, **self._constants)
            results = tuple(one.contiguous() for one in results if one is not None)
            Tensor.realize(*results)
            return results

        captured = Captured(function, {"num_blocks": (1, self._blocks)})
        values = {"num_blocks": blocks} if self._blocks > 1 else {}
        model.blk = [all_blocks[layer] for layer in chosen]
        try:
            return _median_seconds(lambda: captured(**values), self._device)
        finally:
            model.blk = all_blocks


def _caches(opened: OpenedModel, sequences: int, context: int) -> list[Any]:
    """The caches of all layers, of which some share memory."""
    config, device = opened.config, opened.plan.placement.device
    blocks, count = sequences * ceil_div(context, opened.block_size), min(config.num_blocks, _kv_layers(opened, sequences, context))
    pool = KVPool(count, blocks, opened.block_size, opened.block, device)
    if opened.plan.placement.is_cpu:  # pages that are not written are all the same page of zeros
        nbytes = blocks * pool.block_bytes
        pool.write([*range(blocks)], _filled(nbytes, nbytes, _pattern()))
    return [pool.layers[layer % count] for layer in range(config.num_blocks)]


def _kv_layers(opened: OpenedModel, sequences: int, context: int) -> int:
    """How many layers have more keys and values than caches hold."""
    return ceil_div(DISTINCT_BYTES, _layer_bytes(opened, sequences, context))


def _layer_bytes(opened: OpenedModel, sequences: int, context: int) -> int:
    return sequences * ceil_div(context, opened.block_size) * opened.block.nbytes


def _pattern() -> np.ndarray:
    """Bytes that are ordinary numbers of either sign in every format: none is a NaN, infinite, or so small that processors slow down."""
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
