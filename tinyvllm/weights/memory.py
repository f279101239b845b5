"""Tensors over memory that is already there: mapped files and arrays, handed to tinygrad without a copy on the CPU.

tinygrad does not own memory that it is handed, so an array is tied to the tinygrad buffer: when the last user of the buffer is gone (the
tensor, a view of it, a captured graph) the array is released, and not before kernels in flight have ended.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Device, Tensor, dtypes

from tinyvllm.placement import Placement

if TYPE_CHECKING:
    from tinygrad.dtype import DType


def is_cpu(device: str) -> bool:
    return Placement(Device.canonicalize(device)).is_cpu


def to_device(array: np.ndarray, device: str, dtype: DType) -> Tensor:
    """A tensor of `dtype` on any device: the array's own memory on the CPU, a copy elsewhere."""
    if is_cpu(device):
        return adopt(array, device, dtype)
    # By way of a CPU tensor: numpy has no bfloat16, and a bitcast on the device would be a kernel and a second copy there.
    tensor = adopt(array, "CPU", dtype).to(device).realize()
    Device[device].synchronize()  # until then CUDA keeps its pinned copy of what was sent, in the end of the whole model
    return tensor


def place_bytes(array: np.ndarray, device: str) -> Tensor:
    """uint8 [N] on any device: the array's own memory on the CPU, a copy elsewhere."""
    return to_device(array, device, dtypes.uint8)


def adopt(array: np.ndarray, device: str, dtype: DType) -> Tensor:
    """A tensor on a CPU device over the array's memory, which is kept until tinygrad has freed the buffer and run what reads it."""
    tensor = Tensor.from_blob(array.ctypes.data, array.shape, device=device, dtype=dtype)
    _start_releasing()
    # On the buffer, not the tensor: `replace`, views and captured graphs outlive the Tensor object and keep the buffer.
    weakref.finalize(tensor.uop.buffer, _dropped.put, (Device[device].synchronize, array)).atexit = False
    return tensor


_dropped: SimpleQueue[tuple[Callable[[], None], np.ndarray]] = SimpleQueue()  # finalizers run in the middle of anything: put is reentrant


@functools.cache
def _start_releasing() -> None:
    threading.Thread(target=_release_dropped, name="tinyvllm-release-weights", daemon=True).start()


def _release_dropped() -> None:
    """Waits for the device before it frees an array: `realize` returns before the CPU worker has run.

    A thread of its own, because a finalizer may run inside that worker, where waiting for it would never end.
    """
    while True:
        synchronize, array = _dropped.get()
        synchronize()
        del array
