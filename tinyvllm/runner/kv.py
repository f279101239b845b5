"""The KV pool on the device: one tensor of blocks a layer (`LayerCache`), the last block being scratch for padded rows. Where layers form
groups, layer i of every group has the same tensor, and a block belongs to one group at a time. Of layers whose blocks are smaller, several
have parts of one tensor's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.batch import PACKED_KV, KVLayout, LayerCache
from tinyvllm.bridge import Captured, alias, byte_spans, copied, download, synchronize, upload
from tinyvllm.errors import ArgumentError
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass
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

    `shapes` are the blocks of the layers, where they are not all `block`, which is the largest. A group's block of n bytes has n bytes for
    each place of it, in which as many layers have parts as fit. Numbers of blocks in the tables of such a group are multiplied by that
    (`StepInputs`): part i is that of the tensor from part i on, in blocks of its own size.
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
        shapes: Sequence[BlockShape] = (),
    ):
        self.num_blocks, self.block_size, self.block, self.device = num_blocks, block_size, block, device
        self.shapes = tuple(shapes) or (block,) * layers
        self._memory: list[np.ndarray] = []  # [P, bytes] a place, if it is in host memory
        self._copying: dict[int, tuple[Tensor, Tensor, Captured]] = {}  # pairs, their count and the copy, by the maximum of pairs
        count = self._num_places(groups)
        own = groups is None and (distinct or count) >= count
        places = self.shapes if own else (block,) * min(count, distinct or count)
        self._places = places
        pools = [self._zeros((num_blocks + 1, *place.shape), place.dtype, device) for place in places]
        self._caches = [self._place(place, pool, self._alias(pool)) for place, pool in zip(places, pools, strict=True)]
        self.layers = self._by_layer(groups)

    def _num_places(self, groups: Layers | None) -> int:
        """The tensors of all groups: a layer's own without groups."""
        if groups is None:
            return len(self.shapes)
        return max(ceil_div(len(members), self._parts(members)) for members in groups)

    def _parts(self, members: Sequence[int]) -> int:
        """Layers of a group that share the blocks of a place."""
        return self.block.nbytes // self.shapes[members[0]].nbytes

    @staticmethod
    def _place(block: BlockShape, keys: Tensor, values: Tensor, group: int = 0) -> LayerCache:
        return LayerCache(keys, values, block.packed, block.latent, group, block.ranks)

    def _zeros(self, shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
        if not Placement(device).is_cpu:
            return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()
        # zero pages that take memory only once a block is written; tinygrad's zeros would touch the whole pool now
        storage = np.dtype(f"V{dtype.itemsize}")  # numpy has no bfloat16
        memory = allocate(prod(shape) * dtype.itemsize)
        self._memory.append(memory.view(np.uint8).reshape(shape[0], -1))
        return adopt(memory.view(storage).reshape(shape), device, dtype)

    def _by_layer(self, groups: Layers | None) -> list[LayerCache]:
        """The cache of each layer."""
        found: dict[int, LayerCache] = {}
        for group, members in enumerate(groups or [range(len(self.shapes))]):
            parts = 1 if groups is None else self._parts(members)
            for i, layer in enumerate(members):
                place, shape = i // parts % len(self._caches), self.shapes[layer]
                if group or shape != self._places[place]:
                    tensors = self._views(self._caches[place], shape, i % parts, parts)
                    found[layer] = self._place(shape, *tensors, group)
                else:
                    found[layer] = self._caches[place]
        return [found[layer] for layer in range(len(self.shapes))]

    def _views(self, place: LayerCache, block: BlockShape, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """Part `part` of `parts` of a place's blocks, by tensors of their own: in a step they are independent of those of other layers."""
        shape = ((self.num_blocks + 1) * parts - part, *block.shape)
        keys, values = (self._alias(place.keys, part * prod(block.shape), shape) for _ in range(2))
        return keys, values

    def reader(self, cache: LayerCache) -> LayerCache:
        """The same keys and values for one more layer that reads them after the one that stores them, whose output it needs."""
        return cache.after(self._alias(cache.keys), self._alias(cache.keys))

    def _alias(self, tensor: Tensor, start: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        return alias(tensor, start, shape)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of a group."""
        return sum(place.nbytes for place in self._places)

    def read(self, blocks: list[int]) -> np.ndarray:
        """The contents of blocks as uint8 [n, block_bytes], place by place, once what is in flight has run."""
        data = np.empty((len(blocks), self.block_bytes), np.uint8)
        if self._memory:
            synchronize(self.device)
            for memory, columns in zip(self._memory, self._columns(data), strict=True):
                columns[:] = memory[blocks]
        else:
            for cache, columns in zip(self._caches, self._columns(data), strict=True):
                for n, part in enumerate(byte_spans(cache.keys, _byte_ranges(blocks, columns.shape[1]))):
                    columns[n] = download(part)
        return data

    def write(self, blocks: list[int], data: np.ndarray) -> None:
        """Write what `read` returned into other blocks, after what is in flight."""
        data = data.reshape(len(blocks), -1)
        if self._memory:
            synchronize(self.device)
            for memory, columns in zip(self._memory, self._columns(data), strict=True):
                memory[blocks] = columns
            return
        for cache, columns in zip(self._caches, self._columns(data), strict=True):
            for n, part in enumerate(byte_spans(cache.keys, _byte_ranges(blocks, columns.shape[1]))):
                upload(part, columns[n])

    def _columns(self, data: np.ndarray) -> list[np.ndarray]:
        """The bytes of each place in rows of `block_bytes`."""
        return np.split(data, np.cumsum([place.nbytes for place in self._places])[:-1], axis=1)

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
        copy_blocks(self._caches[0].keys, pairs, Tensor.empty(1, dtype=dtypes.int32, device=self.device))

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


def _byte_ranges(blocks: list[int], nbytes: int) -> list[tuple[int, int]]:
    return [(block * nbytes, nbytes) for block in blocks]


class KVOutline(KVPool):
    """A pool that takes no memory: its layers are empty tensors, for steps that are called where nothing is launched."""

    def _zeros(self, shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
        return Tensor.empty(*shape, dtype=dtype, device=device)

    def _alias(self, tensor: Tensor, start: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        return Tensor.empty(*(shape or tensor.shape), dtype=tensor.dtype, device=self.device)
