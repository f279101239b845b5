"""What the kernels assume of a GPU beyond Metal's specification, asked of the GPU when its device is opened."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.backends.metal import plan
from tinyvllm.backends.metal.launch import launch
from tinyvllm.bridge import download, upload
from tinyvllm.errors import KernelError


def unexpected_matrix_layout(device: str) -> str | None:
    """How the lanes' numbers of a simdgroup_matrix differ from what kernels/metal/include/gpu.h assumes; None if they do not.

    One launch of 32 threads.
    """
    numbers, halves = (Tensor.empty(64, dtype=dtype, device=device) for dtype in (dtypes.float32, dtypes.float16))
    upload(numbers, np.arange(64, dtype=np.float32))
    upload(halves, np.arange(64, dtype=np.float16))
    try:
        out = launch(plan.matrix_probe(plan.BASE), [Tensor.empty(3, 64, dtype=dtypes.float32, device=device)], [numbers, halves])[0]
        got = download(out.contiguous().realize())
    except (KernelError, RuntimeError) as error:
        return f"they cannot be looked at: {next(iter(str(error).splitlines()), type(error).__name__)}"
    held = expected_numbers()
    wanted = np.stack([held, np.argsort(held), held])
    if (got == wanted).all():
        return None
    i = int(np.argmax((got != wanted).any(0)))
    return f"lane {i // 2} has the number {got[0, i]:g} where {held[i]} is expected"


def expected_numbers() -> np.ndarray:
    """Numbers 2 * lane and 2 * lane + 1: what a lane holds of the matrix 0, 1, ..., 63, by gpu.h's matrix_row and matrix_column."""
    lane = np.repeat(np.arange(32), 2)
    row, column = (lane >> 2 & 4) + (lane >> 1 & 3), (lane >> 2 & 2) * 2 + (lane & 1) * 2
    return np.asarray(8 * row + column + np.tile([0, 1], 32))
