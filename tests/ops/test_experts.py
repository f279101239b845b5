"""A mixture of experts: the reference against numpy, and kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tests.ops.inputs import FORMATS_AND_VARIANTS, VARIANTS, by_kernel, int32, numbers, packed, realized
from tinyvllm.backends import registry
from tinyvllm.backends.operands import Weight
from tinyvllm.ops.experts import Routing, RoutingPolicy, experts_down, experts_gate_up_silu, norm_route
from tinyvllm.ops.linear import TensorWeight
from tinyvllm.ops.norm import Norm
from tinyvllm.quant.formats import Activations, Layout, activations_of, formats_in
from tinyvllm.quant.layouts import MixedWeight
from tinyvllm.quant.random_rows import packable_width

X, C, T = 5, 2, 7
# Where the norm's output is rounded, a last bit before may tip a number to its neighbour.
_BY_ROUNDING = {Activations.FLOAT32: 2e-5, Activations.BFLOAT16: 4e-3, Activations.INT8: 2e-2}
TOLERANCE = {format: _BY_ROUNDING[activations_of(format, Layout.PANELS)] for format in formats_in(Layout.PANELS)}
SOME = [pair for pair in FORMATS_AND_VARIANTS if pair[0] in ("F32", "BF16", "Q8_0", "Q4_0")]


def norm(E: int) -> Norm:
    return Norm("RMS", realized(numbers(E)), 1e-5)


def normed(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * numbers(x.shape[1]))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("variant", [*VARIANTS, "ref"])
def test_the_largest_logits_choose(monkeypatch, variant, renormalize):
    """Two experts are equal: the one with the lower number is before the other."""
    x, router = numbers(T, 64), packed("F32", X, 64).dense().numpy()
    router[4] = router[1]
    weight = TensorWeight((realized(router),)) if variant == "ref" else packed("F32", X, 64)
    if variant != "ref":
        router[4] = packed("F32", X, 64).dense().numpy()[4]
        monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_route={variant}")
    got = norm_route(realized(x), norm(64), weight, int32(T), RoutingPolicy(X, C, renormalize))
    logits = normed(x) @ router.T
    powers = np.exp(logits - logits.max(1, keepdims=True))
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :C]
    shares = np.take_along_axis(powers, chosen, 1)
    shares /= (shares if renormalize else powers).sum(1, keepdims=True)
    assert (got.groups is None) == (variant == "ref")
    np.testing.assert_array_equal(got.chosen.numpy(), chosen)
    np.testing.assert_allclose(got.shares.numpy(), shares, rtol=1e-4)


def routed(E: int) -> tuple[Tensor, Routing]:
    """x [T, E] and its routing by the kernel, with groups."""
    x = realized(numbers(T, E))
    routing = norm_route(x, norm(E), packed("F32", X, E), int32(T), RoutingPolicy(X, C, True))
    Tensor.realize(routing.shares, routing.chosen, *(routing.groups or ()))
    return x, routing


def test_the_reference_of_experts_is_their_own_products():
    E, F = 64, 32
    x, routing = routed(E)
    gates, ups, downs = (numbers(X, F, E, seed=1), numbers(X, F, E, seed=2), numbers(X, E, F, seed=3))
    weight = TensorWeight((realized(gates.reshape(-1, E)), realized(ups.reshape(-1, E))))
    chosen, shares, n = routing.chosen.numpy(), routing.shares.numpy(), normed(x.numpy())
    gate, up = (np.einsum("ti,tcoi->tco", n, matrices[chosen]) for matrices in (gates, ups))
    h = experts_gate_up_silu(x, norm(E), weight, routing, int32(T), X)
    np.testing.assert_allclose(h.numpy().reshape(T, C, F), gate / (1 + np.exp(-gate)) * up, rtol=1e-3, atol=1e-3)
    y = experts_down(h.contiguous(), TensorWeight((realized(downs.reshape(-1, F)),)), routing, int32(T), X, x)
    want = (np.einsum("tci,tcoi->tco", h.numpy().reshape(T, C, F), downs[chosen]) * shares[..., None]).sum(1) + x.numpy()
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("format", "variant"), SOME)
def test_products_of_experts_equal_their_reference(monkeypatch, format, variant):
    E, F = packable_width(format, 96), 48
    x, routing = routed(E)
    gate_up, down, h = packed(format, 2 * X * F, E), packed(format, X * 48, E), realized(numbers(T * C, E))

    def first(weight: Weight = gate_up) -> np.ndarray:
        return experts_gate_up_silu(x, norm(E), weight, routing, int32(T), X).numpy()

    def second() -> np.ndarray:
        return experts_down(h, down, routing, int32(T), X, realized(numbers(T, 48))).numpy()

    for stem, op, tolerance in (("experts_gate_up_silu", first, TOLERANCE[format]), ("experts_down", second, 2e-5)):
        got, want = (by_kernel(monkeypatch, stem, which, op) for which in (variant, "ref"))
        np.testing.assert_allclose(got, want, atol=tolerance)


def test_gate_and_up_of_experts_in_two_formats(monkeypatch):
    x, routing = routed(96)
    weight = MixedWeight((packed("Q8_0", X * 48, 96), packed("BF16", X * 48, 96, seed=1)))

    def op() -> np.ndarray:
        return experts_gate_up_silu(x, norm(96), weight, routing, int32(T), X).numpy()

    got, want = (by_kernel(monkeypatch, "experts_gate_up_silu", which, op) for which in (VARIANTS[0], "ref"))
    np.testing.assert_allclose(got, want, atol=TOLERANCE["Q8_0"])


def test_without_groups_the_reference_computes_and_says_why():
    x, routing = routed(96)
    registry.forget_choices()
    experts_gate_up_silu(x, norm(96), packed("F32", 2 * X * 48, 96), Routing(routing.shares, routing.chosen), int32(T), X).numpy()
    assert [(c.variant, c.why) for c in registry.choices()] == [("ref", "kernel does not support experts that norm_route has not chosen")]
