"""The product of activations and weights: right, whatever the shapes and dtypes, and the same bits however many rows run together."""

import numpy as np
import pytest


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("T", "O", "I"), [(1, 64, 96), (8, 100, 64), (16, 64, 64), (5, 12, 20), (48, 256, 32), (3, 7, 10), (2, 2048, 512)])
def test_against_numpy(T, O, I, dtype):
    from tinygrad import Tensor, dtypes

    from tinyvllm.ops.linear import linear

    random = np.random.default_rng(0)
    x, bias = random.standard_normal((T, I)).astype(np.float32), random.standard_normal(O).astype(np.float32)
    weight = Tensor(random.standard_normal((O, I)).astype(np.float32)).cast(getattr(dtypes, dtype)).realize()
    expected = x @ weight.float().numpy().T
    np.testing.assert_allclose(linear(Tensor(x), weight).numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(linear(Tensor(x), weight, Tensor(bias)).numpy(), expected + bias, atol=1e-4)


@pytest.mark.parametrize(("O", "I"), [(96, 64), (1536, 768)], ids=["one thread", "two threads"])
def test_a_row_has_the_same_bits_in_any_company(O, I):
    from tinygrad import Tensor, dtypes

    from tinyvllm.ops.linear import linear

    random = np.random.default_rng(1)
    x = random.standard_normal((64, I)).astype(np.float32)
    weight = Tensor(random.standard_normal((O, I)).astype(np.float32)).cast(dtypes.bfloat16).realize()
    whole = linear(Tensor(x), weight).numpy()
    for T in (1, 2, 3, 4, 8, 16, 24, 32):
        np.testing.assert_array_equal(linear(Tensor(x[:T]), weight).numpy(), whole[:T], err_msg=f"T = {T}")


def test_gate_up_silu():
    from tinygrad import Tensor

    from tinyvllm.ops.linear import gate_up_silu

    random = np.random.default_rng(2)
    x, gate, up = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 8), (12, 8), (12, 8)))
    g, u = x @ gate.T, x @ up.T
    np.testing.assert_allclose(gate_up_silu(Tensor(x), Tensor(gate), Tensor(up)).numpy(), g / (1 + np.exp(-g)) * u, atol=1e-5)
