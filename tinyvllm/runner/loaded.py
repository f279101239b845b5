"""A model on its device: its weights, its KV pool and the other caches of its layers, and what it computes with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tinyvllm.backends.cpu.threads import thread_pool, threads_in_words
from tinyvllm.backends.packed import packed_caches, packed_weights
from tinyvllm.backends.registry import Choice, architecture_of, choices, skipped_variants, usable_variants
from tinyvllm.bridge import copied
from tinyvllm.config.engine import EngineConfig
from tinyvllm.placement import Placement
from tinyvllm.runner.adapters import AdapterPool
from tinyvllm.runner.memory import NO_DRAFTER, DrafterMemory, free_memory
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.sizes import block_bytes, check_all_weights, groups_of, pool_size
from tinyvllm.runner.states import all_caches, checked_slots, new_states
from tinyvllm.runner.tested import test_packing
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.quantized.notes import describe

log = logging.getLogger("tinyvllm")


class LoadedModel:
    """What an engine's steps read and write. `caches` are those of all layers, `pool` those of layers with keys and values."""

    def __init__(
        self,
        config: EngineConfig,
        device: str,
        opened: OpenedModel,
        progress: Callable[[int, int, str], None] | None = None,
        drafter: DrafterMemory = NO_DRAFTER,
    ):
        """Load the weights, and make room for everything else. `drafter` is the memory that must be left for drafts."""
        self.placement = Placement(device)
        self.architecture = architecture_of(self.placement)
        self.options, self.max_num_seqs = config, config.max_num_seqs
        self.checkpoint, self.config, self.dtype, self.model = opened.checkpoint, opened.config, opened.dtype, opened.model
        self._divides = opened.split is not None
        loader = self._load(opened, progress)
        # the other ranks of this machine load their weights after this one
        free = None if opened.whole is None or opened.memory_uses else free_memory(device) - (self.weight_bytes - loader.bytes)
        size = pool_size(config, opened, drafter, free)
        self.max_model_len, self.groups = size.max_model_len, groups_of(config, self.config)
        groups = self.groups.layers if self.groups.blocks.count > 1 else None
        self.pool, self._layers = opened.pool(opened.own_kv_layers, size.num_blocks, groups), opened.layers
        self.kv_token_bytes, self.block_bytes = opened.block_bytes // config.block_size, block_bytes(config, opened)
        self.state_slots = checked_slots(config, self.config, device)
        states = new_states(opened.part, opened.layers, self.state_slots, device)
        self.caches = all_caches(self.config, opened.layers, self.pool, states)
        self.adapters = AdapterPool(config, opened, device) if config.enable_lora else None
        # a pool too small for the model's context shortens sequences, but must not change what the positions mean
        constants = self.model.constants(self.max_model_len, config.max_model_len or self.config.max_context)
        self._constants = {name: copied(np.asarray(a), device) for name, a in constants.items()}

    def _load(self, opened: OpenedModel, progress: Callable[[int, int, str], None] | None) -> WeightLoader:
        """Check that the weights fit, test what packs them, and load them."""
        plan, loader = opened.plan, opened.loader(progress)
        if opened.leads and not loader.maps_all:
            check_all_weights(opened)
        self.packing_test = test_packing(plan, plan.matrix_formats(opened.recipes, opened.stored))
        loader.load(self.model, opened.recipes)
        if note := describe(self.checkpoint.tensors, self.checkpoint.unused, loader.unpacked):
            log.warning(note)
        if self.checkpoint.left_out:
            log.warning(self.checkpoint.left_out)
        whole = opened.whole or loader
        self.weight_bytes, self.bytes_per_token = whole.bytes + opened.copies, whole.streamed
        self.weight_formats, self.weight_layout, self.weight_identity = loader.formats, plan.layout, plan.identity
        return loader

    @property
    def device(self) -> str:
        """tinygrad's name of the device."""
        return self.placement.device

    @property
    def packed_types(self) -> dict[str, list[str]]:
        """What kernels of the device compute with as packed: weight formats, and values of `kv_cache_dtype`."""
        return {"weights": [*packed_weights(self.placement)], "kv_cache": [*packed_caches(self.placement)]}

    @property
    def kv_bytes_by_layer(self) -> list[float]:
        """Bytes of the keys and values of one token that each layer of this process reads."""
        c, pool, layers = self.config, self.pool, self._layers
        stored = [layer for layer in layers if c.stores_keys(layer)]
        shapes = [pool.shapes[stored.index(c.kv_source(layer))] for layer in layers] if c.window_heads else [pool.block] * len(layers)
        return [shape.nbytes / pool.block_size for shape in shapes]

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer that this process has, 0 for full attention."""
        windows = tuple(self.config.windows) or (0,) * self.config.num_blocks
        return windows[self._layers.start : self._layers.stop]

    def choices(self) -> list[Choice]:
        """Every choice of a kernel that was made in this process so far."""
        return choices()

    def variants(self) -> list[str]:
        """The kernel variants that this machine can run on the engine's devices; which of them run decides the last bits of all results."""
        return [name for device in self.options.devices for name in usable_variants(Placement(device))]

    def skipped_variants(self) -> list[str]:
        """Why the machine runs no better variant than its best on the engine's devices."""
        return [reason for device in self.options.devices for reason in skipped_variants(Placement(device))]

    def num_threads(self) -> int:
        """Threads of the CPU's thread pool; 0 on other devices."""
        return thread_pool().num_threads if self.placement.is_cpu else 0

    def threads_in_words(self) -> str:
        """The number of threads and what it follows from."""
        return threads_in_words() if self.placement.is_cpu else "0 threads"

    @staticmethod
    def gguf_metadata(path: Path) -> dict[str, object]:
        """The metadata of a GGUF file that is not the model's own."""
        return open_checkpoint(path).config
