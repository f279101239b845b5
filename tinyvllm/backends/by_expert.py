"""Pairs of a row and one of its experts, as backends list them."""

from __future__ import annotations

from collections.abc import Callable

from tinygrad import Tensor, dtypes

from tinyvllm.backends.operands import Routing
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Pairs:
    """Those of T rows with C of X experts each."""

    T: int
    C: int
    X: int

    @property
    def count(self) -> int:
        return self.T * self.C

    @property
    def used(self) -> int:
        """Experts that some row has, at most."""
        return min(self.X, self.count)

    def tasks_of(self, size: int) -> int:
        """Into how many tasks of at most `size` pairs, each of one expert, they are cut at most."""
        return (self.count + (size - 1) * self.used) // size


def sizes_of(chosen: Tensor, experts: int) -> tuple[int, int, int]:
    """T, C and X of `Pairs`."""
    T, C = (int(d) for d in chosen.shape)
    return T, C, experts


def list_heads(T: int, H: int, rows: Tensor, listed: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Routing:
    """The routing of T H rows of which row t H + h has head h alone, those of `rows` of T, listed by `listed(chosen, rows, experts)`."""
    chosen = (Tensor.arange(T * H, dtype=dtypes.int32, device=rows.device) % H).reshape(T * H, 1).contiguous()
    ones = Tensor.ones(T * H, 1, device=rows.device).contiguous()
    return Routing(ones, chosen, listed(chosen, (rows * H).cast(dtypes.int32).contiguous(), H))
