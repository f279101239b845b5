"""Products with a matrix of each head, by the kernels of experts and by the reference."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.inputs import FORMATS_AND_VARIANTS, VARIANTS, by_kernel, int32, numbers, packed, realized
from tinyvllm.ops.heads import head_products
from tinyvllm.ops.linear import TensorWeight

H, O, I = 3, 48, 64
SOME = [pair for pair in FORMATS_AND_VARIANTS if pair[0] in ("F32", "BF16", "Q8_0", "Q4_0")]


def test_each_head_has_its_own_matrix() -> None:
    x, matrices = numbers(5, H, I), numbers(H * O, I)
    got = head_products(realized(x), TensorWeight((realized(matrices),)), int32(5)).numpy()
    np.testing.assert_allclose(got, np.einsum("thi,hoi->tho", x, matrices.reshape(H, O, I)), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("format", "variant"), SOME)
def test_kernels_against_the_reference(monkeypatch, format, variant):
    """Rows that fill more than one task of a head (96), and others that do not count."""
    T, count = 112, 101
    x, weight, rows = realized(numbers(T, H, I)), packed(format, H * O, I), int32(count)
    got, want = (by_kernel(monkeypatch, "experts_down", v, lambda: head_products(x, weight, rows).numpy()) for v in (variant, "ref"))
    np.testing.assert_allclose(got[:count], want[:count], rtol=0, atol=2e-2 if format.startswith("Q") else 2e-5)


@pytest.mark.parametrize("format", ["BF16", "Q4_0"])
def test_a_row_has_the_same_bits_in_any_batch(monkeypatch, format):
    x, weight = numbers(40, H, I), packed(format, H * O, I)

    def products(rows: np.ndarray, count: int) -> np.ndarray:
        op = lambda: head_products(realized(rows), weight, int32(count)).numpy()  # noqa: E731
        return by_kernel(monkeypatch, "experts_down", VARIANTS[0], op)

    whole = products(x, 40)
    for first, length, padded in ((0, 1, 1), (7, 3, 8), (39, 1, 4)):
        some = np.zeros((padded, H, I), np.float32)
        some[:length] = x[first : first + length]
        np.testing.assert_array_equal(products(some, length)[:length].view(np.uint32), whole[first : first + length].view(np.uint32))
