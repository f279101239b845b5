"""Shapes whose sizes are numbers are what tinygrad's own rewriting leaves."""

from __future__ import annotations

import pytest
from tinygrad import UOp, Variable
from tinygrad.uop.ops import shape_to_shape_arg

from tinyvllm.bridge import constant_shapes


@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 1), (3, 0, 2), (64, 128), (5, 1, 64, 2**33)], ids=str)
def test_a_shape_of_numbers_is_simple(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = UOp.sink(shape_to_shape_arg(shape), shape_to_shape_arg(shape[:1]))
    assert constant_shapes._simplify(sizes) is sizes
    monkeypatch.setattr(constant_shapes, "_simplify", lambda node: pytest.fail("it was rewritten"))
    constant_shapes.keep_constant_shapes()
    assert sizes.simplify() is sizes


def test_a_shape_with_a_variable_is_simplified() -> None:
    count = Variable("count", 1, 9)
    constant_shapes.keep_constant_shapes()
    sizes = UOp.sink(shape_to_shape_arg((count * 2 - count, 4)))
    assert sizes.simplify() is constant_shapes._simplify(sizes) is not sizes
