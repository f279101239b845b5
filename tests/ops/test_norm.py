"""RMSNorm and LayerNorm against numpy."""

import numpy as np


def test_rms_norm():
    from tinygrad import Tensor

    from tinyvllm.ops.norm import rms_norm

    random = np.random.default_rng(0)
    x, w = random.standard_normal((5, 48)).astype(np.float32), random.standard_normal(48).astype(np.float32)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rms_norm(Tensor(x), Tensor(w), 1e-5).numpy(), expected * w, atol=1e-5)
    np.testing.assert_allclose(rms_norm(Tensor(x), None, 1e-5).numpy(), expected, atol=1e-5)


def test_layer_norm():
    from tinygrad import Tensor

    from tinyvllm.ops.norm import layer_norm

    random = np.random.default_rng(1)
    x, w, b = (random.standard_normal(shape).astype(np.float32) for shape in ((5, 48), (48,), (48,)))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer_norm(Tensor(x), Tensor(w), Tensor(b), 1e-5).numpy(), expected * w + b, atol=1e-5)
    np.testing.assert_allclose(layer_norm(Tensor(x), None, None, 1e-5).numpy(), expected, atol=1e-5)


def test_a_norm_knows_its_kind():
    from tinygrad import Tensor

    from tinyvllm.ops.norm import Norm, layer_norm, rms_norm

    random = np.random.default_rng(2)
    x, w, b = (Tensor(random.standard_normal(shape).astype(np.float32)) for shape in ((5, 48), (48,), (48,)))
    np.testing.assert_array_equal(Norm("RMS", w, 1e-3)(x).numpy(), rms_norm(x, w, 1e-3).numpy())
    np.testing.assert_array_equal(Norm("LAYER", w, 1e-3, b)(x).numpy(), layer_norm(x, w, b, 1e-3).numpy())
