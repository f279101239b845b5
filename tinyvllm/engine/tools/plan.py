"""The plan of an engine before it is loaded: what it takes in memory, what fits, which kernels run, and how fast it can be.

Reads the description of a model and the headers of its files. Everything is decided by the code that places the weights of an engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.switches import cache_folder
from tinyvllm.engine.drafter_memory import drafter_memory
from tinyvllm.engine.recurrent import fitted_to_states
from tinyvllm.engine.tools.hub_choice import Choice, choose_pull
from tinyvllm.engine.tools.plan_sizes import Sizes, make_sizes, open_rank, open_sizes
from tinyvllm.errors import ArgumentError, KernelError, OutOfMemoryError, ToolchainError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.runner.device import start_device

if TYPE_CHECKING:
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.outlined import Held
    from tinyvllm.runner.planned import KernelChoice

SPEED_TOKENS = 512  # of the context of the predicted decode, and of the predicted prompt


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
    """`formats` has the bytes of weights by format; `skipped` says why the machine runs no better kernels, `unpredicted` why there is no
    speed.
    """

    model: str
    device: str
    architecture: str
    formats: dict[str, int]
    sizes: Sizes
    kernels: list[KernelChoice]
    skipped: list[str]
    speed: Speed | None
    unpredicted: str | None

    def record(self) -> dict[str, Any]:
        """All figures, for JSON."""
        sizes = asdict(self.sizes)
        best = self.sizes.best
        return {**asdict(self), "sizes": {**sizes, "best": None if best is None else asdict(best)}}


def make_plan(config: EngineConfig, memory: int | None = None, speed: bool = True) -> Plan:
    """The plan of a configuration, on this machine or on one with `memory` free bytes.

    With `speed` some steps are run without the model's weights, which takes seconds. ArgumentError, ModelError and FormatError as
    an engine raises them; too little memory is no error but part of the plan. Of a model on a hub only the headers are fetched.
    """
    config, available, limit = on_device(config, memory)
    with _local(config, available, limit) as (name, local):
        return _plan(name, local, available, limit, speed)


def plan_sizes(config: EngineConfig, memory: int | None = None, limit: str = "--memory") -> Sizes:
    """The memory of a plan alone; `limit` says what sets `memory`. Errors as those of `make_plan`."""
    config, available, limit = on_device(config, memory, limit)
    with _local(config, available, limit) as (_, local):
        return open_sizes(local, available, limit)


def plan_pull(config: EngineConfig, memory: int | None = None) -> Choice:
    """Which model of a hub's repository, `config.model`, fits: see `choose_pull`. A GGUF file that the name chooses is not planned."""
    from tinyvllm.weights.hub_files import hub_models

    pulls = hub_models(config.model, config.revision)
    chosen = len(pulls) == 1 and not pulls[0].is_folder
    return Choice(pulls[0]) if chosen else choose_pull(pulls, *on_device(config, memory))


def on_device(config: EngineConfig, memory: int | None, limit: str = "--memory") -> tuple[EngineConfig, int, str]:
    """The configuration with its device resolved, the bytes that a plan may use, and what limits them."""
    config.require_one_engine()
    config = replace(config, device=start_device(config.device, cache_folder()))
    from tinyvllm.runner.memory import free_together

    if memory is None:
        return config, *free_together(config.memories)
    if config.more_devices:
        raise ArgumentError(f"{limit} is the memory of one device, and device={config.device_names} has two: leave one of them out")
    if config.on_gpus:
        raise ArgumentError(f"{limit} is the memory of one device, and {config.num_ranks} ranks have a {config.device} each: leave it out")
    return config, memory, limit


@contextlib.contextmanager
def _local(config: EngineConfig, available: int, limit: str) -> Iterator[tuple[str, EngineConfig]]:
    """The model's name, and the configuration with a path: of a hub's model that of copies of its headers."""
    from tinyvllm.weights.hub import parse_name
    from tinyvllm.weights.hub_files import hub_models
    from tinyvllm.weights.hub_headers import header_copies

    if os.path.exists(os.path.expanduser(config.model)) or parse_name(config.model) is None:
        yield config.model, config
        return
    pulls = hub_models(config.model, config.revision)
    pull = pulls[0] if len(pulls) == 1 else choose_pull(pulls, config, available, limit).pull
    with header_copies(pull) as path:
        yield pull.name, replace(config, model=str(path), revision=None)


def _plan(name: str, config: EngineConfig, available: int, limit: str, speed: bool) -> Plan:
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.planned import architecture_of_model, bytes_by_format, planned_kernels, skipped_by_machine

    opened = open_model(config, config.device)
    config = fitted_to_states(config, opened)
    sizes = make_sizes(config, opened, drafter_memory(config, opened), available, limit)
    held = opened.outline().held  # last: the kernels are those of the model with these weights, in rank 0
    if opened.whole is not None:
        held = opened.whole.held
    blocks, longest = (1, sizes.wanted_context) if sizes.start is None else (sizes.start.num_blocks, sizes.start.max_model_len)
    kernels = planned_kernels(config, opened, blocks, longest)
    for rank in range(1, len(config.devices)):
        part = open_rank(config, opened, rank)
        part.outline()
        kernels += planned_kernels(config, part, blocks, longest)
    predicted, reason = _predicted(config, opened, held, kernels, longest) if speed else (None, "it was switched off")
    machine, formats, skipped = architecture_of_model(opened), bytes_by_format(held), skipped_by_machine(opened)
    return Plan(name, config.device_names, machine, formats, sizes, kernels, skipped, predicted, reason)


def _predicted(
    config: EngineConfig, opened: OpenedModel, held: list[Held], kernels: list[KernelChoice], longest: int
) -> tuple[Speed | None, str | None]:
    """Tokens a second, or why they cannot be predicted."""
    from tinyvllm.engine.tools.rehearsal import rehearsed_seconds
    from tinyvllm.runner.memory import read_bandwidth
    from tinyvllm.runner.planned import runs_by_reference

    if config.num_ranks > 1:
        return None, "several ranks share the machine"
    if slow := runs_by_reference(kernels):
        return None, f"the reference runs {', '.join(slow)}, many times slower than kernels"
    context, sequences = min(SPEED_TOKENS, longest), config.max_num_seqs
    tokens = max(1, min(context, config.max_num_batched_tokens, longest - 1))  # an answer is a token at least
    try:
        step = rehearsed_seconds(config, opened, held, sequences, context, tokens)
        bandwidth = read_bandwidth(config.device)
    except (KernelError, ToolchainError, OutOfMemoryError) as error:
        return None, str(error)
    return Speed(context, 1 / step.decode, sequences, sequences / step.decode_all, tokens / step.prompt, bandwidth), None
