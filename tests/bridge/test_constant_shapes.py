"""Shapes whose sizes are numbers are what tinygrad's own rewriting leaves."""

from __future__ import annotations

import pytest
from tinygrad import UOp, Variable, dtypes
from tinygrad.uop.ops import shape_to_shape_arg

from tinyvllm.bridge import constant_shapes


@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 1), (3, 0, 2), (64, 128), (5, 1, 64, 2**33)], ids=str)
def test_a_shape_of_numbers_is_simple(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = UOp.sink(shape_to_shape_arg(shape), shape_to_shape_arg(shape[:1]))
    assert constant_shapes._simplify(sizes) is sizes
    monkeypatch.setattr(constant_shapes, "_simplify", lambda node: pytest.fail("it was rewritten"))
    constant_shapes.keep_constant_shapes()
    assert sizes.simplify() is sizes and UOp.simplify is constant_shapes._simplified, "nothing was asked"


def test_a_shape_with_a_variable_is_simplified() -> None:
    count = Variable("count", 1, 9)
    constant_shapes.keep_constant_shapes()
    sizes = UOp.sink(shape_to_shape_arg((count * 2 - count, 4)))
    assert sizes.simplify() is constant_shapes._simplify(sizes) is not sizes


@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 1), (3, 0, 2), (64, 128), (5, 1, 64, 2)], ids=str)
@pytest.mark.parametrize("dtype", [None, dtypes.uint8, "bfloat16"], ids=str)
def test_an_empty_tensor_is_tinygrads(shape: tuple[int, ...], dtype: object) -> None:
    constant_shapes.keep_constant_shapes()
    for device in (None, "CPU", ("CPU", "CPU:1")):
        number = next(UOp.unique_num)
        made, known = (empty(shape, dtype, device, num=number) for empty in (UOp.empty, constant_shapes._empty))
        assert made is known and made.shape == shape


def test_an_empty_tensor_of_a_variable_size_is_tinygrads() -> None:
    shape, number = (Variable("count", 1, 9), 4), next(UOp.unique_num)
    made, known = (empty(shape, dtypes.float32, "CPU", num=number) for empty in (UOp.empty, constant_shapes._empty))
    assert made is known
