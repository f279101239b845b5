"""Products of activations with weights: kernels against the reference, the reference against numpy, and the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.formats import sampled_formats
from tests.ops.inputs import FORMATS_AND_VARIANTS, VARIANTS, by_kernel, device_bytes, file_rows, int32, numbers, packed, realized
from tinyvllm.backends import registry
from tinyvllm.backends.buffers import constant
from tinyvllm.ops.linear import TensorWeight, gate_up_silu, linear, rounded
from tinyvllm.ops.norm import Norm
from tinyvllm.quant.formats import FORMATS, Activations, Layout, activations_of, formats_in
from tinyvllm.quant.layouts import MixedWeight, PackedWeight, pack_panels
from tinyvllm.quant.random_rows import packable_width

TOLERANCE = 1e-5  # of results of about 1: the order of float32 sums
# Where x is rounded, a last bit of the norm may tip a number to its neighbour: a weight of 0.1 times 1/256 (BF16) or 3/127 (blocks).
_BY_ROUNDING = {Activations.FLOAT32: 1e-5, Activations.BFLOAT16: 2e-3, Activations.INT8: 1e-2}
TIPPED = {format: _BY_ROUNDING[activations_of(format, Layout.PANELS)] for format in formats_in(Layout.PANELS)}


def gelu(y: np.ndarray) -> np.ndarray:
    return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


# --- the reference


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("T", "O", "I"), [(1, 64, 96), (5, 12, 20), (16, 100, 64), (3, 7, 10)])
def test_tensors_against_numpy(T, O, I, dtype):
    x, bias, residual = numbers(T, I), numbers(O), numbers(T, O)
    tensor = Tensor(numbers(O, I, seed=1)).cast(getattr(dtypes, dtype)).realize()
    seen = Tensor(x).cast(dtypes.bfloat16).float().numpy() if dtype == "bfloat16" else x
    expected = seen @ tensor.float().numpy().T
    weight, rows = TensorWeight((tensor,)), int32(T)
    np.testing.assert_allclose(linear(Tensor(x), weight, rows).numpy(), expected, atol=1e-4)
    full = linear(Tensor(x), weight, rows, Tensor(bias), Tensor(residual), gelu=True).numpy()
    np.testing.assert_allclose(full, gelu(expected + bias) + residual, atol=1e-4)


def test_outputs_of_several_tensors_stand_side_by_side():
    x, parts = numbers(3, 64), [numbers(O, 64, seed=O) for O in (8, 5, 20)]
    weight = TensorWeight(tuple(Tensor(part) for part in parts))
    assert (weight.O, weight.I) == (33, 64)
    np.testing.assert_allclose(linear(Tensor(x), weight, int32(3)).numpy(), x @ np.concatenate(parts).T, atol=1e-4)


def test_x_is_rounded_as_processors_multiply_it():
    x = numbers(3, 64)
    x[1, 32:] = 0  # a block without a scale
    blocks = x.reshape(3, 2, 32)
    scale = np.abs(blocks).max(2, keepdims=True) / np.float32(127)
    expected = (np.rint(blocks / np.where(scale, scale, 1)) * scale).reshape(3, 64)
    for format in ("Q8_0", "Q4_0"):
        np.testing.assert_allclose(rounded(Tensor(x), FORMATS[format].activations).numpy(), expected, atol=1e-6)
    np.testing.assert_array_equal(rounded(Tensor(x), Activations.BFLOAT16).numpy(), Tensor(x).cast(dtypes.bfloat16).float().numpy())
    np.testing.assert_array_equal(rounded(Tensor(x), Activations.FLOAT32).numpy(), x)


def test_gate_up_silu_of_tensors():
    x, norm, gate, up, bias = numbers(3, 8), numbers(8), numbers(12, 8), numbers(12, 8, seed=1), numbers(24)
    n = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * norm
    g, u = n @ gate.T + bias[:12], n @ up.T + bias[12:]
    weight = TensorWeight((Tensor(gate), Tensor(up)))
    out = gate_up_silu(Tensor(x), Norm("RMS", Tensor(norm), 1e-5), weight, int32(3), Tensor(bias)).numpy()
    np.testing.assert_allclose(out, g / (1 + np.exp(-g)) * u, atol=1e-5)


# --- kernels


@pytest.mark.parametrize(("format", "variant"), FORMATS_AND_VARIANTS)
def test_matmul_equals_its_reference(monkeypatch, format, variant):
    """13 rows of which 11 count, 50 outputs: neither fills a tile or a panel."""
    T, used, O, I = 13, 11, 50, packable_width(format, 96)
    x, residual = (realized(numbers(T, width)) for width in (I, O))
    weight, bias = packed(format, O, I), realized(numbers(O))

    def op() -> np.ndarray:
        return linear(x, weight, int32(used), bias, residual, gelu=True).numpy()[:used]

    got, want = (by_kernel(monkeypatch, "matmul", which, op) for which in (variant, "ref"))
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize("extra", ["nothing", "bias", "residual", "gelu"])
def test_matmul_with_one_thing_more(monkeypatch, extra):
    T, O, I = 5, 50, 96
    x, weight = realized(numbers(T, I)), packed("BF16", O, I)
    bias, residual = (realized(numbers(*shape)) if extra == name else None for name, shape in (("bias", (O,)), ("residual", (T, O))))

    def op() -> np.ndarray:
        return linear(x, weight, int32(T), bias, residual, extra == "gelu").numpy()

    got, want = (by_kernel(monkeypatch, "matmul", variant, op) for variant in (VARIANTS[0], "ref"))
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize(("format", "variant"), FORMATS_AND_VARIANTS)
def test_a_row_has_the_same_bits_in_any_batch(monkeypatch, format, variant):
    """The kernels of the previous test, with bias, gelu and residual."""
    most, O, I = 64, 50, packable_width(format, 96)
    x, residual, weight, bias = numbers(most, I), numbers(most, O), packed(format, O, I), realized(numbers(O))
    monkeypatch.setenv("TINYVLLM_KERNELS", f"matmul={variant}")

    def bits(start: int, T: int) -> np.ndarray:
        cut = slice(start, start + T)
        return linear(realized(x[cut]), weight, int32(T), bias, realized(residual[cut]), gelu=True).numpy().view(np.uint32)

    whole = bits(0, most)
    for T in (1, 2, 3, 8, 13, 24, 47):
        start = 7 * T % (most - T)
        np.testing.assert_array_equal(bits(start, T), whole[start : start + T], err_msg=f"T = {T}")


@pytest.mark.parametrize("residual", [True, False])
def test_matmul_with_a_norm_and_a_scale_of_its_outputs(monkeypatch, residual):
    T, used, O, I = 13, 11, 64, 96
    x, weight, added = realized(numbers(T, I)), packed("BF16", O, I), realized(numbers(T, O)) if residual else None
    norm = Norm("RMS", realized(numbers(O)), 1e-5)

    def op() -> np.ndarray:
        return linear(x, weight, int32(used), None, added, norm=norm, scale=0.25).numpy()[:used]

    got, want = (by_kernel(monkeypatch, "matmul", which, op) for which in (VARIANTS[0], "ref"))
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_a_norm_of_outputs_that_the_kernel_cannot_do_follows_it(monkeypatch):
    """50 outputs: the product by its kernel, the norm by generated operations; the choice has the reason."""
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    registry.forget_choices()
    x, weight, norm = realized(numbers(3, 32)), packed("F32", 50, 32), Norm("RMS", realized(numbers(50)), 1e-5)
    out = linear(x, weight, int32(3), norm=norm).numpy()
    assert [(choice.variant, "multiples of 16; the model has 50" in choice.why) for choice in registry.choices()] == [
        ("ref", True),
        (VARIANTS[0], False),
    ]
    y = x.numpy() @ weight.dense().numpy().T
    np.testing.assert_allclose(out, y / np.sqrt((y * y).mean(1, keepdims=True) + 1e-5) * norm.weight.numpy(), atol=1e-5)


@pytest.mark.parametrize(("gelu", "normed"), [(True, True), (False, False), (True, False)])
def test_gate_with_gelu_and_without_a_norm(monkeypatch, gelu, normed):
    T, used, F, E = 7, 5, 48, 96
    x, weight, norm = realized(numbers(T, E)), packed("BF16", 2 * F, E), Norm("RMS", realized(numbers(E)), 1e-5) if normed else None

    def op() -> np.ndarray:
        return gate_up_silu(x, norm, weight, int32(used), gelu=gelu).numpy()[:used]

    got = by_kernel(monkeypatch, "norm_gate_up_silu", VARIANTS[0], op)
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    np.testing.assert_allclose(got, op(), atol=TIPPED["BF16"])


GATED = [(format, variant, False) for format, variant in FORMATS_AND_VARIANTS] + [("F32", VARIANTS[0], True), ("Q8_0", VARIANTS[0], True)]


@pytest.mark.parametrize(("format", "variant", "bias"), GATED)
def test_gate_up_silu_equals_its_reference(monkeypatch, format, variant, bias):
    T, used, F, E = 7, 5, 48, packable_width(format, 96)
    x, weight, norm = realized(numbers(T, E)), packed(format, 2 * F, E), Norm("RMS", realized(numbers(E)), 1e-5)
    bias_tensor = realized(numbers(2 * F)) if bias else None

    def op() -> np.ndarray:
        return gate_up_silu(x, norm, weight, int32(used), bias_tensor).numpy()[:used]

    got, want = (by_kernel(monkeypatch, "norm_gate_up_silu", which, op) for which in (variant, "ref"))
    np.testing.assert_allclose(got, want, atol=TIPPED[format])
    assert np.abs(got - want).mean() < TIPPED[format] / 20


@pytest.mark.parametrize("formats", [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0")])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_and_up_of_two_formats(monkeypatch, formats, with_bias):
    """Two launches; of two parts in one format they have the bits of one."""
    T, F, E = 7, 48, 256
    x, norm = realized(numbers(T, E)), Norm("RMS", realized(numbers(E)), 1e-5)
    bias = realized(numbers(2 * F)) if with_bias else None
    parts = MixedWeight(tuple(packed(format, F, E, seed) for seed, format in enumerate(formats)))

    def op(weight: MixedWeight | PackedWeight = parts) -> np.ndarray:
        return gate_up_silu(x, norm, weight, int32(T), bias).numpy()

    got, want = (by_kernel(monkeypatch, "norm_gate_up_silu", which, op) for which in (VARIANTS[0], "ref"))
    np.testing.assert_allclose(got, want, atol=TIPPED[formats[0]])
    if formats[0] == formats[1]:
        rows = np.concatenate([file_rows(format, F, E, seed) for seed, format in enumerate(formats)])
        whole = PackedWeight(device_bytes(pack_panels(formats[0], rows)), formats[0], 2 * F, E)
        monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_gate_up_silu={VARIANTS[0]}")
        np.testing.assert_array_equal(got.view(np.uint32), op(whole).view(np.uint32))


def test_gate_up_silu_has_the_same_bits_in_any_batch(monkeypatch):
    most, F, E = 40, 48, 96
    x, weight, norm = numbers(most, E), packed("Q8_0", 2 * F, E), Norm("RMS", realized(numbers(E)), 1e-5)
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_gate_up_silu={VARIANTS[0]}")
    whole = gate_up_silu(realized(x), norm, weight, int32(most)).numpy()
    for T in (1, 5, 13, 25):
        got = gate_up_silu(realized(x[3 : 3 + T]), norm, weight, int32(T)).numpy()
        np.testing.assert_array_equal(got.view(np.uint32), whole[3 : 3 + T].view(np.uint32), err_msg=f"T = {T}")


@pytest.mark.parametrize(
    ("F", "kind", "why"), [(20, "RMS", "outputs in multiples of 16; the model has 20"), (16, "LAYER", "supports RMSNorm only")]
)
def test_what_the_gated_kernel_cannot_do_goes_to_the_reference(monkeypatch, F, kind, why):
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    registry.forget_choices()
    x, scale, weight = numbers(3, 32), numbers(32), packed("F32", 2 * F, 32)
    out = gate_up_silu(realized(x), Norm(kind, Tensor(scale), 1e-5), weight, int32(3)).numpy()
    (choice,) = registry.choices()
    assert choice.variant == "ref" and why in choice.why
    centred = x - x.mean(1, keepdims=True) if kind == "LAYER" else x
    y = centred / np.sqrt((centred * centred).mean(1, keepdims=True) + 1e-5) * scale @ weight.dense().numpy().T
    np.testing.assert_allclose(out, y[:, :F] / (1 + np.exp(-y[:, :F])) * y[:, F:], atol=1e-5)


@pytest.mark.parametrize("format", sampled_formats(Layout.PANELS))
def test_a_row_of_zeros_and_one_of_huge_numbers(monkeypatch, format):
    """Blocks without a scale, and numbers whose squares no float32 holds."""
    I = packable_width(format, 96)
    x = np.stack([np.zeros(I, np.float32), numbers(I) * np.float32(1e30)])
    weight = packed(format, 16, I)

    def op() -> np.ndarray:
        return linear(realized(x), weight, int32(2)).numpy()

    got, want = (by_kernel(monkeypatch, "matmul", variant, op) for variant in (VARIANTS[0], "ref"))
    assert (got[0] == 0).all() and np.isfinite(got[1]).all()
    np.testing.assert_allclose(got[1] / 1e30, want[1] / 1e30, atol=TOLERANCE)


def test_constants_are_floats_in_c():
    assert [constant(value) for value in (1e-5, 0.25, 1.0, 1)] == ["1e-05f", "0.25f", "1.0f", "1.0f"]
