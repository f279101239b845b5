"""Where a case runs, and how its arrays get there and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backends.base import Backend
from tinyvllm.backends.cases.inputs import EPS, norm_weight
from tinyvllm.backends.operands import KernelWeight, NormWeights
from tinyvllm.batch import Batch, KVLayout, LayerCache
from tinyvllm.bridge import alias, byte_spans, download, mapped
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16
from tinyvllm.quant.formats import FORMATS, Layout
from tinyvllm.quant.kv import KV_FORMATS, is_rotated, pack_blocks, rotate, unpack_blocks
from tinyvllm.quant.layouts import MixedWeight, PackedWeight, RowWeight, StoredWeight, TileWeight, pack_panels, pack_tiles

CACHE_DTYPES = {"F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16}


@dataclass(frozen=True)
class Site:
    """Where a case runs: the kernels of `variant`, on `device`."""

    backend: Backend
    variant: str
    device: str

    def place(self, array: np.ndarray, dtype: DType | None = None) -> Tensor:
        return mapped(np.ascontiguousarray(array), self.device, dtype)

    def int32(self, *values: int) -> Tensor:
        return self.place(np.array(values, np.int32))

    def weight(self, parts: Sequence[tuple[str, np.ndarray]]) -> KernelWeight:
        """A matrix in the layout that the kernels read; of each of its projections the format, and the rows, uint8 [O, bytes]."""
        if self.backend.layout is Layout.ROWS:
            return self._rows(parts)
        runs = itertools.groupby(parts, key=lambda part: part[0])
        weights = tuple(self._packed(format, np.concatenate([rows for _, rows in run])) for format, run in runs)
        return weights[0] if len(weights) == 1 else MixedWeight(weights)

    def router(self, parts: Sequence[tuple[str, np.ndarray]]) -> KernelWeight:
        """The same of a router, which has no tiles."""
        return self._rows(parts) if self.backend.layout is Layout.TILES else self.weight(parts)

    def _rows(self, parts: Sequence[tuple[str, np.ndarray]]) -> StoredWeight:
        return StoredWeight(tuple(RowWeight(self.place(rows.reshape(-1)), format, *_shape(format, rows)) for format, rows in parts))

    def _packed(self, format: str, rows: np.ndarray) -> PackedWeight:
        if self.backend.layout is Layout.TILES:
            return TileWeight(self.place(pack_tiles(format, rows)), format, *_shape(format, rows))
        return PackedWeight(self.place(pack_panels(format, rows)), format, *_shape(format, rows))

    def cache(self, format: str, numbers: np.ndarray) -> LayerCache:
        if format in KV_FORMATS:
            _, _, K, block_size, D = numbers.shape
            blocks = self.place(pack_blocks(format, numbers))
            return LayerCache(blocks, alias(blocks), KVLayout(format, K, block_size, D))
        bits = f32_to_bf16(numbers) if format == "BF16" else numbers.astype({"F32": "f4", "F16": "f2"}[format])
        keys = self.place(bits, CACHE_DTYPES[format])
        return LayerCache(keys, alias(keys))

    def norm(self, I: int, eps: float = EPS) -> NormWeights:
        """Of the inputs' squares, whose mean is 1 - EPS: with any `eps` the normed inputs are the same, but for a last bit."""
        return NormWeights("RMS", self.place(norm_weight(I) * np.float32(np.sqrt(1 - EPS + eps))), eps)


def _shape(format: str, rows: np.ndarray) -> tuple[int, int]:
    return len(rows), rows.shape[1] // FORMATS[format].nbytes * FORMATS[format].elements


def cached_numbers(format: str, cache: LayerCache) -> np.ndarray:
    """What a cache holds, float32 [P, 2, K, S, D]; keys that are rotated there are rotated back."""
    data = download(byte_spans(cache.keys, [(0, cache.keys.nbytes())])[0])
    if cache.packed is not None:
        held = unpack_blocks(format, data.reshape(-1, cache.packed.block_bytes), cache.K, cache.S, cache.D)
        if is_rotated(format, keys=True):
            held[:, 0] = rotate(held[:, 0])
        return held
    values = bf16_to_f32(data.view(np.uint16)) if format == "BF16" else data.view({"F32": "f4", "F16": "f2"}[format])
    return values.astype(np.float32).reshape(tuple(int(d) for d in cache.keys.shape))


def empty_batch(site: Site, **arrays: Any) -> Batch:
    """A batch with these arrays; what an op does not read is one zero."""
    zero = site.int32(0)
    names = ("tokens", "positions", "slots", "block_tables", "query_starts", "context_lens", "rows", "decodes", "chunks", "samples")
    return Batch(**{name: zero for name in (*names, "sample_count")} | {"num_blocks": 1, "num_decodes": 0, "max_query": 1} | arrays)


def realized(*tensors: Tensor) -> list[np.ndarray]:
    Tensor.realize(*tensors)
    return [download(tensor) for tensor in tensors]
