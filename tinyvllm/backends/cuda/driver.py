"""A CUDA device's driver: what it says of the GPU, and the copies to and from it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.cuda.copies import Arrival, Copies, Mark
from tinyvllm.backends.cuda.plan import GPU
from tinyvllm.bridge import cuda_driver, opened_device, over_address, shared_zeros, synchronize
from tinyvllm.errors import KernelError
from tinyvllm.placement import Placement

_PORTABLE, _DEVICE_MAP = 1, 2  # of cuMemHostRegister


@functools.cache
def copies_of(device: str) -> Copies:
    """The copies to and from a CUDA device."""
    return Copies(cuda_driver(), opened_device(device).context)


class CudaCopies:
    """`Copies` on tinygrad's memory, as the bridge's hooks take them."""

    max_read = 1 << 20  # bytes; larger downloads are not part of serving, and would keep as much host memory pinned

    def __init__(self, copies: Copies):
        self._copies = copies

    def upload(self, memory: Any, start: int, array: np.ndarray) -> None:
        self._copies.upload(memory.value + start, array)

    def read(self, memory: Any, size: int) -> Arrival:
        return self._copies.read(memory.value, size)

    def mark(self) -> Mark:
        return self._copies.mark()


@functools.cache
def gpu_attribute(device: str, name: str) -> int:
    """An attribute of a CUDA device, by the driver's name: "MULTIPROCESSOR_COUNT", ..."""
    cuda, value = cuda_driver(), ctypes.c_int()
    which = getattr(cuda, f"CU_DEVICE_ATTRIBUTE_{name}")
    if status := cuda.cuDeviceGetAttribute(ctypes.byref(value), which, opened_device(device).cu_device):
        raise KernelError(f"CUDA: the driver does not report {name} of {device} (status {status})")
    return value.value


def gpu_of(placement: Placement) -> GPU:
    """What launches are planned for."""
    names = "MULTIPROCESSOR_COUNT", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"
    return GPU(*(gpu_attribute(placement.device, name) for name in names))


def gpu_at(like: Tensor) -> GPU:
    """The GPU that a tensor is on."""
    return gpu_of(Placement.of(like.device))


def counters(like: Tensor, count: int) -> Tensor:
    """Integers that are zero between launches."""
    return shared_zeros(str(like.device), count)


def driver_version() -> int:
    """The version of CUDA that the driver is for: 13000 is 13.0. 0 where it does not say."""
    version = ctypes.c_int()
    return 0 if cuda_driver().cuDriverGetVersion(ctypes.byref(version)) else version.value


def gpu_count() -> int:
    """The GPUs that this process sees."""
    count = ctypes.c_int()
    return 0 if cuda_driver().cuDeviceGetCount(ctypes.byref(count)) else count.value


def gpu_free_memory(device: str) -> int:
    """Bytes that the driver has free on a CUDA device."""
    cuda = cuda_driver()
    synchronize(device)  # makes the device this thread's current one
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if status := cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
        raise KernelError(f"CUDA: the driver does not report the free memory of {device} (status {status}); give --kv-memory")
    return free.value


def register_host_memory(device: str, memory: np.ndarray, parts: Sequence[tuple[int, int]]) -> list[Tensor]:
    """uint8 of each part, first byte and size, of the whole pages `memory` of the host, which the GPU then reads and writes where they are,
    as long as there is the first of them. KernelError if it cannot.
    """
    cuda, address, nbytes, found = cuda_driver(), memory.ctypes.data, memory.nbytes, ctypes.c_uint64()
    synchronize(device)  # makes the device this thread's current one
    status = cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), nbytes, _PORTABLE | _DEVICE_MAP)
    status = status or cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    if status:
        raise KernelError(
            f"CUDA: {nbytes >> 20} MiB of the host's memory, where ranks meet, cannot be mapped by {device} (status {status}); raise the "
            "limit of locked memory (ulimit -l), or lower --max-num-batched-tokens"
        )
    unregister = functools.partial(_unregister, device, memory)
    return [
        over_address(found.value + start, size, device, _nothing if number else unregister) for number, (start, size) in enumerate(parts)
    ]


def _nothing() -> None:
    pass


def _unregister(device: str, memory: np.ndarray) -> None:
    synchronize(device)
    cuda_driver().cuMemHostUnregister(ctypes.c_void_p(memory.ctypes.data))
