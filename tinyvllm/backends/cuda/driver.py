"""A GPU's driver, in tinygrad's words: what it says of the device, and who copies to and from a CUDA device."""

from __future__ import annotations

import ctypes
import functools

from tinygrad import Device

from tinyvllm.backends.cuda.copies import Copies
from tinyvllm.backends.metal.queue import metal_free_memory
from tinyvllm.errors import KernelError


@functools.cache
def copies_of(device: str) -> Copies:
    """The one that copies to and from a CUDA device."""
    from tinygrad.runtime.autogen import cuda

    return Copies(cuda, Device[device].context)  # type: ignore[attr-defined]


@functools.cache
def gpu_attribute(device: str, name: str) -> int:
    """What the driver says of a CUDA device, by the driver's names: "MULTIPROCESSOR_COUNT", ..."""
    from tinygrad.runtime.autogen import cuda

    found = ctypes.c_int()
    which = getattr(cuda, f"CU_DEVICE_ATTRIBUTE_{name}")
    if status := cuda.cuDeviceGetAttribute(ctypes.byref(found), which, Device[device].cu_device):  # type: ignore[attr-defined]
        raise KernelError(f"launch: the driver does not say {name} of {device} (status {status})")
    return found.value


def gpu_free_memory(device: str) -> int:
    """Bytes that the driver has left on a CUDA device, or that the system would have a Metal device take at most."""
    if device.split(":")[0] == "METAL":
        return metal_free_memory(device)
    from tinygrad.runtime.autogen import cuda

    Device[device].synchronize()  # makes the device this thread's
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if status := cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
        raise KernelError(f"launch: the driver does not say how much memory {device} has free (status {status}); give --kv-memory")
    return free.value
