"""How much memory the drafter of `speculative_config` will take, so that the model's KV cache leaves it. Nothing is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm.config.engine import EngineConfig
from tinyvllm.host_memory import megabytes
from tinyvllm.speculative import HEADS, SpeculativeConfig

if TYPE_CHECKING:
    from tinyvllm.runner.memory import DrafterMemory
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.runner import Runner

log = logging.getLogger("tinyvllm")


def draft_model_config(config: EngineConfig, chosen: SpeculativeConfig) -> EngineConfig:
    """The draft model's configuration, but for the size of its cache and its context. It is whole: rank 0 has it alone."""
    assert chosen.model is not None, "SpeculativeConfig checks it"
    return replace(
        config, model=chosen.model, revision=chosen.revision, quantization=chosen.quantization, imatrix=None, tokenizer=None,
        max_model_len=None, kv_memory=None, swap_space=0, prefix_cache_dir=None, record=None, profile=None, energy=False,
        speculative_config=None, disable_hybrid_kv_cache_manager=True, enable_lora=False, max_loras=1, max_lora_rank=16, lora_experts=False,
        lora_modules=(), tensor_parallel_size=1,
    )  # fmt: skip


def drafter_memory(config: EngineConfig, opened: OpenedModel) -> DrafterMemory:
    """What the drafter of an engine with the model `opened` takes. Errors of its model's files as they are."""
    from tinyvllm.runner.memory import NO_DRAFTER, DrafterMemory  # tinygrad comes with it
    from tinyvllm.runner.opened import open_model
    from tinyvllm.speculate.opening import heads_memory

    chosen = config.speculative_config
    if chosen is None:
        return NO_DRAFTER
    if chosen.method == "draft_model":
        draft = open_model(draft_model_config(config, chosen), config.device)
        weights = 0 if draft.loader().maps_all else draft.weight_bytes
        return DrafterMemory(weights, draft.block_bytes)
    return heads_memory(chosen, opened, config) if chosen.method in HEADS else NO_DRAFTER


def log_division(runner: Runner, drafter: DrafterMemory) -> None:
    """Say how the memory of the KV cache is divided, if a drafter takes some."""
    if drafter.total(1):
        pool = runner.pool
        log.warning(
            "speculation: the KV cache has %d blocks: %s of the model and %s of the drafter, whose weights take %s",
            pool.num_blocks, megabytes(pool.num_blocks * pool.block_bytes), megabytes(drafter.cache(pool.num_blocks)),
            megabytes(drafter.weights),
        )  # fmt: skip
