"""What the steps of an engine select and launch, found without a launch, so that it is compiled and tested before the first capture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tinygrad import Tensor, dtypes

from tinyvllm.backends.collecting import collecting_kernels
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import Choice, Need, backend_for, choice_of, collecting_needs, replaceable_variant, take_selected
from tinyvllm.backends.selftest import kernels_of_cases
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.config.engine import EngineConfig
from tinyvllm.ops.advance import History, advance
from tinyvllm.placement import Placement
from tinyvllm.runner.kv import KVPool
from tinyvllm.runner.prepare import MIN_CHUNK, Shape, StepInputs, common_shapes
from tinyvllm.sampling.draw import call_draw
from tinyvllm.sampling.parameters import SamplingFlags

_CHUNK, _DECODE = Shape(0, 1, MIN_CHUNK, MIN_CHUNK), Shape(1, 0, 0, 1)


class StepOutlines:
    """The steps of an engine, called where nothing is launched.

    `caches` are those of all layers, `pool` those of layers with keys and values. `inputs_of` and `history_of` make the inputs and the
    history of tokens of a step of a shape.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        caches: list[Any],
        constants: dict[str, Tensor],
        placement: Placement,
        inputs_of: Callable[[Shape], StepInputs],
        history_of: Callable[[Shape], History],
    ):
        self._model, self._pool, self._caches, self._constants, self._placement = model, pool, caches, constants, placement
        self._inputs_of, self._history_of = inputs_of, history_of

    def compile_ahead(self, config: EngineConfig, draw: SamplingFlags) -> None:
        """Compile the hand-written kernels in the background, in the order of their first use, each step's with those that test them.

        A chunk, a sampled draw with the filters of `draw`, a decode and what advances it, and the copy of blocks. The texts of some of
        CUDA's kernels depend on the number of rows: there all shapes of the warm-up follow.
        """
        chunk, decode = self._inputs
        calls: list[Callable[[], None]] = [
            lambda: self._call_step(chunk),
            lambda: self._call_draw(config.max_num_seqs, draw),
            lambda: self._call_step(decode),
            lambda: self._call_advance(decode),
            self._call_copy,
        ]
        for call in calls:
            with collecting_kernels() as launched:
                call()
            self._compile(launched)  # now: to find what tests them takes a tenth of a second
            self._compile(kernels_of_cases(self._placement, take_selected()))
        if self._placement.is_cuda and config.warm_up:
            batches = (self._inputs_of(shape).batch(1) for shape in common_shapes(config))
            self._compile(kernels_of_steps(self._model, self._caches, self._constants, batches))

    def _compile(self, kernels: Sequence[Kernel]) -> None:
        backend = backend_for(self._placement)
        if backend is not None:
            backend.compile_ahead(kernels, self._placement)

    def kernel_needs(self) -> list[Need]:
        """What the engine selects kernels for: in a chunk, in a decode, between steps."""
        return [*self._selected(), *self._facts_between_steps.items()]

    def choices(self) -> list[Choice]:
        """What runs each of `kernel_needs`, and why; the ops between steps have no shape."""
        between = [choice_of(stem, "", facts) for stem, facts in self._facts_between_steps.items()]
        return [*dict.fromkeys([*self._selected().values(), *between])]

    def _selected(self) -> dict[Need, Choice]:
        with collecting_needs() as needs:
            for inputs in (*self._inputs, *self._adapter_inputs):
                self._call_step(inputs)
        return needs

    @functools.cached_property
    def _inputs(self) -> list[StepInputs]:
        """Inputs of the smallest chunk and of one decode."""
        return [self._inputs_of(shape) for shape in (_CHUNK, _DECODE)]

    @functools.cached_property
    def _adapter_inputs(self) -> list[StepInputs]:
        """The same with adapters, if the engine has some."""
        has_adapters = any(getattr(block, "adapters", None) for block in self._model.blk)
        return [self._inputs_of(replace(shape, adapters=True)) for shape in (_CHUNK, _DECODE) if has_adapters]

    def _call_step(self, inputs: StepInputs) -> None:
        self._model.forward_batch(inputs.batch(1), self._caches, **self._constants)

    # the reference of these three would be computed here

    def _call_draw(self, max_num_seqs: int, draw: SamplingFlags) -> None:
        if self._has_kernel("sample"):
            call_draw(self._model.config.vocab_size, max_num_seqs, self._placement.device, draw)

    def _call_advance(self, decode: StepInputs) -> None:
        if self._has_kernel("advance"):
            sampled = Tensor.empty(1, dtype=dtypes.int32, device=self._placement.device)
            advance(decode.batch(1), sampled, self._history_of(decode.shape), self._pool.block_size)

    def _call_copy(self) -> None:
        if self._pool.layers and self._has_kernel("kv_copy"):
            self._pool.call_copy()

    @functools.cached_property
    def _facts_between_steps(self) -> dict[str, ShapeFacts]:
        """What ops outside of the forward pass select their kernels for."""
        found = {
            "advance": ShapeFacts(self._placement),
            "sample": ShapeFacts(self._placement, vocabulary=self._model.config.vocab_size),
        }
        if self._pool.layers:
            layer = self._pool.layers[0].keys
            found["kv_copy"] = ShapeFacts(self._placement, block_bytes=layer.nbytes() // int(layer.shape[0]))
        return found

    def _has_kernel(self, stem: str) -> bool:
        return replaceable_variant(stem, self._placement, self._facts_between_steps[stem]) is not None


def kernels_of_steps(model: Any, caches: list[LayerCache], constants: dict[str, Any], batches: Iterable[Batch]) -> list[Kernel]:
    """The kernels that the model's forward pass launches for these batches, each once, in the order of their first launch.

    Layers that launch the same kernels in the first batch count as one: most models have one kind of layer, some two.
    """
    found, distinct = dict[Kernel, None](), list[int]()
    for batch in batches:
        distinct = distinct or list(dict.fromkeys(layer_kinds(model, caches, constants, batch)))
        found |= dict.fromkeys(_kernels_of(model, caches, constants, batch, distinct))
    return list(found)


def layer_kinds(model: Any, caches: list[LayerCache], constants: dict[str, Any], batch: Batch) -> list[int]:
    """Of each layer of the model the first one that launches the same kernels for this batch."""
    kinds = [tuple(_kernels_of(model, caches, constants, batch, [layer])) for layer in range(len(model.blk))]
    return [kinds.index(kind) for kind in kinds]


def _kernels_of(model: Any, caches: list[LayerCache], constants: dict[str, Any], batch: Batch, layers: list[int]) -> list[Kernel]:
    """What the model would launch for a batch if it had only these of its layers."""
    blocks = model.blk
    model.blk = [blocks[layer] for layer in layers]
    try:
        with collecting_kernels() as launched:
            model.forward_batch(batch, [caches[layer] for layer in layers], **constants)
    finally:
        model.blk = blocks
    return launched
