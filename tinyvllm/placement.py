"""Where this process computes: one device, and its rank among the processes that share a model. Imports no tinygrad."""

from __future__ import annotations

from typing import Any

from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Placement:
    """One device by tinygrad's name ("CPU", "CUDA:1"), and this process's rank among `world_size` processes, one device each."""

    device: str
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"placement: rank {self.rank} of {self.world_size} ranks; expected 0 to {self.world_size - 1}")

    @classmethod
    def of(cls, device: object) -> Placement:
        """The placement of a tensor's `device`, which must be one device and not a tuple of several."""
        if not isinstance(device, str):
            raise ValueError(f"placement: the tensor is on {device!r}; expected one device")
        return cls(device)

    @property
    def kind(self) -> str:
        """The device without its index: "CPU", "CUDA", "METAL", ..."""
        return self.device.split(":")[0]

    @property
    def is_cpu(self) -> bool:
        return self.kind == "CPU"

    @property
    def is_cuda(self) -> bool:
        return self.kind == "CUDA"

    @property
    def is_metal(self) -> bool:
        return self.kind == "METAL"

    def __str__(self) -> str:
        return self.device


@dataclass(frozen=True)
class CoreShare:
    """This process, `index` of the `count` that share the cores of the CPU, and those that have the same weights, itself among them.

    Processes whose kernels a GPU runs share cores, too, but each core is as good: `same_weights` is empty.
    """

    count: int = 1
    index: int = 0
    same_weights: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks that divide matrices, or contexts, and the shared memory in which they meet, as its backend wants it: a tensor of bytes on the
    CPU (kernels/cpu/include/meeting.h).

    `place` is how many float32 of sums, or of results of attention, a rank has room for, `logits` how many logits there is room for.
    """

    rank: int
    world_size: int
    memory: Any
    place: int
    logits: int
