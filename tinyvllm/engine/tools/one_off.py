"""What is computed beside whatever runs, at once and in blocks that are free for the moment: logits of a prompt, and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm.errors import RequestError
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.scheduler import Scheduled, Scheduler

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Runner


def prompt_logits(runner: Runner, scheduler: Scheduler, token_ids: list[int]) -> np.ndarray:
    """Float32 logits [T, V] of every position of one prompt."""
    return _in_free_blocks("prompt_logits", runner, scheduler, token_ids, runner.prompt_logits)


def embed(runner: Runner, scheduler: Scheduler, token_ids: list[int], pooling: str = "mean", normalize: bool = True) -> np.ndarray:
    """One prompt as a vector float32 [E]: its hidden states' mean, or the last of them, made of length 1 where `normalize` says so."""
    if pooling not in ("mean", "last"):
        raise RequestError(f"embed: pooling must be mean or last, got {pooling!r}")
    states = _in_free_blocks("embed", runner, scheduler, token_ids, runner.states)
    pooled: np.ndarray = states.mean(0) if pooling == "mean" else states[-1]
    return pooled / max(float(np.linalg.norm(pooled)), 1e-12) if normalize else pooled


def _in_free_blocks(
    speaker: str, runner: Runner, scheduler: Scheduler, token_ids: list[int], compute: Callable[[Scheduled], np.ndarray]
) -> np.ndarray:
    """What `compute` gives for each chunk of a prompt, joined."""
    pool, V, size = scheduler.pool, runner.config.vocab_size, scheduler.limits.max_batched_tokens
    if not token_ids or len(token_ids) > runner.max_model_len:
        raise RequestError(f"{speaker}: expected 1 to {runner.max_model_len} tokens, got {len(token_ids)}")
    if bad := next((t for t in token_ids if not 0 <= t < V), None):
        raise RequestError(f"{speaker}: token id {bad} is outside the vocabulary of {V}")
    sequence = Sequence(-1, speaker, list(token_ids), SamplingParams())
    sequence.block_table = pool.allocate(pool.blocks_for(len(token_ids)))
    try:
        starts = range(0, len(token_ids), size)
        return np.concatenate([compute(Scheduled(sequence, start, min(size, len(token_ids) - start), 0)) for start in starts])
    finally:
        pool.release(sequence.block_table)
