"""How long a compiled program takes by the GPU's own clock, past any graph: to compare variants while a step is being captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import _from_np_dtype

from tinyvllm.bridge.memory import buffer_of
from tinyvllm.bridge.node import Program, load_program


class TimedProgram:
    """A program with its arguments, to be launched repeatedly.

    `arguments`, outs then ins: a realized tensor in place, an array that is copied, or a number of bytes of scratch, initially zero.
    `wait_until_idle` waits for the device's work in flight.
    """

    def __init__(self, program: Program, device: str, arguments: Sequence[Tensor | np.ndarray | int], wait_until_idle: Callable[[], None]):
        self._program, self._device, self._wait = program, Device.canonicalize(device), wait_until_idle
        self._buffers = [self._placed(argument) for argument in arguments]
        self.runtime = load_program(device, program.entry, program.binary)

    def _placed(self, argument: Tensor | np.ndarray | int) -> Buffer:
        if isinstance(argument, Tensor):
            return buffer_of(argument.uop)
        array = np.zeros(max(1, argument), np.uint8) if isinstance(argument, int) else np.ascontiguousarray(argument)
        dtype = dtypes.uint8 if isinstance(argument, int) else _from_np_dtype(array.dtype)
        buffer = Buffer(self._device, array.size, dtype, preallocate=True)
        buffer.copyin(array.data.cast("B"))
        return buffer

    def __call__(self) -> float:
        """Launch the program, wait for it, and return the seconds that the GPU took."""
        self._wait()
        memory, program = [buffer._buf for buffer in self._buffers], self._program
        return float(self.runtime(*memory, global_size=program.grid, local_size=program.block, wait=True))
