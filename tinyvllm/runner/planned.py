"""What an engine would hold and launch, without its weights: sizes, kernels, and how fast the machine's roof lets its steps be."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.backends.registry import REFERENCE, architecture_of, skipped_variants
from tinyvllm.config.engine import MAX_SCHEDULER_STEPS, EngineConfig
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.advance import History
from tinyvllm.quant.formats import FLOATS
from tinyvllm.runner.ahead import StepOutlines
from tinyvllm.runner.kv import KVOutline
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.outlined import Held
from tinyvllm.runner.prepare import Shape, StepInputs
from tinyvllm.runner.roof import ProductRate, Roof, measured_roof
from tinyvllm.runner.sizes import groups_of
from tinyvllm.runner.states import all_caches, new_states, state_slots

LAYER_LAUNCHES, STEP_LAUNCHES = 5, 4  # of kernels: docs/kernels.md


@dataclass(frozen=True)
class KernelChoice:
    """What runs an op of one shape: a kernel's variant or the reference, and why."""

    op: str
    shape: str
    variant: str
    why: str


def architecture_of_model(opened: OpenedModel) -> str:
    """What the device of a model computes with."""
    return architecture_of(opened.plan.placement)


def skipped_by_machine(opened: OpenedModel) -> list[str]:
    """Why the device of a model runs no better variant of kernels than its best."""
    return skipped_variants(opened.plan.placement)


def is_packed(opened: OpenedModel) -> bool:
    """Whether the file has packed matrices, so that quantizing them would round twice."""
    return opened.stored is not None and any(record.format not in FLOATS for record in opened.stored.tensors.values())


def bytes_by_format(held: Iterable[Held]) -> dict[str, int]:
    """Bytes of tensors by their format, the most first."""
    sizes: dict[str, int] = {}
    for one in held:
        sizes[one.format] = sizes.get(one.format, 0) + one.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def runs_by_reference(kernels: Iterable[KernelChoice]) -> list[str]:
    """The ops that have no kernel here."""
    return [*dict.fromkeys(one.op for one in kernels if one.variant == REFERENCE)]


def planned_kernels(config: EngineConfig, opened: OpenedModel, num_blocks: int, max_model_len: int) -> list[KernelChoice]:
    """The kernel of each op of a prefill, a decode and between steps. `opened.outline()` has given the model its weights."""
    placement, size = opened.plan.placement, config.block_size
    groups, c, slots = groups_of(config, opened.config), opened.config, state_slots(config, opened.config)
    members = groups.layers if groups.blocks.count > 1 else None
    pool = KVOutline(opened.own_kv_layers, num_blocks, size, opened.block, placement.device, members, shapes=opened.own_shapes)
    caches = all_caches(c, opened.layers, pool, new_states(opened.part, opened.layers, slots, placement.device, outline=True))
    arrays = opened.model.constants(max_model_len, config.max_model_len or opened.config.max_context)
    constants = {name: Tensor.empty(*np.shape(a), dtype=dtypes.float32, device=placement.device) for name, a in arrays.items()}

    def inputs(shape: Shape) -> StepInputs:
        stream = shape.tokens * opened.config.dim
        arrived = Tensor.empty(stream, dtype=dtypes.float32, device=placement.device) if opened.takes_stream else None
        width, cascade = -(-max_model_len // size), config.enable_cascade
        parts = groups.parts
        return StepInputs(shape, width, placement.device, cascade=cascade, arrived=arrived, parts=parts, state_slots=slots)

    def history(shape: Shape) -> History:
        tokens = Tensor.empty(MAX_SCHEDULER_STEPS, shape.sequences, dtype=dtypes.int32, device=placement.device)
        return History(tokens, Tensor.empty(1, dtype=dtypes.int32, device=placement.device))

    choices = StepOutlines(opened.model, pool, caches, constants, placement, inputs, history).choices()
    return [KernelChoice(one.stem, one.shape, one.variant, one.why) for one in choices]


@dataclass(frozen=True)
class Matrices:
    """The matrices of one format that each step reads: bytes, numbers, and of these the head's, which prompts need for one row. One row
    reads `share` of them: of experts a few.
    """

    format: str
    nbytes: int
    numbers: int
    head: int
    share: float = 1.0


def streamed_matrices(held: Iterable[Held]) -> list[Matrices]:
    """The tensors that each step reads, by format and share. A tied head is the embedding table."""
    tensors = [one for one in held if one.streamed]
    head = next((one.name for one in tensors if one.name == "output.weight"), "token_embd.weight")
    grouped: dict[tuple[str, float], list[Held]] = {}
    for one in tensors:
        grouped.setdefault((one.format, one.share), []).append(one)

    def numbers(some: Iterable[Held]) -> int:
        return sum(prod(one.shape) for one in some if len(one.shape) > 1)

    return [
        Matrices(format, sum(one.nbytes for one in some), numbers(some), numbers(one for one in some if one.name == head), share)
        for (format, share), some in grouped.items()
    ]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of prompts by the roof of the machine. No step reads its matrices faster, and attention is as fast as the fastest product."""

    roof: Roof
    matrices: list[Matrices]
    kv_token_bytes: int
    layers: int
    attention_width: int  # query heads times their dimension

    def prompt(self, tokens: int, depth: float = 0) -> float:
        """Seconds of the prefill of `tokens` tokens after `depth` others in one step."""
        products = 0.0
        for one in self.matrices:
            products += self._products(one, one.numbers - one.head, tokens) + self._products(one, one.head, 1)
        fastest = max(rate.operations_per_second for rate in self.roof.products.values())
        return products + 2 * self.layers * self.attention_width * tokens * (tokens + 2 * depth) / fastest + self._launches

    def _products(self, matrices: Matrices, numbers: int, rows: float) -> float:
        """Seconds of `rows` rows with `numbers` of the matrices; of experts, rows are taken to choose different ones, up to all."""
        read = min(1.0, matrices.share * rows)
        return numbers * read * self._rate(matrices.format).seconds(rows * matrices.share / read)

    def _rate(self, format: str) -> ProductRate:
        """The rate of a format; of vectors, which are few, that of any."""
        return self.roof.products.get(format) or next(iter(self.roof.products.values()))

    @property
    def _launches(self) -> float:
        return (self.layers * LAYER_LAUNCHES + STEP_LAUNCHES) * self.roof.launch_seconds


def measured_times(matrices: list[Matrices], opened: OpenedModel, again: bool = False) -> StepTimes:
    """The times of the steps of a model by the machine's roof, measured if need be or with `again`. Errors of `measured_roof`."""
    c, kv_token, device = opened.config, opened.block_bytes // opened.block_size, opened.plan.placement.device
    roof = measured_roof(device, rated_formats(matrices), round(sum(one.nbytes * one.share for one in matrices)), again)
    width = max(c.of_layer(layer).head_dim for layer in (0, c.num_blocks - 1))
    return StepTimes(roof, matrices, kv_token, c.attention_layers, c.n_heads * width)


def rated_formats(matrices: Iterable[Matrices]) -> list[str]:
    """The formats whose products a roof must have."""
    found = dict.fromkeys(one.format for one in matrices if one.numbers)
    return [*found] or [*FLOATS[:1]]
