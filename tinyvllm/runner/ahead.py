"""Which hand-written kernels the steps of an engine will launch, found without a launch, so that they compile before a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tinyvllm.backends.collecting import collecting_kernels
from tinyvllm.backends.kernel import Kernel
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.runner.prepare import Shape


def kernels_of_steps(
    model: Any, caches: list[LayerCache], constants: dict[str, Any], shapes: Iterable[Shape], batch_of: Callable[[Shape], Batch]
) -> list[Kernel]:
    """The kernels that the model's forward pass launches for batches of these shapes, each once, in the order of their first launch.

    Layers that launch the same kernels in the first shape count as one: most models have one kind of layer, some two.
    """
    blocks, found = model.blk, dict[Kernel, None]()

    def kernels(batch: Batch, layers: list[int]) -> list[Kernel]:
        model.blk = [blocks[layer] for layer in layers]
        with collecting_kernels() as launched:
            model.forward_batch(batch, [caches[layer] for layer in layers], **constants)
        return launched

    distinct: list[int] | None = None
    try:
        for shape in shapes:
            batch = batch_of(shape)
            if distinct is None:
                kinds = [tuple(kernels(batch, [layer])) for layer in range(len(blocks))]
                distinct = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
            found |= dict.fromkeys(kernels(batch, distinct))
    finally:
        model.blk = blocks
    return list(found)
