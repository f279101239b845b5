"""Rotation and its tables. The scalings are held against transformers by tests/models/test_parity.py; here are their plain properties."""

import numpy as np
import pytest

from tinyvllm.ops.rope import RopeScaling, rope_table


def angles_of(table):
    half = table.shape[1] // 2
    return np.arctan2(table[:, half:], table[:, :half])


def test_the_plain_table():
    table = rope_table(8, 10000.0, 5, RopeScaling())
    expected = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(table, np.concatenate([np.cos(expected), np.sin(expected)], 1), atol=1e-6)


def test_linear_scaling_slows_every_angle():
    np.testing.assert_allclose(rope_table(8, 1e4, 9, RopeScaling("linear", 4.0))[8], rope_table(8, 1e4, 9, RopeScaling())[2], atol=1e-6)


def test_llama3_keeps_the_fast_and_slows_the_slow():
    scaling = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    plain, scaled = (angles_of(rope_table(128, 5e5, 2, s))[1] for s in (RopeScaling(), scaling))
    np.testing.assert_allclose(scaled[:20], plain[:20], rtol=1e-5)
    np.testing.assert_allclose(scaled[-20:], plain[-20:] / 8, rtol=1e-4)


@pytest.mark.parametrize(("max_len", "factor"), [(64, 2.0), (65, 5.0)])
def test_longrope_takes_its_factors_by_the_context(max_len, factor):
    scaling = RopeScaling("longrope", 4.0, 64, attention_factor=1.0, short_factor=(2.0,) * 4, long_factor=(5.0,) * 4)
    plain, scaled = (angles_of(rope_table(8, 1e4, max_len, s))[1] for s in (RopeScaling(), scaling))
    np.testing.assert_allclose(scaled, plain / factor, rtol=1e-5)


def test_apply_rope_turns_pairs_and_passes_the_rest():
    from tinygrad import Tensor

    from tinyvllm.ops.rope import apply_rope

    random = np.random.default_rng(0)
    x, table = random.standard_normal((3, 2, 12)).astype(np.float32), rope_table(8, 1e4, 16, RopeScaling())[[0, 5, 15]]
    out = apply_rope(Tensor(x), Tensor(table)).numpy()
    turned = (x[..., :4] + 1j * x[..., 4:8]) * (table[:, None, :4] + 1j * table[:, None, 4:])
    np.testing.assert_allclose(out[..., :4], turned.real, atol=1e-5)
    np.testing.assert_allclose(out[..., 4:8], turned.imag, atol=1e-5)
    np.testing.assert_array_equal(out[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(out[0], x[0])
