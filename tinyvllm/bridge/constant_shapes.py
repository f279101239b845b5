"""Shapes whose sizes are numbers are not simplified: they are as simple as they can be.

tinygrad rewrites the sizes of every reshape, shrink and expand with all rules that it has for numbers, a third of a millisecond for each
tensor that is made: 20 ms of a start.
"""

from __future__ import annotations

from typing import Any

from tinygrad import UOp
from tinygrad.uop.ops import Ops

_simplify: Any = UOp.simplify


def keep_constant_shapes() -> None:
    """From now on, tinygrad takes sizes that are numbers as they are."""
    kind: Any = UOp
    kind.simplify = _simplified


def _simplified(self: UOp, *arguments: Any, **named: Any) -> UOp:
    if self.op is Ops.SINK and all(_is_number(size) or (size.op is Ops.STACK and all(map(_is_number, size.src))) for size in self.src):
        return self
    simpler: UOp = _simplify(self, *arguments, **named)
    return simpler


def _is_number(node: UOp) -> bool:
    return node.op is Ops.CONST
