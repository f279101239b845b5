"""The memory that the ranks of an engine share: where they meet, and the inputs of a step.

It never has a name: an anonymous file, which the ranks inherit open. So nothing is left of it, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass

import numpy as np

HEADER = 4096  # MEETING_BYTES of kernels/cpu/include/meeting.h
_PAGE = 4096


@dataclass(frozen=True)
class Layout:
    """Sizes, the same in all ranks: float32 of sums a rank, float32 of logits, int32 of a step's inputs."""

    world_size: int
    place: int
    logits: int
    inputs: int

    @property
    def inputs_start(self) -> int:
        end = HEADER + 4 * (2 * self.world_size * self.place + self.logits)
        return -(-end // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        return self.inputs_start + 4 * self.inputs


class SharedMemory:
    """The mapping of one rank."""

    def __init__(self, layout: Layout, fd: int | None = None):
        self.layout, self.fd = layout, _anonymous_file(layout.nbytes) if fd is None else fd
        self._mapping = mmap.mmap(self.fd, layout.nbytes)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        self._given_up = self.bytes[:4].view(np.int32)
        self.inputs = self.bytes[layout.inputs_start :].view(np.int32)

    def close_file(self) -> None:
        """Close the file, which the mapping does not need."""
        os.close(self.fd)

    def give_up(self) -> None:
        """Let no kernel of any rank wait any more."""
        self._given_up[0] = 1

    @property
    def given_up(self) -> bool:
        return bool(self._given_up[0])


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tinyvllm-ranks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd
