"""The memory that the ranks of an engine share: where they meet, what passes from stage to stage, and the inputs of steps.

It never has a name: an anonymous file, which the ranks inherit open. So nothing is left of it, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from tinyvllm.lazy_dataclass import dataclass

HEADER = 4096  # MEETING_BYTES of kernels/cpu/include/meeting.h
_PAGE = 4096


@dataclass(frozen=True)
class Layout:
    """Sizes, the same in all ranks. A model is `stages` runs of layers, each of `world_size` ranks that divide its matrices.

    Rank 0 is of the last stage; ranks are numbered stage by stage against the order of the layers, so that rank r gets its residual stream
    from rank r + world_size. Each step in flight has a place for its inputs and its residual streams: as many places as stages, and one
    more for a step on the side.

    `place`     float32 of sums a rank, `logits` float32 of logits: where the ranks of a stage meet
    `stream`    float32 of a residual stream
    `inputs`    int32 of a step's inputs
    """

    world_size: int
    stages: int
    place: int
    logits: int
    stream: int
    inputs: int

    @property
    def ranks(self) -> int:
        return self.world_size * self.stages

    def stage(self, rank: int) -> int:
        """The stage of a rank; stage 0 has the first layers."""
        return self.stages - 1 - rank // self.world_size

    @property
    def places(self) -> int:
        """For steps in flight."""
        return self.stages + 1 if self.stages > 1 else 1

    @property
    def group_bytes(self) -> int:
        """Where the ranks of one stage meet."""
        return _pages(HEADER + 4 * (2 * self.world_size * self.place + self.logits))

    def stream_start(self, rank: int, place: int) -> int:
        """The residual stream that a rank gets."""
        return self.stages * self.group_bytes + (rank * self.places + place) * _pages(4 * self.stream)

    def inputs_start(self, place: int) -> int:
        return self.stream_start(self.ranks - self.world_size, 0) + place * _pages(4 * self.inputs)

    @property
    def nbytes(self) -> int:
        return self.inputs_start(self.places)


class SharedMemory:
    """The mapping of one rank."""

    def __init__(self, layout: Layout, fd: int | None = None):
        self.layout, self.fd = layout, _anonymous_file(layout.nbytes) if fd is None else fd
        self._mapping = mmap.mmap(self.fd, layout.nbytes)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        self._given_up = [self.group(stage)[:4].view(np.int32) for stage in range(layout.stages)]

    def group(self, stage: int) -> np.ndarray:
        """uint8: where the ranks of a stage meet."""
        start = stage * self.layout.group_bytes
        return self.bytes[start : start + self.layout.group_bytes]

    def stream(self, rank: int, place: int, count: int) -> np.ndarray:
        """float32 [count]: the residual stream that a rank gets."""
        start = self.layout.stream_start(rank, place)
        return self.bytes[start : start + 4 * count].view(np.float32)

    def inputs(self, place: int, count: int) -> np.ndarray:
        """int32 [count]: the inputs of a step."""
        start = self.layout.inputs_start(place)
        return self.bytes[start : start + 4 * count].view(np.int32)

    def close_file(self) -> None:
        """Close the file, which the mapping does not need."""
        os.close(self.fd)

    def give_up(self) -> None:
        """Let no kernel of any rank wait any more."""
        for word in self._given_up:
            word[0] = 1


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tinyvllm-ranks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd
