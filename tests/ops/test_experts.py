"""A mixture of experts: the reference against numpy, and kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tests.ops.inputs import FORMATS_AND_VARIANTS, VARIANTS, by_kernel, int32, numbers, packed, realized
from tinyvllm.backends import registry
from tinyvllm.backends.operands import Weight
from tinyvllm.ops.experts import GateClamp, Routing, RoutingPolicy, experts_down, experts_gate_up_silu, norm_route
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


POLICIES = {
    "logits' bias": RoutingPolicy(X, C, True, bias="logits"),
    "softmax, choice's bias": RoutingPolicy(X, C, True, bias="choice"),
    "sigmoid": RoutingPolicy(X, C, False, sigmoid=True, scale=2.5),
    "sigmoid, bias, groups": RoutingPolicy(8, 3, True, True, "choice", 4, 2, 1.5),
    "softmax, groups by one score": RoutingPolicy(8, 3, False, groups=4, kept_groups=2, group_scores=1),
    "a shared expert's gate": RoutingPolicy(16, C, False, gated=True),
}


def chosen_by_hand(logits: np.ndarray, policy: RoutingPolicy, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Experts and shares, row by row."""
    experts, shares = [], []
    for row in logits.astype(np.float64):
        row = row + bias if policy.bias == "logits" else row
        powers = np.exp(row - row.max())
        scores = 1 / (1 + np.exp(-row)) if policy.sigmoid else powers / powers.sum()
        numbers = scores + bias if policy.bias == "choice" else scores
        groups = numbers.reshape(policy.groups, -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -policy.group_scores :].sum(1), kind="stable")[: policy.kept_groups]
        kept = np.isin(np.arange(policy.groups), best) | (policy.groups == 1)
        own = np.argsort(-np.where(np.repeat(kept, groups.shape[1]), numbers, -np.inf), kind="stable")[: policy.chosen]
        share = scores[own] / scores[own].sum() if policy.renormalize else scores[own]
        experts.append(own)
        shares.append(share * policy.scale)
    return np.array(experts), np.array(shares)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("variant", [*VARIANTS[:1], "plain", "ref"])
def test_policies_of_the_choice(monkeypatch, variant, name):
    policy = POLICIES[name]
    rows, E = policy.experts + policy.gated, 64
    weight, x, bias = packed("F32", rows, E), numbers(T, E), numbers(policy.experts, seed=4) * np.float32(0.7)
    router = weight.dense().numpy()
    if variant != "ref":
        monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_route={variant}")
    given = TensorWeight((realized(router),)) if variant == "ref" else weight
    got = norm_route(realized(x), norm(E), given, int32(T), policy, realized(bias))
    logits = normed(x) @ router.T
    chosen, shares = chosen_by_hand(logits[:, : policy.experts], policy, bias)
    np.testing.assert_array_equal(got.chosen.numpy(), chosen)
    np.testing.assert_allclose(got.shares.numpy(), shares, rtol=1e-4)
    if policy.gated:
        assert got.gates is not None
        np.testing.assert_allclose(got.gates.numpy(), 1 / (1 + np.exp(-logits[:, -1:])), rtol=1e-5)


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


@pytest.mark.parametrize("variant", [VARIANTS[0], "plain", "ref"])
def test_biases_and_a_clamped_gate(monkeypatch, variant):
    """Against numpy; a limit that many gates reach. Gate and up of two formats are two launches."""
    E, F, clamp = 64, 48, GateClamp(1.7, 0.5)
    x, routing = routed(E)
    biases, down_biases = numbers(2, X, F, seed=5), numbers(X, E, seed=6)
    weight, down = packed("F32", 2 * X * F, E), packed("F32", X * E, 96)
    matrices, chosen = weight.dense().numpy().reshape(2, X, F, E), routing.chosen.numpy()
    gate, up = (np.einsum("ti,tcoi->tco", normed(x.numpy()), m[chosen]) + b[chosen] for m, b in zip(matrices, biases, strict=True))
    gate, up = np.minimum(gate, clamp.limit), np.clip(up, -clamp.limit, clamp.limit)
    want = (gate / (1 + np.exp(-clamp.alpha * gate)) * (up + 1)).reshape(-1, F)

    def first(weight: Weight) -> np.ndarray:
        return experts_gate_up_silu(
            x, norm(E), weight, routing, int32(T), X, bias=realized(biases.reshape(-1)), clamp=clamp
        ).numpy()  # fmt: skip

    np.testing.assert_allclose(by_kernel(monkeypatch, "experts_gate_up_silu", variant, lambda: first(weight)), want, atol=1e-4)
    parts = MixedWeight((packed("F32", X * F, E), packed("BF16", X * F, E, seed=1)))
    mixed = [by_kernel(monkeypatch, "experts_gate_up_silu", which, lambda: first(parts)) for which in (variant, "ref")]
    np.testing.assert_allclose(*mixed, atol=TOLERANCE["BF16"])

    h, residual = numbers(T * C, 96), numbers(T, E)
    own = np.einsum("tci,tcoi->tco", h.reshape(T, C, 96), down.dense().numpy().reshape(X, E, 96)[chosen]) + down_biases[chosen]

    def second() -> np.ndarray:
        bias = realized(down_biases.reshape(-1))
        return experts_down(realized(h), down, routing, int32(T), X, realized(residual), bias=bias).numpy()

    want = residual + (own * routing.shares.numpy()[..., None]).sum(1)
    np.testing.assert_allclose(by_kernel(monkeypatch, "experts_down", variant, second), want, atol=1e-4)


@pytest.mark.parametrize("format", ["F32", "Q8_0+BF16"])
def test_biases_of_pairs(monkeypatch, format):
    """Which adapters make: those of experts, given to each pair, give the same bits, and a bias of -0 changes none."""
    x, routing = routed(96)
    parts = [packed(each, X * 48, 96, seed=n) for n, each in enumerate(format.split("+"))]
    weight = MixedWeight(tuple(parts)) if len(parts) > 1 else packed(format, 2 * X * 48, 96)
    biases = numbers(2, X, 48, seed=5)
    own = np.ascontiguousarray(biases[:, routing.chosen.numpy()].transpose(1, 2, 0, 3).reshape(T * C, 96))

    def op(bias: np.ndarray | None) -> np.ndarray:
        given = None if bias is None else realized(bias)
        return experts_gate_up_silu(x, norm(96), weight, routing, int32(T), X, bias=given).numpy()

    for bias, same in ((own, biases.reshape(-1)), (np.full_like(own, -0.0), None)):
        got, want = (by_kernel(monkeypatch, "experts_gate_up_silu", VARIANTS[0], lambda each=each: op(each)) for each in (bias, same))
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))
        reference = by_kernel(monkeypatch, "experts_gate_up_silu", "ref", lambda each=bias: op(each))
        np.testing.assert_allclose(got, reference, atol=TOLERANCE["Q8_0" if "+" in format else format])


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
