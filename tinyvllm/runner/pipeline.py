"""Stages of a pipeline: which layers each has, so that all of them take about the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from tinyvllm.distributed.memory import SharedMemory
from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class RankStart:
    """What a rank above 0 gets to begin with. Stage s has the layers from stage_ends[s - 1], or 0, up to stage_ends[s]."""

    memory: SharedMemory
    rank: int
    stage_ends: list[int]


@dataclass(frozen=True)
class PipelineStage:
    """Neighbouring layers of a model, the first with the embedding table, the last with the final norm and the head.

    Of ranks with the same weights, which divide contexts, `is_copy` are all but the first: they have no head, since logits are of rank 0.
    """

    number: int
    ends: list[int]  # of the layers of each stage
    tied: bool  # whether the head is the embedding table
    everywhere: tuple[str, ...] = ()  # modules in front of the layers that all stages have
    is_copy: bool = False

    @property
    def layers(self) -> range:
        return range(0 if self.is_first else self.ends[self.number - 1], self.ends[self.number])

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def has_head(self) -> bool:
        return self.number == len(self.ends) - 1 and not self.is_copy

    @property
    def embeds(self) -> bool:
        """Whether it reads the embedding table."""
        return self.is_first or "token_embd" in self.everywhere

    @property
    def is_whole(self) -> bool:
        """Whether it has all layers."""
        return len(self.ends) == 1

    def holds(self, name: str) -> bool:
        """Whether the stage has the model's tensor of this name."""
        part, layer, *_ = name.split(".")
        if part == "blk":
            return int(layer) in self.layers
        return part in self.everywhere or (self.is_first and _in_first(part)) or (self.has_head and _in_last(part, self.tied))


def _in_first(part: str) -> bool:
    return part in ("token_embd", "position_embd")


def _in_last(part: str, tied: bool) -> bool:
    return not _in_first(part) or (tied and part == "token_embd")


def divide_layers(sizes: Iterable[tuple[str, int]], caches: Sequence[int], stages: int, tied: bool, undivided: int = 0) -> list[int]:
    """Where the layers of each stage end, so that the largest stage takes as little memory as it can.

    `sizes` are the bytes of the model's tensors by name, `caches` those of each layer's keys and values, or states. The last `undivided`
    layers are in one stage. ModelError for fewer layers than stages.
    """
    layers, single = len(caches), len(caches) - max(0, undivided - 1)
    require_layers(layers, stages)
    if single < stages:
        raise ModelError(
            f"pipeline_parallel_size={stages}: the last {undivided} of {layers} layers are in one stage, because some read the keys and "
            f"values of others; use {single} stages at most"
        )
    by_layer = [nbytes + cache for nbytes, cache in zip(sizes_by_layer(sizes, layers, tied), caches, strict=True)]
    *ends, _ = divide([*by_layer[: single - 1], sum(by_layer[single - 1 :])], stages)
    return [*ends, layers]


def require_layers(layers: int, stages: int) -> None:
    """ModelError for fewer layers than stages."""
    if layers < stages:
        raise ModelError(f"pipeline_parallel_size={stages}: the model has {layers} layers, and a stage needs one; use fewer stages")


def sizes_by_layer(sizes: Iterable[tuple[str, int]], layers: int, tied: bool) -> list[int]:
    """The bytes of each layer's tensors, the first with those of the first stage, the last with those of the last one."""
    by_layer = [0] * layers
    for name, nbytes in sizes:
        part, layer, *_ = name.split(".")
        if part == "blk":
            by_layer[int(layer)] += nbytes
        else:
            by_layer[0] += nbytes * _in_first(part)
            by_layer[-1] += nbytes * _in_last(part, tied)
    return by_layer


def divide(sizes: Sequence[int], parts: int) -> list[int]:
    """Where each of `parts` runs of neighbouring items ends, none of them empty: the largest sum is the least, then that of squares."""
    sums = [0, *accumulate(sizes)]
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}  # by the end of the last run: largest sum, squares, ends
    for part in range(1, parts + 1):
        found: dict[int, tuple[int, int, list[int]]] = {}
        for end in range(part, len(sizes) - (parts - part) + 1):
            before = ((start, sums[end] - sums[start]) for start in best if start < end)
            found[end] = min((max(best[start][0], size), best[start][1] + size * size, [*best[start][2], end]) for start, size in before)
        best = found
    return best[len(sizes)][2]
