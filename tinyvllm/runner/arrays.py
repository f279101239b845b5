"""Several int32 arrays that one copy moves to the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinyvllm.bridge import copied, spans, upload

ALIGNMENT = 16  # int32s: generated kernels load vectors from such boundaries


class PackedArrays:
    """int32 arrays of the given sizes, by name, in one buffer on the host and one on the device.

    host, views       all of them, and each, on the host
    device, tensors   the same on the device
    starts            where each begins
    """

    def __init__(self, sizes: Mapping[str, int], device: str):
        self.starts, end = {}, 0
        for name, size in sizes.items():
            self.starts[name], end = end, end + -(-size // ALIGNMENT) * ALIGNMENT
        self.host = np.zeros(end, np.int32)
        self.device = copied(self.host, device)
        self.views = {name: self.host[start : start + sizes[name]] for name, start in self.starts.items()}
        parts = spans(self.device, [(start, sizes[name]) for name, start in self.starts.items()])
        self.tensors = dict(zip(sizes, parts, strict=True))

    def upload(self) -> None:
        """Copy all arrays to the device."""
        upload(self.device, self.host)
