"""What an engine takes in memory before it is loaded, and what fits: decided by the code that places the weights of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinyvllm.config.engine import QUANTIZATIONS, EngineConfig
from tinyvllm.engine.drafter_memory import drafter_memory
from tinyvllm.engine.recurrent import fitted_to_states
from tinyvllm.errors import ModelError, OutOfMemoryError
from tinyvllm.host_memory import megabytes
from tinyvllm.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from tinyvllm.runner.division import Division
    from tinyvllm.runner.memory import DrafterMemory
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.sizes import Fit


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
    """What an engine with these options takes by itself: the KV cache in bytes and blocks, tokens of the longest sequence, drafter."""

    kv_bytes: int
    num_blocks: int
    max_model_len: int
    drafter_bytes: int = 0


@dataclass(frozen=True)
class RankSize:
    """What one of several ranks takes: `layers` from the first up to another, bytes of weights, and of keys and values of a token.

    `free` is the free memory of its device, where that is not the device of all ranks.
    """

    rank: int
    layers: tuple[int, int]
    weights: int
    kv_token: int
    device: str
    free: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A quantization of the weights, None for the formats of the file; whether one sequence of the wanted context fits, and the longest."""

    quantization: str | None
    weights: int
    fits: bool
    longest: int


@dataclass(frozen=True)
class Sizes:
    """What an engine takes, and what fits. `refusal` is why it would not start, or None; `candidates` begin with the most bytes.

    `memory` and all else count the ranks of an engine together; `ranks` has each, where there are several.
    """

    memory: Memory
    wanted_context: int
    start: Start | None
    refusal: str | None
    fits: list[Fit]
    candidates: list[Candidate]
    ranks: list[RankSize]

    @property
    def engine_bytes(self) -> int:
        """What the engine holds when it has started, next to `memory.run` of the process; 0 if it would not start."""
        return 0 if self.start is None else self.memory.weights + self.memory.scratch + self.start.kv_bytes + self.start.drafter_bytes

    @property
    def best(self) -> Candidate | None:
        """The quantization with the most bytes that fits."""
        return next((one for one in self.candidates if one.fits), None)

    def __str__(self) -> str:
        m, best = self.memory, self.best
        parts = f"weights {megabytes(m.weights)}, KV cache {m.kv_token} bytes a token, scratch {megabytes(m.scratch)}"
        running = f"running {megabytes(m.run)}, of {megabytes(m.available)} ({m.limit})"
        return f"plan: {parts}, {running}; {_advice(best, self.wanted_context)}"


def open_sizes(config: EngineConfig, available: int, limit: str) -> Sizes:
    """`make_sizes` of a configuration whose model is a path and whose device is resolved."""
    from tinyvllm.runner.opened import open_model

    opened = open_model(config, config.device)
    config = fitted_to_states(config, opened)
    return make_sizes(config, opened, drafter_memory(config, opened), available, limit)


def make_sizes(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory, available: int, limit: str) -> Sizes:
    """What the engine takes of `available` bytes; `limit` says what sets them."""
    from tinyvllm.runner.memory import run_bytes
    from tinyvllm.runner.scratch import wanted_context
    from tinyvllm.runner.sizes import longest_contexts, scratch_bytes

    wanted = wanted_context(config, opened.config)
    taken = Memory(
        available,
        limit,
        opened.weight_bytes,
        opened.block_bytes // config.block_size,
        scratch_bytes(config, opened, wanted),
        sum(run_bytes(config.device_of(rank)) for rank in range(config.num_ranks)),
        drafter.total(1),
    )
    start, refusal = _start(config, opened, drafter, taken)
    fits = longest_contexts(_room(config, opened, taken), config, opened, drafter)
    return Sizes(taken, wanted, start, refusal, fits, _candidates(config, opened, drafter, taken, wanted), _rank_sizes(config, opened))


def _rank_sizes(config: EngineConfig, opened: OpenedModel) -> list[RankSize]:
    """What each of several ranks takes; none for one process."""
    found = []
    free = [use.free for use in opened.memory_uses]
    for rank in range(config.num_ranks if opened.memory else 0):
        part = open_rank(config, opened, rank)
        layers, kv_token, device = part.layers, part.own_block_bytes // config.block_size, config.device_of(rank)
        found.append(RankSize(rank, (layers.start, layers.stop), part.outline().bytes, kv_token, device, free[rank] if free else None))
    return found


def open_rank(config: EngineConfig, opened: OpenedModel, rank: int) -> OpenedModel:
    """What a rank has of the model that rank 0 has opened."""
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.pipeline import RankStart

    assert opened.memory is not None
    return open_model(config, config.device_of(rank), RankStart(opened.memory, rank, opened.stage.ends if opened.stage else []))


def _room(config: EngineConfig, opened: OpenedModel, taken: Memory) -> int:
    """Bytes that the KV cache may take, and a drafter, at most."""
    if opened.division is not None:
        return opened.division.most_blocks(config.gpu_layers) * opened.block_bytes
    return taken.available - taken.fixed


def _start(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory, taken: Memory) -> tuple[Start | None, str | None]:
    from tinyvllm.runner.sizes import block_bytes, check_all_weights, pool_size

    try:
        check_all_weights(opened, taken.available)
        size = pool_size(config, opened, drafter, taken.available - taken.weights)
    except OutOfMemoryError as error:
        return None, str(error)
    return Start(size.num_blocks * block_bytes(config, opened), size.num_blocks, size.max_model_len, drafter.total(size.num_blocks)), None


def _candidates(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory, taken: Memory, wanted: int) -> list[Candidate]:
    from tinyvllm.runner.sizes import longest_contexts, room_of

    found = []
    for quantization, nbytes, room in _by_quantization(config, opened, taken):
        longest = max((fit.context for fit in longest_contexts(room, config, opened, drafter) if fit.sequences == 1), default=0)
        found.append(Candidate(quantization, nbytes, room >= room_of(wanted, 1, config, opened, drafter), longest))
    return sorted(found, key=lambda one: -one.weights)


def _by_quantization(config: EngineConfig, opened: OpenedModel, taken: Memory) -> Iterator[tuple[str | None, int, int]]:
    """Bytes of weights, and what these leave for the KV cache and a drafter: in the file's own formats, and, where these are floats, in
    every format that the device has kernels for.
    """
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.pipeline import RankStart
    from tinyvllm.runner.planned import is_packed

    one_stage = dict[str, Any](tensor_parallel_size=1, pipeline_parallel_size=1, more_devices=(), gpu_layers=None)
    whole = replace(config, quantization=None, imatrix=None, **one_stage)
    plain = open_model(whole, config.device)
    copies = [open_model(whole, config.device, RankStart(plain.memory, rank, [])) for rank in range(1, whole.num_ranks) if plain.memory]

    def sizes(quantization: str | None) -> tuple[int, int]:
        if opened.division is not None:
            return _divided(config, opened, plain, opened.division, quantization)
        nbytes = plain.outline(quantization).bytes + sum(copy.outline(quantization).own_bytes for copy in copies)
        return nbytes, taken.available - taken.fixed + taken.weights - nbytes

    yield None, *sizes(None)
    for quantization in () if is_packed(plain) else QUANTIZATIONS:
        with contextlib.suppress(ModelError):  # no kernels for the format, or a matrix that it cannot hold
            yield quantization, *sizes(quantization)


def _divided(
    config: EngineConfig, opened: OpenedModel, plain: OpenedModel, division: Division, quantization: str | None
) -> tuple[int, int]:
    """Bytes of weights, and what these leave for the KV cache, where several devices divide layers of that size."""
    from tinyvllm.runner.opened import layer_weights, wanted_blocks

    gpu, cpu = (layer_weights(plain.config, plain.on_device(device).outline(quantization)) for device in config.devices)
    division = division.with_weights(gpu, cpu)
    parts = division.parts(division.choose(config.gpu_layers, *wanted_blocks(config, opened)))
    return sum(part.weights for part in parts), division.most_blocks(config.gpu_layers) * opened.block_bytes


def _advice(best: Candidate | None, context: int) -> str:
    if best is None:
        return f"no quantization leaves room for one sequence of {context} tokens: use a smaller model, or lower --max-model-len"
    how = "as in the file" if best.quantization is None else f"with --quantization {best.quantization}"
    return f"{how}, one sequence of {best.longest} tokens fits"
