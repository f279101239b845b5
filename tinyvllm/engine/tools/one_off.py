"""One-off forward passes outside the schedule, in blocks that are free for the moment: logits of a prompt, embeddings, kernel choices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from tinyvllm.engine.engine import Engine
from tinyvllm.engine.startup import DEVICE_LOCK
from tinyvllm.errors import RequestError
from tinyvllm.request import ONE_OFF_ROW, SamplingParams, Sequence
from tinyvllm.scheduler import Scheduled

MOST_WAIT = 60  # seconds


def prompt_logits(engine: Engine, token_ids: list[int]) -> np.ndarray:
    """Float32 logits [T, V] of every position of one prompt."""
    return np.concatenate([*prompt_logits_by_chunk(engine, token_ids)])


def prompt_logits_by_chunk(engine: Engine, token_ids: list[int], chunk: int | None = None) -> Iterator[np.ndarray]:
    """Float32 logits [T, V] of one chunk of a prompt after the other: of `chunk` tokens, or of as many as a step may have.

    The kernels are those of a prefill that serves a request. Exhaust or close the iterator: it holds the prompt's blocks.
    """
    return _by_chunk("prompt_logits", engine, token_ids, lambda entry: engine.runner.prompt_logits(entry), chunk)


def embed(engine: Engine, token_ids: list[int], pooling: str = "mean", normalize: bool = True) -> np.ndarray:
    """One prompt as a vector float32 [E]: the mean of its hidden states, or the last one; of length 1 with `normalize`."""
    if pooling not in ("mean", "last"):
        raise RequestError(f"embed: pooling must be mean or last, got {pooling!r}")
    states = np.concatenate([*_by_chunk("embed", engine, token_ids, lambda entry: engine.runner.states(entry))])
    pooled: np.ndarray = states.mean(0) if pooling == "mean" else states[-1]
    return pooled / max(float(np.linalg.norm(pooled)), 1e-12) if normalize else pooled


def kernel_choices(engine: Engine) -> list[tuple[str, str, str, str]]:
    """Op, shape, kernel variant and reason of everything that runs here, after a prompt of two tokens and a decode were run to choose."""
    prompt_logits(engine, [0, 0])
    prompt_logits(engine, [0])
    return [(choice.stem, choice.shape, choice.variant, choice.why) for choice in engine.runner.choices()]


def _by_chunk(
    speaker: str, engine: Engine, token_ids: list[int], compute: Callable[[Scheduled], np.ndarray], chunk: int | None = None
) -> Iterator[np.ndarray]:
    """The result of `compute` for each chunk of a prompt. Other work of the device may run between two of them."""
    engine.check_open()
    pool, tables = engine.scheduler.pool, engine.scheduler.tables
    V, size = engine.runner.config.vocab_size, engine.scheduler.limits.max_batched_tokens
    size = size if chunk is None else min(chunk, size)
    if not token_ids or len(token_ids) > engine.max_model_len:
        raise RequestError(f"{speaker}: expected 1 to {engine.max_model_len} tokens, got {len(token_ids)}")
    if bad := next((t for t in token_ids if not 0 <= t < V), None):
        raise RequestError(f"{speaker}: token id {bad} is out of vocabulary, which has {V} tokens")
    sequence = Sequence(-1, speaker, list(token_ids), SamplingParams(), row=ONE_OFF_ROW)
    with _one_at_a_time(engine, speaker):
        with DEVICE_LOCK:
            blocks = pool.allocate(tables.most_blocks(len(token_ids)))
        sequence.block_table = tables.cycled(blocks, len(token_ids))
        try:
            for start in range(0, len(token_ids), size):
                with DEVICE_LOCK:
                    result = compute(Scheduled(sequence, start, min(size, len(token_ids) - start), 0))
                yield result
        finally:
            with DEVICE_LOCK:
                pool.release(blocks)


@contextlib.contextmanager
def _one_at_a_time(engine: Engine, speaker: str) -> Iterator[None]:
    """All passes of a model with recurrent states have one slot for theirs. RequestError after MOST_WAIT seconds."""
    if engine.runner.state_slots is None:
        yield
        return
    if not engine.runner.one_off.acquire(timeout=MOST_WAIT):
        raise RequestError(f"{speaker}: another pass outside the schedule did not end within {MOST_WAIT} s; exhaust or close its iterator")
    try:
        yield
    finally:
        engine.runner.one_off.release()
