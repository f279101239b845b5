"""The model's layers by hand-written kernels against the same layers by the reference, on the same tokens and with the same weights.

Three passes go through every step, each with a cache of its own:

    reference  everything in plain tinygrad
    kernels    as the engine runs it
    layers     kernels again, but each layer gets the reference's input of that layer: an error is then this layer's own

The weights are the packed ones that kernels read; the reference unpacks them, so that the passes do not differ in quantization.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp

from tinyvllm.backends.registry import REFERENCE, choices, forget_choices
from tinyvllm.bridge import Captured, download, upload
from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.runner.kv import KVPool
from tinyvllm.runner.prepare import Shape, StepInputs, shape_of, split
from tinyvllm.runner.runner import Runner
from tinyvllm.runner.states import all_caches, new_states
from tinyvllm.scheduler import Schedule, Scheduled

_SWITCH = "TINYVLLM_KERNELS"


@dataclass(frozen=True)
class Trace:
    """The results of one step, without padding: N rows. float32, host.

    states: [L + 1, N, E], the embedding and then the output of every layer; logits: [N, V]
    """

    states: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class PlaceError:
    """How far kernels are from the reference in one place of the model, at the worst row of all steps.

    name      "embed", "layer 0", ..., "head"
    own       given the reference's input: |difference| over |what the place adds to its input|, both of a row as a vector
    largest   the same difference's largest element
    drift     with all the layers before it by kernels too: |difference| over |value| of a row
    kind      the step of the worst row: "prefill", "mixed" or "decode"
    """

    name: str
    own: float
    largest: float
    drift: float
    kind: str


@dataclass(frozen=True)
class Seen:
    """One step as all passes ran it."""

    entries: list[Scheduled]
    reference: Trace
    kernels: Trace
    layers: Trace

    @property
    def kind(self) -> str:
        lengths = {entry.num_tokens > 1 for entry in self.entries}
        return "mixed" if len(lengths) == 2 else "prefill" if True in lengths else "decode"


class Comparison:
    """Runs steps all three ways and keeps the results. `num_blocks` is the number of blocks that the entries' tables may name."""

    def __init__(self, runner: Runner, num_blocks: int):
        if runner.ranks is not None:
            raise ArgumentError("verify: the reference does not divide a model; leave tensor_, pipeline_ and context_parallel_size out")
        self._runner, self._num_blocks = runner, num_blocks
        forget_choices()
        self._passes = {"kernels": _Pass(runner, num_blocks, None), "reference": _Pass(runner, num_blocks, "all=ref")}
        self._passes["layers"] = _Pass(runner, num_blocks, None)
        self.steps: list[Seen] = []
        self.kernels: dict[str, str] = {}  # stem: variant, of what did not run by the reference

    def step(self, entries: list[Scheduled]) -> np.ndarray:
        """Run one step all three ways; the reference's logits [N, V] of its rows, in the order of singles and chunks."""
        kernels = self._passes["kernels"].run(entries, None)
        self.kernels |= {choice.stem: choice.variant for choice in choices() if choice.variant != REFERENCE}
        reference = self._passes["reference"].run(entries, None)
        forget_choices()
        layers = self._passes["layers"].run(entries, reference.states)
        self.steps.append(Seen(entries, reference, kernels, layers))
        return reference.logits

    def errors(self) -> list[PlaceError]:
        """Every place of the model with its error, first to last."""
        return _errors(self.steps, [seen.layers for seen in self.steps])

    def without(self, stem: str) -> list[PlaceError]:
        """The same steps again, with one op's kernel left out of the third pass."""
        switch = ",".join(part for part in (os.environ.get(_SWITCH, ""), f"{stem}={REFERENCE}") if part)
        again = _Pass(self._runner, self._num_blocks, switch)
        return _errors(self.steps, [again.run(seen.entries, seen.reference.states) for seen in self.steps])


class _Pass:
    """The model run one way: `switch` is the value of TINYVLLM_KERNELS for it, None leaves the environment's."""

    def __init__(self, runner: Runner, num_blocks: int, switch: str | None):
        self._runner, self._switch = runner, switch
        c, device = runner.config, runner.device
        self._pool = KVPool(c.kv_layers, num_blocks, runner.pool.block_size, runner.pool.block, device, shapes=runner.pool.shapes)
        self._caches = all_caches(c, range(c.num_blocks), self._pool, new_states(c, range(c.num_blocks), runner.state_slots, device))
        self._width = -(-runner.max_model_len // runner.pool.block_size)
        self._plans: dict[tuple[Shape, bool], tuple[StepInputs, Captured, list[Tensor]]] = {}

    def run(self, entries: list[Scheduled], given: np.ndarray | None) -> Trace:
        """One step; with `given` [L + 1, N, E], every layer gets its row of that as input, not the output of the layer before it."""
        singles, chunks = split(Schedule(entries))
        shape = shape_of(singles, chunks)
        inputs, captured, states = self._plan(shape, given is not None)
        arranged = list(singles)
        blocks = inputs.fill(arranged, chunks, self._pool.block_size)
        places = {id(entry): row for row, entry in enumerate(arranged)}  # `fill` may reorder them
        rows = [places[id(entry)] for entry in singles]
        rows += range(shape.decodes, shape.decodes + sum(entry.num_tokens for entry in chunks))
        if given is not None:
            for tensor, values in zip(states, given, strict=True):
                padded = np.zeros(tuple(int(d) for d in tensor.shape), np.float32)
                padded[rows] = values
                upload(tensor, padded)
        with _switched(self._switch):
            logits, *seen = captured(*states, **({"num_blocks": blocks} if self._width > 1 else {}))
        return Trace(np.stack([download(state)[rows] for state in seen]), download(logits)[rows])

    def _plan(self, shape: Shape, given: bool) -> tuple[StepInputs, Captured, list[Tensor]]:
        if (shape, given) not in self._plans:
            device, E = self._runner.device, self._runner.config.dim
            inputs = StepInputs(shape, self._width, device, all_rows=True, state_slots=self._runner.state_slots)
            count = self._runner.config.num_blocks + 1 if given else 0
            states = [Tensor.zeros(shape.tokens, E, device=device).contiguous().realize() for _ in range(count)]

            def forward(*instead: Tensor, num_blocks: int | UOp = 1) -> tuple[Tensor, ...]:
                seen: list[Tensor] = []
                with _tapped(self._runner.model, seen, instead):
                    logits, _ = self._runner.model.forward_batch(inputs.batch(num_blocks), self._caches, **self._runner._constants)
                results = logits.contiguous(), *(state.contiguous() for state in seen)
                Tensor.realize(*results)
                return results

            self._plans[shape, given] = inputs, Captured(forward, {"num_blocks": (1, self._width)}), states
        return self._plans[shape, given]


class _Tap:
    """A layer in a model's list that records its input, if it is the first, and its output, and may pass other tensors on."""

    def __init__(self, block: Any, layer: int, seen: list[Tensor], instead: tuple[Tensor, ...]):
        self._block, self._layer, self._seen, self._instead = block, layer, seen, instead

    def forward_batch(self, x: Tensor, *rest: Any) -> Tensor:
        if self._layer == 0:
            self._seen.append(x)
            x = self._instead[0] if self._instead else x
        y: Tensor = self._block.forward_batch(x, *rest)
        self._seen.append(y)
        return self._instead[self._layer + 1] if self._instead else y


@contextlib.contextmanager
def _tapped(model: Any, seen: list[Tensor], instead: tuple[Tensor, ...]) -> Iterator[None]:
    """The model with its layers wrapped in taps, from outside: models and serving have no code for it."""
    blocks = model.blk
    model.blk = [_Tap(block, layer, seen, instead) for layer, block in enumerate(blocks)]
    try:
        yield
    finally:
        model.blk = blocks


@contextlib.contextmanager
def _switched(value: str | None) -> Iterator[None]:
    before = os.environ.get(_SWITCH)
    if value is not None:
        os.environ[_SWITCH] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SWITCH, None)
        else:
            os.environ[_SWITCH] = before


def _errors(steps: list[Seen], layers: list[Trace]) -> list[PlaceError]:
    L = len(steps[0].reference.states) - 1
    return [_worst(place, L, steps, layers) for place in range(L + 2)]


def _worst(place: int, L: int, steps: list[Seen], layers: list[Trace]) -> PlaceError:
    """The error of place 0 (the embedding), 1..L (the layers) or L + 1 (the head)."""
    name = "embed" if place == 0 else "head" if place > L else f"layer {place - 1}"
    own = largest = drift = 0.0
    kind = steps[0].kind
    for step, trace in zip(steps, layers, strict=True):
        expected, alone, free = (t.logits if place > L else t.states[place] for t in (step.reference, trace, step.kernels))
        added = expected if place in (0, L + 1) else expected - step.reference.states[place - 1]
        here = float(np.max(_lengths(alone - expected) / np.maximum(_lengths(added), 1e-30)))
        # not `>` alone: a NaN where the reference has a number must be the worst of all
        if not here <= own:
            own, kind = here if np.isfinite(here) else float("inf"), step.kind
        largest = max(largest, _largest(alone - expected))
        drift = max(drift, _largest(_lengths(free - expected) / np.maximum(_lengths(expected), 1e-30)))
    return PlaceError(name, own, largest, drift, kind)


def _lengths(rows: np.ndarray) -> np.ndarray:
    """float64 [N] of [N, E]."""
    norms: np.ndarray = np.sqrt(np.square(rows, dtype=np.float64).sum(1))
    return norms


def _largest(values: np.ndarray) -> float:
    most = float(np.abs(values).max())
    return most if np.isfinite(most) else float("inf")
