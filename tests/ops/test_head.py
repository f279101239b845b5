"""The two ends: rows of the embedding, exactly, and logits with the token of the largest."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tests.ops.inputs import FORMATS_AND_VARIANTS, VARIANTS, by_kernel, device_bytes, in_rows, int32, numbers, packed, realized
from tinyvllm.backends import registry
from tinyvllm.ops.head import embed, norm_head
from tinyvllm.ops.linear import TensorWeight
from tinyvllm.ops.norm import Norm
from tinyvllm.quant.formats import Activations, Layout, activations_of, formats_in
from tinyvllm.quant.layouts import PackedWeight, pack_panels
from tinyvllm.quant.random_rows import packable_width

# Where the norm's output is rounded, a last bit before may tip a number to its neighbour.
_BY_ROUNDING = {Activations.FLOAT32: 2e-5, Activations.BFLOAT16: 4e-3, Activations.INT8: 2e-2}
TOLERANCE = {format: _BY_ROUNDING[activations_of(format, Layout.PANELS)] for format in formats_in(Layout.PANELS)}
V, E = 131, 96


def test_embedding_of_a_tensor():
    table, tokens = numbers(7, 6), np.array([6, 0, 6, 3], np.int32)
    np.testing.assert_array_equal(embed(realized(table), realized(tokens), int32(4)).numpy(), table[tokens])


@pytest.mark.parametrize("make", [packed, in_rows])
@pytest.mark.parametrize(("format", "variant"), FORMATS_AND_VARIANTS)
def test_embedding_is_exact(monkeypatch, format, variant, make):
    table, tokens, used = make(format, V, packable_width(format, E)), int32(V - 1, 0, 16, 15, 130, 7, 7), 5
    got = by_kernel(monkeypatch, "embed", variant, lambda: embed(table, tokens, int32(used)).numpy()[:used])
    np.testing.assert_array_equal(got, table.dense().numpy()[[V - 1, 0, 16, 15, 130]])


HEADS = [(format, variant, "RMS") for format, variant in FORMATS_AND_VARIANTS] + [(f, VARIANTS[0], "LAYER") for f in ("F32", "Q8_0")]


@pytest.mark.parametrize(("format", "variant", "kind"), HEADS)
def test_logits_equal_their_reference(monkeypatch, format, variant, kind):
    """Rows 9, 0 and 4 of 10 with room for five; an odd vocabulary."""
    I = packable_width(format, E)
    x, weight, rows, count = realized(numbers(10, I)), packed(format, V, I), int32(9, 0, 4, 0, 0), 3
    norm = Norm(kind, realized(numbers(I)), 1e-5, realized(numbers(I, seed=1)) if kind == "LAYER" else None)
    tokens = []

    def op() -> np.ndarray:
        logits, best = norm_head(x, norm, weight, rows, int32(count))
        if best is not None:
            Tensor.realize(logits, best)
            tokens.extend(best.numpy()[:count].tolist())
        return logits.numpy()[:count]

    got, want = (by_kernel(monkeypatch, "norm_head", which, op) for which in (variant, "ref"))
    np.testing.assert_allclose(got, want, atol=TOLERANCE[format])
    assert tokens == got.argmax(1).tolist(), "one call has found them, the reference does not"


def test_divided_and_capped_logits(monkeypatch):
    """The cap makes some of them equal: the lowest index is the best."""
    x, weight, rows = realized(40 * numbers(10, E)), packed("F32", V, E), int32(9, 0, 4)
    norm, tokens = Norm("RMS", realized(numbers(E)), 1e-5), []

    def op() -> np.ndarray:
        logits, best = norm_head(x, norm, weight, rows, int32(3), 0.01, 5.0)
        if best is not None:
            Tensor.realize(logits, best)
            tokens.extend(best.numpy().tolist())
        return logits.numpy()

    got, want = (by_kernel(monkeypatch, "norm_head", which, op) for which in (VARIANTS[0], "ref"))
    np.testing.assert_allclose(got, want, atol=5e-5)
    assert (got == got.max(1, keepdims=True)).sum() > 3 and tokens == got.argmax(1).tolist()


def test_a_scaled_embedding(monkeypatch):
    table, tokens = packed("BF16", V, E), int32(3, 0, V - 1)
    got, want = (
        by_kernel(monkeypatch, "embed", which, lambda: embed(table, tokens, int32(3), 8.5).numpy()) for which in (VARIANTS[0], "ref")
    )
    np.testing.assert_array_equal(got, want)


def test_logits_of_tensors(monkeypatch):
    x, weight, scale = numbers(4, E), numbers(V, E, seed=1), numbers(E)
    norm = Norm("RMS", realized(scale), 1e-5)
    logits, best = norm_head(realized(x), norm, TensorWeight((realized(weight),)), int32(3, 1), int32(2))
    expected = (x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * scale @ weight.T)[[3, 1]]
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-4)
    assert best is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lowest_of_equals_and_none_of_nan(monkeypatch, variant):
    """Rows of the weight that are the same have logits that are the same; a NaN in x makes a row of them."""
    rows = np.ones((V, E), np.float32)
    rows[:40] = -1
    weight = PackedWeight(device_bytes(pack_panels("F32", rows.view(np.uint8))), "F32", V, E)
    x = np.abs(numbers(3, E))
    x[1, 5] = np.nan
    x[2] *= -1
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_head={variant}")
    logits, best = norm_head(realized(x), Norm("RMS", realized(np.ones(E, np.float32)), 1e-5), weight, int32(0, 1, 2), int32(3))
    Tensor.realize(logits, best)
    assert best.numpy().tolist() == [40, -1, 0]
    assert np.isnan(logits.numpy()[1]).all()


def test_logits_have_the_same_bits_in_any_batch(monkeypatch):
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_head={VARIANTS[0]}")
    registry.forget_choices()
    x, norm, weight = realized(numbers(20, E)), Norm("RMS", realized(numbers(E)), 1e-5), packed("BF16", V, E)
    whole = norm_head(x, norm, weight, int32(*range(20)), int32(20))[0].numpy().view(np.uint32)
    for rows in ([0], [19, 3], list(range(15, 2, -1))):
        logits = norm_head(x, norm, weight, int32(*rows), int32(len(rows)))[0].numpy()
        np.testing.assert_array_equal(logits.view(np.uint32), whole[rows])
