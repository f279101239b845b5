"""Layers divided between a GPU and the CPU by the memory of each: the GPU has the last ones, as many as fit, the CPU those before them."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.runner.memory import KV_SHARE

STAGING_BYTES = 128 << 20  # of the rows of a matrix on a GPU that packs them, at most: 64 MiB, and what its size is rounded up to
RESERVE_SHARE = 1 / 16  # of a GPU's free memory: for programs, captured steps, and what the allocator rounds up


def gpu_reserve(free: int, largest: int) -> int:
    """Bytes that a GPU has to have next to what is counted; `largest` are those of the largest matrix."""
    return round(free * RESERVE_SHARE) + min(STAGING_BYTES, 2 * largest)


@dataclass(frozen=True)
class DeviceLayers:
    """What a device would hold of a model, in bytes: `weights` of each layer, the first with the embedding table, the last with final norm
    and head; `run` of steps and libraries. `free` is what it has without all of that.
    """

    device: str
    weights: tuple[int, ...]
    run: int
    free: int


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of an engine in one memory: weights, a block of the KV cache, and `run` of steps and libraries; `free` without all of that."""

    device: str
    weights: int
    block: int
    run: int
    free: int

    @property
    def left(self) -> int:
        """What is free with the weights loaded."""
        return self.free - self.weights

    def holds(self, blocks: float) -> bool:
        return self.run + blocks * self.block <= self.left


@dataclass(frozen=True)
class Division:
    """The ways of dividing layers between `gpu`, which has the last ones, and `cpu`. `block` is the bytes of a layer's block of the KV
    cache. With `shared` the memory of the GPU is the host's, so that what the one takes is not free for the other.
    """

    gpu: DeviceLayers
    cpu: DeviceLayers
    block: int
    shared: bool

    @property
    def layers(self) -> int:
        return len(self.gpu.weights)

    def with_weights(self, gpu: tuple[int, ...], cpu: tuple[int, ...]) -> Division:
        """The same of layers with other weights."""
        return replace(self, gpu=replace(self.gpu, weights=gpu), cpu=replace(self.cpu, weights=cpu))

    def parts(self, gpu_layers: int) -> tuple[MemoryUse, MemoryUse]:
        """What each device has, the GPU first, where that has this many layers."""
        first, gpu, cpu = self.layers - gpu_layers, self.gpu, self.cpu
        return (
            MemoryUse(gpu.device, sum(gpu.weights[first:]), gpu_layers * self.block, gpu.run, gpu.free),
            MemoryUse(cpu.device, sum(cpu.weights[:first]), first * self.block, cpu.run, cpu.free),
        )

    def uses(self, gpu_layers: int) -> tuple[MemoryUse, MemoryUse]:
        """What each memory holds: `parts`, but that the host's also has the GPU's part if it is `shared`."""
        gpu, cpu = self.parts(gpu_layers)
        if self.shared:
            cpu = replace(cpu, weights=cpu.weights + gpu.weights, block=cpu.block + gpu.block, run=cpu.run + gpu.run)
        return gpu, cpu

    def most_layers(self, blocks: float, up_to: int) -> int:
        """The most layers, 0 to `up_to`, that the GPU holds with this many blocks of the KV cache."""
        return next((count for count in range(up_to, 0, -1) if self.uses(count)[0].holds(blocks)), 0)

    def choose(self, asked: int | None, blocks: int, sized: bool) -> int:
        """How many layers the GPU has: those that were `asked` for, or the most that it holds, but not all, and one at least.

        `blocks` are those of the KV cache if its size is given (`sized`), else those that one sequence needs: the cache may then take
        KV_SHARE of what the weights leave. ModelError for a number beyond what the model has.
        """
        if asked is not None:
            if asked >= self.layers:
                raise ModelError(
                    f"gpu_layers={asked}: the model has {self.layers} layers, of which {self.gpu.device} may have up to {self.layers - 1} "
                    f"here; for all of them give --device {self.gpu.device}"
                )
            return asked
        return max(1, self.most_layers(blocks if sized else blocks / KV_SHARE, self.layers - 1))

    def holds_all(self, blocks: float) -> bool:
        """Whether the GPU alone holds the model with this many blocks."""
        return self.most_layers(blocks, self.layers) == self.layers

    def most_blocks(self, asked: int | None) -> int:
        """The most blocks of the KV cache with which some division fits, or the one that was `asked` for; -1 if the weights do not fit."""
        fits, low, high = -1, 0, max(self.gpu.free, self.cpu.free) // max(1, self.block)
        while low <= high:
            middle = (low + high) // 2
            count = asked or self.most_layers(middle, self.layers - 1)
            if count and all(use.holds(middle) for use in self.uses(count)):
                fits, low = middle, middle + 1
            else:
                high = middle - 1
        return fits
