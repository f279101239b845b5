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
    """Sizes, the same in all ranks. A model is `stages` runs of layers, each of a grid of ranks: `tensor` parts of every matrix, and for
    each part `context` ranks with the same weights, which divide contexts.

    Rank 0 is of the last stage; ranks are numbered stage by stage against the order of the layers, so that rank r gets its residual stream
    from rank r + world_size. In a stage the ranks with the same weights are neighbours. Ranks meet in two groups: those that add the sums
    of a matrix, and those that merge a context. Each step in flight has a place for its inputs and its residual streams: as many places as
    stages, and one more for a step on the side.

    `sums`      float32 of sums a rank, `logits` float32 of logits: where the ranks meet that divide matrices
    `results`   float32 of results of attention, or of rows, a rank: where those meet that divide contexts
    `stream`    float32 of a residual stream
    `inputs`    int32 of a step's inputs
    """

    tensor: int
    context: int
    stages: int
    sums: int
    results: int
    logits: int
    stream: int
    inputs: int

    @property
    def world_size(self) -> int:
        """The ranks of a stage."""
        return self.tensor * self.context

    @property
    def ranks(self) -> int:
        return self.world_size * self.stages

    def cell(self, rank: int) -> tuple[int, int]:
        """The numbers of a rank among those that divide matrices, and among those that divide contexts."""
        return divmod(rank % self.world_size, self.context)

    def stage(self, rank: int) -> int:
        """The stage of a rank; stage 0 has the first layers."""
        return self.stages - 1 - rank // self.world_size

    @property
    def places(self) -> int:
        """For steps in flight."""
        return self.stages + 1 if self.stages > 1 else 1

    @property
    def tensor_bytes(self) -> int:
        """Where the ranks meet that divide a matrix."""
        return _pages(HEADER + 4 * (2 * self.tensor * self.sums + self.logits)) if self.tensor > 1 else 0

    @property
    def context_bytes(self) -> int:
        """Where the ranks meet that divide a context."""
        return _pages(HEADER + 4 * 2 * self.context * self.results) if self.context > 1 else 0

    @property
    def stage_bytes(self) -> int:
        """All groups of a stage: those that divide matrices, by the part of the context, then those that divide contexts."""
        return self.context * self.tensor_bytes + self.tensor * self.context_bytes

    def tensor_start(self, rank: int) -> int:
        return self.stage(rank) * self.stage_bytes + self.cell(rank)[1] * self.tensor_bytes

    def context_start(self, rank: int) -> int:
        return self.stage(rank) * self.stage_bytes + self.context * self.tensor_bytes + self.cell(rank)[0] * self.context_bytes

    def stream_start(self, rank: int, place: int) -> int:
        """The residual stream that a rank gets."""
        return self.stages * self.stage_bytes + (rank * self.places + place) * _pages(4 * self.stream)

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
        groups = (group for rank in range(layout.ranks) for group in (self.tensor_group(rank), self.context_group(rank)))
        self._given_up = [group[:4].view(np.int32) for group in groups if len(group)]

    def tensor_group(self, rank: int) -> np.ndarray:
        """uint8: where a rank meets those that have the other parts of its matrices; none if it has whole ones."""
        start = self.layout.tensor_start(rank)
        return self.bytes[start : start + self.layout.tensor_bytes]

    def context_group(self, rank: int) -> np.ndarray:
        """uint8: where a rank meets those that have the other parts of its contexts; none if it has whole ones."""
        start = self.layout.context_start(rank)
        return self.bytes[start : start + self.layout.context_bytes]

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
