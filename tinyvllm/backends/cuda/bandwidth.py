"""How fast a GPU reads its memory: the roof of decoding."""

from __future__ import annotations

import time

from tinygrad import Tensor, dtypes

from tinyvllm.backends.cuda import plan
from tinyvllm.backends.cuda.driver import gpu_attribute
from tinyvllm.backends.cuda.launch import launch
from tinyvllm.bridge import Captured, synchronize

_PASSES = 8  # per reading of the clock: a launch and a wait cost as much as some megabytes


def gpu_read_bandwidth(device: str, seconds: float, nbytes: int) -> float:
    """Bytes per second in the best of the passes over `nbytes` (a multiple of 16) that are made within `seconds`."""
    blocks = 2 * gpu_attribute(device, "MULTIPROCESSOR_COUNT")
    words = Tensor.empty(nbytes, dtype=dtypes.uint8, device=device).contiguous().realize()
    kernel = plan.read(plan.BASE, nbytes // 16, blocks)
    sums = Tensor.empty(blocks, dtype=dtypes.int32, device=device).contiguous().realize()
    reads = Captured(lambda words: launch(kernel, [sums], [words])[0].realize())
    reads(words)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_PASSES):
            reads(words)
        synchronize(device)
        best = max(best, _PASSES * nbytes / (time.perf_counter() - start))
    return best
