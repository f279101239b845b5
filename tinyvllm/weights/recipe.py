"""How one tensor of a model comes from the tensors of a file; model families provide recipes, the loader follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Recipe(Protocol):
    """A tensor of the model: its name and shape, the file tensors it comes from, and the transform that makes it.

    `transform` takes the sources in order and returns an array of `shape`; None means the single source as it is. It may only move
    elements (slice, permute, transpose, stack): its inputs come as stored, float32, float16 or bfloat16 bits as uint16, when they
    all have the same one of these formats; otherwise they have been converted to the model's dtype first (bfloat16 again as
    uint16). A slice of rows therefore stays a view of the file, and is mapped. A transform that only moves whole rows may also get the
    bytes of a packed matrix, one row per row: it must not rely on the number of columns.
    """

    @property
    def name(self) -> str: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def transform(self) -> Callable[[list[np.ndarray]], np.ndarray] | None: ...
