"""The KV pool on the device: one block tensor [P, 2, K, S, D] a layer, the last block being scratch for padded rows."""

from __future__ import annotations

from math import prod

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.batch import LayerCache
from tinyvllm.models.config import ModelConfig
from tinyvllm.ops.launch import alias
from tinyvllm.weights.load import adopt
from tinyvllm.weights.mapping import allocate


def block_bytes(config: ModelConfig, block_size: int, dtype: DType) -> int:
    """Bytes that one block takes in all layers together."""
    return config.num_blocks * 2 * config.n_kv_heads * block_size * config.head_dim * dtype.itemsize


class KVPool:
    """`num_blocks` usable blocks and the scratch block behind them; everything zero at first, so that masked values are finite."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: DType, device: str):
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks + 1, 2, config.n_kv_heads, block_size, config.head_dim)
        pools = [self._zeros(shape, dtype, device) for _ in range(config.num_blocks)]  # [P, 2, K, S, D] each
        self.layers = [LayerCache(pool, alias(pool)) for pool in pools]

    @property
    def scratch_slot(self) -> int:
        return self.num_blocks * self.block_size

    def _zeros(self, shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
        if device.split(":")[0] != "CPU":
            return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()
        # zero pages that take memory only once a block is written; tinygrad's zeros would touch the whole pool now
        storage = np.dtype(f"V{dtype.itemsize}")  # numpy has no bfloat16
        return adopt(allocate(prod(shape) * dtype.itemsize).view(storage).reshape(shape), device, dtype)


def kv_dtype(weights: DType) -> DType:
    """Keys and values are kept in the weights' dtype."""
    return weights if weights in (dtypes.float16, dtypes.bfloat16) else dtypes.float32
