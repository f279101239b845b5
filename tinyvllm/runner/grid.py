"""The grid of ranks that share a stage: which of them meet, and the memory that they share."""

from __future__ import annotations

import os

import numpy as np

from tinyvllm.backends.registry import backend_for
from tinyvllm.config.devices import kind_of
from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.ranks import SHARED_BY_GPUS
from tinyvllm.config.switches import environment
from tinyvllm.distributed.memory import Layout, SharedMemory
from tinyvllm.errors import ArgumentError
from tinyvllm.integers import ceil_div, round_up
from tinyvllm.models.config import ModelConfig
from tinyvllm.placement import CoreShare, Placement, RankGroup
from tinyvllm.runner.device import choose_device
from tinyvllm.runner.prepare import power_bucket

ATTENTION_PLACE = 1 << 20  # 4 MiB: more would leave the caches between two ranks
CUDA_PLACE = 1 << 22  # 16 MiB: what GPUs exchange at a time
CUDA_RESULTS = 1 << 24  # 64 MiB: results of decodes at most, unless one sequence has more; sequences that do not fit take turns
CUDA_WORDS = 256  # float32, a half of what a rank's site has before its two places (kernels/cuda/include/meeting.cuh)
_LANES = 16  # float32 that kernels copy at once


def tensor_ranks(memory: SharedMemory, rank: int, placement: Placement) -> RankGroup | None:
    """The ranks that have the other parts of this one's matrices; None for whole ones."""
    layout = memory.layout
    return _group(placement, memory.tensor_group(rank), layout.cell(rank)[0], layout.tensor, layout.sums, layout.logits)


def context_ranks(memory: SharedMemory, rank: int, placement: Placement) -> RankGroup | None:
    """The ranks that have the other parts of this one's contexts, and its weights; None for whole ones."""
    layout = memory.layout
    return _group(placement, memory.context_group(rank), layout.cell(rank)[1], layout.context, layout.results)


def _group(placement: Placement, memory: np.ndarray, rank: int, count: int, place: int, logits: int = 0) -> RankGroup | None:
    backend = backend_for(placement)
    return None if count == 1 or backend is None else backend.rank_group(placement, rank, count, memory, place, logits)


def core_share(config: EngineConfig, rank: int = 0) -> CoreShare:
    """The part that a rank of the configured replica has in the cores of the CPU."""
    count = config.cpu_ranks
    if count == 1 or kind_of(config.device) != "CPU":
        return CoreShare(count)
    first, context = (config.data_parallel_rank or 0) * config.num_ranks, config.context_parallel_size
    same = [other for other in range(config.num_ranks) if other // context == rank // context]
    replicas = range(0, count, config.num_ranks)
    return CoreShare(count, first + rank, tuple(start + other for start in replicas for other in same))


def rank_environments(config: EngineConfig) -> list[dict[str, str]]:
    """What each rank's process has in its environment in addition to this one. ArgumentError where there is not a device for each."""
    backend = backend_for(Placement(config.device))
    if not config.on_gpus or backend is None:
        return [{}] * config.num_ranks
    return backend.rank_environments(config.num_ranks, bool(environment(os.environ).get("TINYVLLM_SHARE_GPUS")))


def replica_environments(config: EngineConfig) -> list[dict[str, str]]:
    """What each replica's process has in its environment in addition to this one: on GPUs as many of them as it has ranks. ArgumentError
    where there are not enough.
    """
    device, count = choose_device(config.device), config.data_parallel_size
    backend = backend_for(Placement(device))
    if device == "CPU" or backend is None:
        return [{}] * count
    if kind_of(device) not in SHARED_BY_GPUS:
        raise ArgumentError(f"data_parallel_size={count}: there is one {device} here; use --device CPU, or leave it out")
    each = backend.rank_environments(count * config.num_ranks, bool(environment(os.environ).get("TINYVLLM_SHARE_GPUS")))
    groups = [each[number * config.num_ranks : (number + 1) * config.num_ranks] for number in range(count)]
    return [{name: ",".join(rank[name] for rank in ranks) for name in ranks[0]} for ranks in groups]


def shared_layout(config: EngineConfig, model: ModelConfig) -> Layout:
    """Room for the largest step; pages take memory once they are written."""
    tensor, context, stages = config.tensor_parallel_size, config.context_parallel_size, config.pipeline_parallel_size
    rows, hidden = max_rows(config), 16 * round_up(config.max_lora_rank, 4) if config.enable_lora else 0
    hidden *= model.num_experts_per_tok if config.lora_experts else 1  # of each of a row's experts
    width = ceil_div(config.max_model_len or model.max_context, config.block_size)
    sums, logits = max(rows, model.num_experts_per_tok) * max(model.dim, hidden), rows * model.vocab_size
    results = max(_attention_place(model, tensor, width, rows, ATTENTION_PLACE), ceil_div(rows, context) * model.dim)
    if kind_of(config.device) == "CUDA":  # a place at a time, with as many logits as fit; all of it is locked in memory
        sums, logits = max(min(sums, CUDA_PLACE), round_up(model.vocab_size, 16)) + CUDA_WORDS, 0
        results = max(_attention_place(model, tensor, width, config.max_num_seqs, CUDA_RESULTS), CUDA_PLACE, model.dim) + CUDA_WORDS
    stream, inputs = rows * model.dim if stages > 1 else 0, rows * (width + 12) + 1024
    return Layout(tensor, context, stages, sums, results, logits, stream, inputs)


def _attention_place(model: ModelConfig, tensor: int, width: int, rows: int, most: int) -> int:
    """float32 of the results of a rank's partitions for as many of `rows` rows as fit `most`, but at least for one.

    A table is `width` blocks, in each of which a rank has one partition, of its heads (kernels/cpu/attention_ranks.c).
    """
    value_dim = model.latent.rank if model.latent else model.head_dim
    one = width * ceil_div(model.n_heads, tensor) * (value_dim + 2)
    return round_up(one * max(1, min(rows, most // one)), _LANES)


def max_rows(config: EngineConfig) -> int:
    """Rows of the largest step."""
    return 2 * power_bucket(max(config.max_num_batched_tokens, config.max_num_seqs), 16)
