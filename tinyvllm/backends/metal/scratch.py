"""Scratch memory in which the threadgroups of a launch count and hand over results: zeros between launches, but for a fault.

A kernel that would wait for ever (kernels/metal/include/partition_records.h) gives up, and writes to the word FAULT of its scratch. The
host looks at these words once a command buffer has completed: they are in shared memory, so a look is a load. After a fault, or after a
launch that failed in the middle, words are left that a later launch would take for its own, so all scratch is set to zero again.
"""

from __future__ import annotations

import ctypes

from tinyvllm.lazy_dataclass import dataclass

FAULT = 1  # the word, of 32 bits


@dataclass(frozen=True)
class _Area:
    """The scratch of launches of `stem`: `nbytes` from `address` on."""

    stem: str
    address: int
    nbytes: int
    fault: ctypes.c_uint32


class CountingScratch:
    """All such scratch of one device."""

    def __init__(self) -> None:
        self._areas: dict[int, _Area] = {}

    def watch(self, stem: str, address: int, nbytes: int) -> None:
        """Look at the fault of this memory from now on. It must stay allocated as long as the device is open."""
        if nbytes > 4 * FAULT and address not in self._areas:
            self._areas[address] = _Area(stem, address, nbytes, ctypes.c_uint32.from_address(address + 4 * FAULT))

    def faulty_stem(self) -> str | None:
        """The stem of a kernel that has reported a fault, None if none has."""
        return next((area.stem for area in self._areas.values() if area.fault.value), None)

    def clear(self) -> None:
        """Set all of it to zero. Nothing may be in flight."""
        for area in self._areas.values():
            ctypes.memset(area.address, 0, area.nbytes)
