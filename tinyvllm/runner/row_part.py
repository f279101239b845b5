"""Some rows of a tensor: those that a rank has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class RowPart:
    """`rows`, and after them `more`, of each of `matrices` matrices of as many rows, one after the other: as those of all experts are one
    tensor.
    """

    rows: slice
    matrices: int = 1
    more: tuple[slice, ...] = ()

    @classmethod
    def of_heads(cls, heads: slice, size: int) -> RowPart:
        """`size` rows of each of these heads."""
        return cls(slice(heads.start * size, heads.stop * size))

    @property
    def count(self) -> int:
        return self.matrices * sum(len(range(rows.start, rows.stop)) for rows in (self.rows, *self.more))

    def of(self, array: Any) -> Any:
        """These rows of an array or tensor [rows of all matrices, ...]; a view where they follow each other."""
        if self.matrices == 1 and not self.more:
            return array[self.rows.start : self.rows.stop]
        rest = array.shape[1:]
        matrices = array.reshape(self.matrices, -1, *rest)
        first, *others = (matrices[:, rows.start : rows.stop] for rows in (self.rows, *self.more))
        if others:
            first = np.concatenate([first, *others], axis=1) if isinstance(array, np.ndarray) else first.cat(*others, dim=1)
        return first.reshape(-1, *rest)


def runs(numbers: Iterable[int], size: int, start: int = 0) -> list[slice]:
    """`size` rows of each of these numbers, of which the first has its rows from `start` on; neighbours are one slice."""
    found: list[slice] = []
    for number in numbers:
        begin = start + number * size
        if found and found[-1].stop == begin:
            begin = found.pop().start
        found.append(slice(begin, start + (number + 1) * size))
    return found
