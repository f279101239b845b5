"""How long a kernel takes on the GPU, by its own clock and past any graph: for choosing between variants while a step is being captured."""

from __future__ import annotations

from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import _from_np_dtype

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal.queue import queue_of
from tinyvllm.bridge.memory import buffer_of
from tinyvllm.bridge.node import machine_code
from tinyvllm.errors import KernelError


class Timed:
    """A Metal kernel with arguments of its own, to be launched as often as one likes.

    `arguments`, outs then ins: a realized tensor as it lies there, an array that is copied, or bytes of scratch that begin as zeros.
    Compiles on making.
    """

    def __init__(self, kernel: Kernel, device: str, arguments: list[Tensor | np.ndarray | int]):
        if kernel.backend != "metal" or len(arguments) != kernel.outs + kernel.ins:
            wanted = f"a Metal kernel with its {kernel.outs + kernel.ins} arguments"
            raise ValueError(f"launch: {kernel.stem} of {kernel.backend} is timed with {len(arguments)} arguments; expected {wanted}")
        opened: Any = Device[device]
        self._kernel, self._device = kernel, Device.canonicalize(device)
        self._buffers = [self._placed(argument) for argument in arguments]
        self._program = opened.runtime(kernel.stem, machine_code(kernel, device))
        if kernel.block > self._program.max_total_threads:
            most = self._program.max_total_threads
            raise KernelError(f"launch: {kernel.stem} has {kernel.block} threads a group, and this GPU runs at most {most} of it")

    def _placed(self, argument: Tensor | np.ndarray | int) -> Buffer:
        if isinstance(argument, Tensor):
            return buffer_of(argument.uop)
        array = np.zeros(max(1, argument), np.uint8) if isinstance(argument, int) else np.ascontiguousarray(argument)
        dtype = dtypes.uint8 if isinstance(argument, int) else _from_np_dtype(array.dtype)
        return Buffer(self._device, array.size, dtype, preallocate=True).copyin(array.data.cast("B"))

    def __call__(self) -> float:
        """Launch it, wait, and say how many seconds the GPU took."""
        queue_of(self._device).wait_for_all()
        memory = [buffer._buf for buffer in self._buffers]
        seconds = self._program(*memory, global_size=self._kernel.grid, local_size=(self._kernel.block, 1, 1), wait=True)
        return float(seconds)
