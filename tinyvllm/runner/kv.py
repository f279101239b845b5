"""The KV pool on the device: one tensor of blocks a layer (`LayerCache`), the last block being scratch for padded rows. Where layers form
groups, layer i of every group has the same tensor, and a block belongs to one group at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.batch import PACKED_KV, KVLayout, LayerCache
from tinyvllm.bridge import Captured, alias, byte_spans, copied, download, synchronize, upload
from tinyvllm.errors import ArgumentError
from tinyvllm.models.config import ModelConfig
from tinyvllm.ops.copy import copy_blocks
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import adopt

Layers = Sequence[Sequence[int]]  # of each group


@dataclass(frozen=True)
class BlockShape:
    """One layer's block: packed, or numbers of a dtype. Of a block that `ranks` divide it is this one's part."""

    shape: tuple[int, ...]
    dtype: DType
    packed: KVLayout | None = None
    latent: int = 0
    ranks: RankGroup | None = None

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, kv_cache_dtype: str, weights: DType, ranks: RankGroup | None = None) -> BlockShape:
        """`auto` has the weights' dtype. ArgumentError for a model whose heads cannot be packed."""
        if ranks is not None:
            part = cls.of(config, block_size // ranks.world_size, kv_cache_dtype, weights)
            return replace(part, ranks=ranks)
        K, D = config.n_kv_heads, config.head_dim
        if kv_cache_dtype == "auto":
            dtype = weights if weights in (dtypes.float16, dtypes.bfloat16) else dtypes.float32
            if config.latent is not None:
                return cls((1, K, block_size, D), dtype, latent=config.latent.rank)
            return cls((2, K, block_size, D), dtype)
        if config.latent is not None:
            raise ArgumentError(f"kv_cache_dtype={kv_cache_dtype} does not pack the latents of multi-head latent attention: use auto")
        multiple = 8 if kv_cache_dtype == "int4" else 4
        if D % multiple:
            raise ArgumentError(
                f"kv_cache_dtype={kv_cache_dtype} packs heads in multiples of {multiple} numbers; the model's heads have {D}: use auto"
            )
        layout = KVLayout(PACKED_KV[kv_cache_dtype], K, block_size, D)
        return cls((layout.block_bytes,), dtypes.uint8, layout)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class KVPool:
    """`num_blocks` usable blocks and the scratch block after them; all zero at first, so that masked values are finite. `layers` has a
    cache a layer; `groups` are the layers of each group, None for one group of all. Layers share the tensors of `distinct` of them, if that
    is given: what they then hold has no meaning.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        block: BlockShape,
        device: str,
        groups: Layers | None = None,
        distinct: int | None = None,
    ):
        self.num_blocks, self.block_size, self.block, self.device = num_blocks, block_size, block, device
        groups = groups or [range(layers)]
        count = max(map(len, groups))
        self._memory: list[np.ndarray] = []  # [P, bytes] a layer, if it is in host memory
        self._copying: dict[int, tuple[Tensor, Tensor, Captured]] = {}  # pairs, their count and the copy, by the maximum of pairs
        pools = [self._zeros((num_blocks + 1, *block.shape), block.dtype, device) for _ in range(min(count, distinct or count))]
        self._caches = [LayerCache(pool, alias(pool), block.packed, block.latent, ranks=block.ranks) for pool in pools]
        self.layers = self._by_layer(layers, groups, lambda cache: [alias(cache.keys), alias(cache.keys)])

    def _zeros(self, shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
        if not Placement(device).is_cpu:
            return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()
        # zero pages that take memory only once a block is written; tinygrad's zeros would touch the whole pool now
        storage = np.dtype(f"V{dtype.itemsize}")  # numpy has no bfloat16
        memory = allocate(prod(shape) * dtype.itemsize)
        self._memory.append(memory.view(np.uint8).reshape(shape[0], -1))
        return adopt(memory.view(storage).reshape(shape), device, dtype)

    def _by_layer(self, layers: int, groups: Layers, other: Callable[[LayerCache], list[Tensor]]) -> list[LayerCache]:
        """The cache of each layer; `other` makes the tensors of a group after the first: in a step they are independent of the first's."""
        found: dict[int, LayerCache] = {}
        for group, members in enumerate(groups):
            for layer, cache in zip(members, itertools.cycle(self._caches)):
                found[layer] = replace(cache.after(*other(cache)), group=group) if group else cache
        return [found[layer] for layer in range(layers)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of a group."""
        return len(self._caches) * self._layer_bytes

    @property
    def _layer_bytes(self) -> int:
        return self.block.nbytes

    def read(self, blocks: list[int]) -> np.ndarray:
        """The contents of blocks as uint8 [n, block_bytes], layer by layer, once what is in flight has run."""
        data = np.empty((len(blocks), len(self._caches), self._layer_bytes), np.uint8)
        if self._memory:
            synchronize(self.device)
            for layer, memory in enumerate(self._memory):
                data[:, layer] = memory[blocks]
        else:
            for layer, cache in enumerate(self._caches):
                for n, part in enumerate(byte_spans(cache.keys, self._byte_ranges(blocks))):
                    data[n, layer] = download(part)
        return data.reshape(len(blocks), -1)

    def write(self, blocks: list[int], data: np.ndarray) -> None:
        """Write what `read` returned into other blocks, after what is in flight."""
        data = data.reshape(len(blocks), len(self._caches), self._layer_bytes)
        if self._memory:
            synchronize(self.device)
            for layer, memory in enumerate(self._memory):
                memory[blocks] = data[:, layer]
            return
        for layer, cache in enumerate(self._caches):
            for n, part in enumerate(byte_spans(cache.keys, self._byte_ranges(blocks))):
                upload(part, data[n, layer])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Make block b equal to block a for each pair (a, b), after what is in flight; no block may be in two pairs as b."""
        capacity = max(8, 1 << (len(pairs) - 1).bit_length())
        if capacity not in self._copying:
            self._copying[capacity] = self._capture_copy(capacity)
        table, count, copies = self._copying[capacity]
        padded = np.zeros((capacity, 2), np.int32)
        padded[: len(pairs)] = pairs
        upload(table, padded)
        upload(count, np.array([len(pairs)], np.int32))
        copies()

    def call_copy(self) -> None:
        """Call the op that copies blocks, for the kernel that it needs (`collecting_kernels`)."""
        pairs = Tensor.empty(1, 2, dtype=dtypes.int32, device=self.device)
        copy_blocks(self.layers[0].keys, pairs, Tensor.empty(1, dtype=dtypes.int32, device=self.device))

    def forget_failed_copies(self) -> None:
        """Drop what a copy that failed has allocated."""
        self._copying = {capacity: made for capacity, made in self._copying.items() if made[2].captured}

    def _capture_copy(self, capacity: int) -> tuple[Tensor, Tensor, Captured]:
        table, count = copied(np.zeros((capacity, 2), np.int32), self.device), copied(np.zeros(1, np.int32), self.device)

        def function() -> Tensor:
            pools = [copy_blocks(cache.keys, table, count) for cache in self._caches]
            Tensor.realize(*pools)
            return count

        return table, count, Captured(function)

    def _byte_ranges(self, blocks: list[int]) -> list[tuple[int, int]]:
        return [(block * self._layer_bytes, self._layer_bytes) for block in blocks]


class KVOutline(KVPool):
    """A pool that takes no memory: its layers are empty tensors, for steps that are called where nothing is launched."""

    def __init__(self, layers: int, num_blocks: int, block_size: int, block: BlockShape, device: str, groups: Layers | None = None):
        self.num_blocks, self.block_size, self.block, self.device = num_blocks, block_size, block, device
        groups = groups or [range(layers)]

        def pair() -> list[Tensor]:
            return [Tensor.empty(num_blocks + 1, *block.shape, dtype=block.dtype, device=device) for _ in range(2)]

        pools = [pair() for _ in range(max(map(len, groups)))]
        self._caches = [LayerCache(keys, values, block.packed, block.latent, ranks=block.ranks) for keys, values in pools]
        self.layers = self._by_layer(layers, groups, lambda cache: pair())
