"""What an engine is built from: its runner, tokenizer, end-of-sequence ids and scheduler."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.cache.snapshots import StateSnapshots
from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.values import expand_home
from tinyvllm.engine.drafter_memory import drafter_memory, log_division
from tinyvllm.engine.prefix_store import PrefixStore
from tinyvllm.engine.prompt import default_sampling_params
from tinyvllm.engine.recurrent import fitted_to_states
from tinyvllm.errors import ModelError, OutOfMemoryError
from tinyvllm.host_memory import headroom, is_out_of_memory, megabytes
from tinyvllm.scheduler import Scheduler, SchedulerLimits
from tinyvllm.text.load import load_tokenizer, tokenizer_from_gguf
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.runner import Runner
    from tinyvllm.sampling.parameters import SamplingFlags

Progress = Callable[[int, int, str], None]
log = logging.getLogger("tinyvllm")

# tinygrad keeps the state of a capture for the whole process, so engines in several threads take turns. They would in any case: a device
# runs one step at a time.
DEVICE_LOCK = threading.RLock()
_ADVICE = "lower --num-blocks or --kv-memory, or use --quantization q8_0 or q4_k_m"


def start_runner(config: EngineConfig, progress: Progress | None) -> Runner:
    """`load_runner` of the engine's own model, on the cores that this process has of those that share it."""
    from tinyvllm.runner.device import share_cores
    from tinyvllm.runner.grid import core_share

    share_cores(core_share(config))
    return load_runner(config, progress)


def load_runner(config: EngineConfig, progress: Progress | None, opened: OpenedModel | None = None) -> Runner:
    """The model on its device, opened before or not. OutOfMemoryError, one line, if it, its cache and a drafter do not fit."""
    from tinyvllm.runner.memory import free_together
    from tinyvllm.runner.opened import open_model  # after start_device, which sets what tinygrad reads at import
    from tinyvllm.runner.runner import Runner

    free, limit = free_together(config.memories)  # before the weights take some
    try:
        with DEVICE_LOCK:
            opened = opened or open_model(config, config.device)
            config = fitted_to_states(config, opened)
            opened = replace(opened, likely_draw=_likely_draw(opened.checkpoint.folder))
            drafter = drafter_memory(config, opened)
            runner = Runner(config, config.device, progress, opened, drafter)
    except OutOfMemoryError as error:
        if opened is None:
            raise
        raise OutOfMemoryError(f"{error}; {_planned(config, opened, free, limit)}") from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"engine: memory ran out while the model was loaded ({error}); {headroom()}; {_ADVICE}") from error
    log_division(runner, drafter)
    log_devices(opened, runner.pool.num_blocks)
    log_stages(opened)
    if runner.groups.kept:
        log.warning("windows: blocks stay until their sequence ends, because %s", runner.groups.kept)
    if config.max_model_len is None and runner.max_model_len < runner.config.max_context:
        text = (
            "the context is %d tokens by default, the model allows %d: --max-model-len sets another, --num-blocks or --kv-memory the cache"
        )
        log.warning(text, runner.max_model_len, runner.config.max_context)
    return runner


def log_devices(opened: OpenedModel, num_blocks: int) -> None:
    """Say which layers each of several devices has, and what they take of its memory."""
    division, stage = opened.division, opened.stage
    if division is None or stage is None:
        return
    first, count = stage.layers.start, stage.layers.stop
    what = f"layers {first} to {count - 1} of {count} and the head", f"layers 0 to {first - 1} and the embedding table"
    for part, layers in zip(division.parts(len(stage.layers)), what, strict=True):
        log.warning(
            "%s has %s: weights %s, KV cache %s, of %s",
            part.device, layers, megabytes(part.weights), megabytes(num_blocks * part.block), megabytes(part.free),
        )  # fmt: skip
    if division.holds_all(num_blocks):
        log.warning("%s has memory for all layers: --device %s alone is faster", division.gpu.device, division.gpu.device)


def log_stages(opened: OpenedModel) -> None:
    """Say which layers each stage of a pipeline has where some layers cannot be parted."""
    count = len(opened.config.undivided)
    if opened.stage is not None and count:
        text = "pipeline: stages end after layers %s of %d: the last %d are in one, because some read the keys and values of others"
        log.warning(text, ", ".join(map(str, opened.stage.ends)), opened.config.num_blocks, count)


def _likely_draw(folder: Path) -> SamplingFlags:
    """What a request without parameters of its own needs."""
    from tinyvllm.sampling.parameters import SamplingFlags, flags_of

    try:
        return flags_of(default_sampling_params(folder))
    except ModelError:  # said when the parameters are used
        return SamplingFlags()


def _planned(config: EngineConfig, opened: OpenedModel, free: int, limit: str) -> str:
    """What `tinyvllm plan` says of an engine that does not start, with the memory that was free before."""
    from tinyvllm.engine.tools.plan_sizes import make_sizes

    try:
        with DEVICE_LOCK:
            return str(make_sizes(config, opened, drafter_memory(config, opened), free, limit))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return "there is not even memory for a plan: run `tinyvllm plan` alone"


def load_model_tokenizer(config: EngineConfig, runner: Runner) -> Tokenizer | None:
    """The tokenizer that the configuration names, or else the model's own; None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        path = expand_home("tokenizer", config.tokenizer)
        return load_tokenizer(path) if path.is_dir() else tokenizer_from_gguf(runner.gguf_metadata(path))
    checkpoint = runner.checkpoint
    return tokenizer_from_gguf(checkpoint.config) if checkpoint.kind == "gguf" else load_tokenizer(checkpoint.folder)


def eos_ids_of(config: dict[str, object]) -> tuple[int, ...]:
    """End-of-sequence ids in the description of a model without its tokenizer."""
    key = "tokenizer.ggml.eos_token_id" if "general.architecture" in config else "eos_token_id"
    eos: Any = config.get(key)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(i) is not int for i in ids):
        raise ModelError(f"engine: {key} must be a token id or a list of them, got {eos!r:.80}")
    return tuple(i for i in ids if i >= 0)


def new_scheduler(config: EngineConfig, runner: Runner, store: PrefixStore | None, clock: Callable[[], float]) -> Scheduler:
    """A scheduler over the runner's blocks, with a prefix cache that has the blocks of `store`."""
    blocks, groups = runner.pool, runner.groups.blocks
    limits = SchedulerLimits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        runner.max_model_len,
        config.max_num_queued_reqs,
        config.max_num_queued_tokens,
        blocks.block_bytes,
        config.preemption_mode,
        config.step_seconds,
        groups.window.tokens,
        groups.full,
        groups.windowed,
        runner.state_slots is not None,
        None if runner.state_slots is None else runner.state_slots.drafts,
    )
    pool, prefix = BlockPool(blocks.num_blocks, config.block_size), None
    if config.enable_prefix_caching:
        prefix = PrefixCache(pool, store.key if store else os.urandom(32), groups=groups)
        if store is not None:
            store.restore(prefix)
    host = BlockPool(runner.swap_blocks, config.block_size) if runner.swap_blocks else None
    slots = runner.state_slots
    snapshots = StateSnapshots(slots.copies) if slots is not None and prefix is not None else None
    return Scheduler(limits, pool, prefix, host, clock, snapshots)


def cache_facts(config: EngineConfig, scheduler: Scheduler) -> dict[str, object]:
    """The configuration of the KV cache, as the metrics name it. The concurrency is in sequences of the longest context."""
    num_blocks, needed = scheduler.pool.num_blocks, scheduler.tables.most_blocks(scheduler.limits.max_model_len)
    return {
        "kv_cache_size_tokens": scheduler.tables.groups.num_tokens(num_blocks),
        "kv_cache_max_concurrency": round(num_blocks / needed, 2),
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "num_gpu_blocks": num_blocks,
        "enable_prefix_caching": config.enable_prefix_caching,
        "swap_space": config.swap_space,
    }
