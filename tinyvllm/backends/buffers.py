"""Arguments that kernels write or work in, and their sizes and formats as constants of a source."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinyvllm import bridge
from tinyvllm.batch import LayerCache

CACHE_FORMATS = {dtypes.float32: "F32", dtypes.float16: "F16", dtypes.bfloat16: "BF16"}


def cache_format(cache: LayerCache) -> str:
    """CACHE_TYPE: how keys and values are kept."""
    return cache.packed.format if cache.packed else CACHE_FORMATS[cache.keys.dtype]


def constant(value: float) -> str:
    """A float as C reads it."""
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.0f"


def empty(like: Tensor, *shape: int) -> Tensor:
    """A float32 buffer for a kernel to write, on the device of `like`."""
    return bridge.empty(shape, dtypes.float32, str(like.device))


def scratch(like: Tensor, nbytes: int) -> Tensor:
    """Bytes for a kernel's own use."""
    return bridge.empty((nbytes,), dtypes.uint8, str(like.device))


def integers(like: Tensor, *shape: int) -> Tensor:
    """An int32 buffer for a kernel to write."""
    return bridge.empty(shape, dtypes.int32, str(like.device))


def present(*optional: Tensor | None) -> list[Tensor]:
    """The tensors that are not None."""
    return [tensor for tensor in optional if tensor is not None]
