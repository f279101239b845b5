"""Several int32 arrays that one copy moves to the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tinygrad import Tensor

from tinyvllm.bridge import copied, resident, spans, upload
from tinyvllm.integers import round_up

ALIGNMENT = 16  # int32s: generated kernels load vectors from such boundaries


def aligned(size: int) -> int:
    """From the beginning of an array of `size` int32s to that of the next."""
    return round_up(size, ALIGNMENT)


class PackedArrays:
    """int32 arrays of the given sizes, by name, in one buffer on the host and one on the device, which captured steps read.

    host, views       all of them, and each, on the host
    device, tensors   the same on the device
    starts            where each begins
    """

    def __init__(self, sizes: Mapping[str, int], device: str):
        self.starts, end = {}, 0
        for name, size in sizes.items():
            self.starts[name], end = end, end + aligned(size)
        self.host = np.zeros(end, np.int32)
        self.device = copied(self.host, device)
        self._memory = resident(self.device)
        self.views = {name: self.host[start : start + sizes[name]] for name, start in self.starts.items()}
        self.tensors = {name: self.span(name, 0, size) for name, size in sizes.items()}

    def span(self, name: str, start: int, size: int) -> Tensor:
        """Elements start .. start + size of an array, on the device; `start` is a multiple of ALIGNMENT."""
        return spans(self.device, [(self.starts[name] + start, size)])[0]

    def upload(self) -> None:
        """Copy all arrays to the device."""
        if self._memory is not None:
            self._memory[:] = self.host
        else:
            upload(self.device, self.host)
