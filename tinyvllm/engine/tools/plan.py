"""The plan of an engine before it is loaded: what it takes in memory, what fits, which kernels run, and how fast it can be.

Reads the description of a model and the headers of its files. Everything is decided by the code that places the weights of an engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tinyvllm.config import QUANTIZATIONS, EngineConfig, cache_folder
from tinyvllm.engine.drafter_memory import drafter_memory
from tinyvllm.errors import KernelError, ModelError, OutOfMemoryError, ToolchainError
from tinyvllm.host_memory import megabytes
from tinyvllm.runner.device import start_device

if TYPE_CHECKING:
    from tinyvllm.runner.memory import DrafterMemory
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.outlined import Held
    from tinyvllm.runner.planned import KernelChoice
    from tinyvllm.runner.sizes import Fit

SPEED_TOKENS = 512  # of the context of the predicted decode, and of the predicted prompt


@dataclass(frozen=True)
class Memory:
    """Bytes. `available` is the free memory of the device, or what the caller gives; `run` is what libraries and threads take."""

    available: int
    limit: str
    weights: int
    kv_token: int
    scratch: int
    run: int
    drafter: int

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.scratch + self.run


@dataclass(frozen=True)
class Start:
    """The KV cache that an engine with these options takes by itself: bytes, blocks, and tokens of the longest sequence."""

    kv_bytes: int
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True)
class Candidate:
    """A quantization of the weights, None for the formats of the file; whether one sequence of the wanted context fits, and the longest."""

    quantization: str | None
    weights: int
    fits: bool
    longest: int


@dataclass(frozen=True)
class Sizes:
    """What an engine takes, and what fits. `refusal` is why it would not start, or None; `candidates` begin with the most bytes."""

    memory: Memory
    wanted_context: int
    start: Start | None
    refusal: str | None
    fits: list[Fit]
    candidates: list[Candidate]

    @property
    def best(self) -> Candidate | None:
        """The quantization with the most bytes that fits."""
        return next((one for one in self.candidates if one.fits), None)

    def __str__(self) -> str:
        m, best = self.memory, self.best
        parts = f"weights {megabytes(m.weights)}, KV cache {m.kv_token} bytes a token, scratch {megabytes(m.scratch)}"
        running = f"running {megabytes(m.run)}, of {megabytes(m.available)} ({m.limit})"
        return f"plan: {parts}, {running}; {_advice(best, self.wanted_context)}"


@dataclass(frozen=True)
class Speed:
    """Predicted tokens a second with contexts of `context` tokens: of one sequence, of `sequences` together, of a prompt."""

    context: int
    decode: float
    sequences: int
    decode_all: float
    prompt: float
    read_bytes_per_second: float


@dataclass(frozen=True)
class Plan:
    """`formats` has the bytes of weights by format; `unpredicted` says why there is no speed."""

    model: str
    device: str
    architecture: str
    formats: dict[str, int]
    sizes: Sizes
    kernels: list[KernelChoice]
    speed: Speed | None
    unpredicted: str | None

    def record(self) -> dict[str, Any]:
        """All figures, for JSON."""
        sizes = asdict(self.sizes)
        best = self.sizes.best
        return {**asdict(self), "sizes": {**sizes, "best": None if best is None else asdict(best)}}


def make_plan(config: EngineConfig, memory: int | None = None, speed: bool = True, measure: bool = False) -> Plan:
    """The plan of a configuration, on this machine or on one with `memory` free bytes.

    With `speed` the roof is measured if this machine has none yet, with `measure` in any case. ArgumentError, ModelError and FormatError as
    an engine raises them; too little memory is no error but part of the plan. Of a model on a hub only the headers are fetched.
    """
    config = replace(config, device=start_device(config.device, cache_folder()))
    from tinyvllm.runner.memory import free_memory, memory_limit

    available, limit = (free_memory(config.device), memory_limit(config.device)) if memory is None else (memory, "--memory")
    with _local(config, available) as (name, local):
        return _plan(name, local, available, limit, speed, measure)


@contextlib.contextmanager
def _local(config: EngineConfig, available: int) -> Iterator[tuple[str, EngineConfig]]:
    """The model's name, and the configuration with a path: of a hub's model that of copies of its headers."""
    from tinyvllm.weights.hub import parse_name
    from tinyvllm.weights.hub_files import plan_pull
    from tinyvllm.weights.hub_headers import header_copies

    if os.path.exists(os.path.expanduser(config.model)) or parse_name(config.model) is None:
        yield config.model, config
        return
    pull = plan_pull(config.model, config.revision, available)
    with header_copies(pull) as path:
        yield pull.name, replace(config, model=str(path), revision=None)


def _plan(name: str, config: EngineConfig, available: int, limit: str, speed: bool, measure: bool) -> Plan:
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.planned import architecture_of_model, bytes_by_format, planned_kernels

    opened = open_model(config, config.device)
    sizes = make_sizes(config, opened, drafter_memory(config, opened), available, limit)
    held = opened.outline().held  # last: the kernels are those of the model with these weights
    blocks, longest = (1, sizes.wanted_context) if sizes.start is None else (sizes.start.num_blocks, sizes.start.max_model_len)
    kernels = planned_kernels(config, opened, blocks, longest)
    predicted, reason = _predicted(config, opened, held, kernels, longest, measure) if speed else (None, "it was switched off")
    return Plan(name, config.device, architecture_of_model(opened), bytes_by_format(held), sizes, kernels, predicted, reason)


def make_sizes(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory, available: int, limit: str) -> Sizes:
    """What the engine takes of `available` bytes; `limit` says what sets them."""
    from tinyvllm.runner.memory import run_bytes
    from tinyvllm.runner.sizes import longest_contexts, scratch_bytes, wanted_context

    device, wanted = config.device, wanted_context(config, opened.config)
    taken = Memory(
        available,
        limit,
        opened.weight_bytes,
        opened.block_bytes // config.block_size,
        scratch_bytes(config, opened, wanted),
        run_bytes(device),
        drafter.total(1),
    )
    start, refusal = _start(config, opened, drafter, taken)
    fits = longest_contexts(taken.available - taken.fixed, config, opened, drafter)
    return Sizes(taken, wanted, start, refusal, fits, _candidates(config, opened, drafter, taken, wanted))


def _start(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory, taken: Memory) -> tuple[Start | None, str | None]:
    from tinyvllm.runner.memory import check_weights
    from tinyvllm.runner.sizes import pool_size

    try:
        check_weights(config.device, taken.weights, taken.available)
        size = pool_size(config, opened, drafter, taken.available - taken.weights)
    except OutOfMemoryError as error:
        return None, str(error)
    return Start(size.num_blocks * opened.block_bytes, size.num_blocks, size.max_model_len), None


def _candidates(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory, taken: Memory, wanted: int) -> list[Candidate]:
    from tinyvllm.runner.sizes import longest_contexts, room_of

    found = []
    for quantization, nbytes in _weights_by_quantization(config):
        room = taken.available - taken.fixed + taken.weights - nbytes
        longest = max((fit.context for fit in longest_contexts(room, config, opened, drafter) if fit.sequences == 1), default=0)
        found.append(Candidate(quantization, nbytes, room >= room_of(wanted, 1, config, opened, drafter), longest))
    return sorted(found, key=lambda one: -one.weights)


def _weights_by_quantization(config: EngineConfig) -> Iterator[tuple[str | None, int]]:
    """Bytes of weights: in the file's own formats, and, where these are floats, in every format that the device has kernels for."""
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.planned import is_packed

    plain = open_model(replace(config, quantization=None, imatrix=None), config.device)
    yield None, plain.outline().bytes
    for quantization in () if is_packed(plain) else QUANTIZATIONS:
        with contextlib.suppress(ModelError):  # no kernels for the format, or a matrix that it cannot hold
            yield quantization, plain.outline(quantization).bytes


def _predicted(
    config: EngineConfig, opened: OpenedModel, held: list[Held], kernels: list[KernelChoice], longest: int, measure: bool
) -> tuple[Speed | None, str | None]:
    """Tokens a second, or why they cannot be predicted."""
    from tinyvllm.runner.planned import measured_times, runs_by_reference, streamed_matrices

    if slow := runs_by_reference(kernels):
        return None, f"the reference runs {', '.join(slow)}, many times slower than kernels"
    try:
        steps = measured_times(streamed_matrices(held), opened, measure)
    except (KernelError, ToolchainError) as error:
        return None, str(error)
    context, sequences = min(SPEED_TOKENS, longest), config.max_num_seqs
    tokens = min(context, config.max_num_batched_tokens)
    together = sequences / steps.decode(sequences, context)
    return Speed(context, 1 / steps.decode(1, context), sequences, together, tokens / steps.prompt(tokens), steps.roof.bandwidth), None


def _advice(best: Candidate | None, context: int) -> str:
    if best is None:
        return f"no quantization leaves room for one sequence of {context} tokens: use a smaller model, or lower --max-model-len"
    how = "as in the file" if best.quantization is None else f"with --quantization {best.quantization}"
    return f"{how}, one sequence of {best.longest} tokens fits"
