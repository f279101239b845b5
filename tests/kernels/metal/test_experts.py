"""The Metal kernels of a mixture of experts, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.tiles import close, laid, numbers, one, same_bits, untouched
from tests.kernels.metal.test_products import EPS, VARIANT, Weight, gelu, normed, poison, weight_of
from tests.ops.test_experts import POLICIES, chosen_by_hand
from tinyvllm.backends.cases.experts import is_listed_in_any_order
from tinyvllm.backends.metal import expert_plan, plan
from tinyvllm.backends.metal.expert_plan import Lists
from tinyvllm.backends.operands import GateClamp, RoutingPolicy
from tinyvllm.backends.shapes import Product
from tinyvllm.quant.random_rows import packable_width

X, C, NORM = 5, 3, f"{EPS}f"
CLAMP = GateClamp(1.702, 0.5)
FORMATS = ["BF16", "Q4_K", *(pytest.param(format, marks=pytest.mark.long) for format in ("F32", "F16", "Q8_0", "MXFP4", "NF4"))]


def integers(*shape: int) -> np.ndarray:
    return aligned(shape, np.int32, -1)


# --- the choice


def route(
    x: np.ndarray, norm: np.ndarray | None, weight: np.ndarray, policy: RoutingPolicy, bias: np.ndarray | None = None,
    rows: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:  # fmt: skip
    """Shares, experts, and the gates of the shared expert."""
    (T, E), count = x.shape, one(len(x) if rows is None else rows)
    router, gate = laid(weight[: policy.experts]), laid(weight[policy.experts :])
    logits, norms = poison(T, policy.experts + policy.gated), [] if norm is None else [norm]
    kernel = expert_plan.norm_route(VARIANT, T, E, policy, None if norm is None else NORM)
    emulate(kernel, logits, x, *norms, router, *([gate] if policy.gated else []), count, seed=3)
    outs = [poison(T, policy.chosen), integers(T, policy.chosen), *([poison(T)] if policy.gated else [])]
    biases = [bias] if policy.bias and bias is not None else []
    emulate(expert_plan.choose_experts(VARIANT, T, policy), *outs, logits, *biases, count, seed=4)
    return outs[0], outs[1], outs[2] if policy.gated else None


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_policies_of_the_choice(policy: RoutingPolicy) -> None:
    E, T = 64, 11
    x, norm = numbers(T, E), numbers(E, seed=1)
    weight, bias = numbers(policy.experts + policy.gated, E, seed=2) * np.float32(0.3), numbers(policy.experts, seed=3)
    shares, chosen, gates = route(x, norm, weight, policy, bias)
    logits = normed(x, norm) @ weight.T.astype(np.float64)
    want, by_hand = chosen_by_hand(logits[:, : policy.experts], policy, bias)
    np.testing.assert_array_equal(chosen, want)
    np.testing.assert_allclose(shares, by_hand, rtol=2e-4)
    if gates is not None:
        np.testing.assert_allclose(gates, 1 / (1 + np.exp(-logits[:, -1])), rtol=1e-4)


def test_a_row_has_the_same_experts_and_shares_in_any_batch() -> None:
    """More rows have other launches. Without a norm; later rows are not touched."""
    E, T, policy = 96, 18, RoutingPolicy(60, 8, True)
    x, weight = numbers(T, E), numbers(60, E) * np.float32(0.2)
    shares, best, _ = route(x, None, weight, policy)
    np.testing.assert_array_equal(best, np.argsort(-(x.astype(np.float64) @ weight.T), axis=1, kind="stable")[:, :8])
    for first, count, padded in ((0, 1, 1), (7, 3, 8), (3, 14, 16)):
        some = np.full((padded, E), np.nan, np.float32)
        some[:count] = x[first : first + count]
        got, own, _ = route(laid(some), None, weight, policy, rows=count)
        same_bits(got[:count], shares[first : first + count])
        np.testing.assert_array_equal(own[:count], best[first : first + count])
        assert untouched(got[count:]) and (own[count:] == -1).all()


def test_of_equal_logits_the_first_experts_are_chosen_and_a_nan_has_nan_shares() -> None:
    x = numbers(4, 64)
    x[2, 5], x[3, 7] = np.nan, np.inf
    shares, chosen, _ = route(x, numbers(64), np.zeros((20, 64), np.float32), RoutingPolicy(20, 3, True))
    np.testing.assert_array_equal(chosen, [[0, 1, 2]] * 4)
    np.testing.assert_allclose(shares[:2], 1 / 3, rtol=1e-6)
    assert np.isnan(shares[2:]).all()


# --- lists


def listed(chosen: np.ndarray, experts: int, rows: int | None = None, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """`order` and `tasks` for the first `rows` rows."""
    lists = Lists(*chosen.shape, experts)
    order, tasks = integers(lists.count), integers(1 + 3 * lists.tasks)
    count = one(len(chosen) if rows is None else rows)
    emulate(expert_plan.list_experts(VARIANT, lists), order, tasks, laid(chosen.astype(np.int32)), count, seed=seed)
    return order, tasks


@pytest.mark.parametrize("T, chosen, experts", [(1, 1, 1), (9, 8, 300), (60, 3, 5), (34, 1, 2)])
def test_every_pair_is_listed_with_its_expert(T: int, chosen: int, experts: int) -> None:
    """In tasks of no more pairs than planned; also where few rows count, one or none."""
    lists, falling = Lists(T, chosen, experts), 0.9 ** np.arange(experts)
    random = np.random.default_rng(T)
    own = np.array([random.choice(experts, chosen, replace=False, p=falling / falling.sum()) for _ in range(T)])
    for rows in {T, T // 2, 1, 0}:
        order, tasks = listed(own, experts, rows)
        assert is_listed_in_any_order(own[:rows].reshape(-1), order, tasks) and (order[rows * chosen :] == -1).all()
        assert (np.diff(tasks[1:].reshape(-1, 3)[: tasks[0], 1:]) <= lists.task).all()


# --- products


def choices(T: int) -> np.ndarray:
    """[T, C], C of X experts; most rows have expert 3, few have expert 1."""
    random, shares = np.random.default_rng(T), np.array([4, 1, 4, 40, 9]) / 58
    return np.array([random.choice(X, C, replace=False, p=shares) for _ in range(T)])


def gate_up(
    x: np.ndarray, norm: np.ndarray, weights: tuple[Weight, Weight], chosen: np.ndarray, biases: tuple[np.ndarray, ...] = (),
    gelu_gate: bool = False, clamp: GateClamp | None = None, seed: int = 1, apart: bool = False,
) -> np.ndarray:  # fmt: skip
    """[T C, F] of x [T, E]; `apart`: in two launches."""
    lists, groups = Lists(*chosen.shape, X), listed(chosen, X, seed=seed)
    F = len(weights[0].rows) // X
    out = poison(lists.count, F)
    for i, half in enumerate(("GATE", "UP") if apart else ("BOTH",)):
        own, more = (weights[i : i + 1], biases[i : i + 1]) if apart else (weights, biases)
        kernel = expert_plan.experts_gate_up(
            VARIANT, own[0].format, lists, x.shape[1], F, NORM, bool(biases), half, gelu_gate, clamp
        )  # fmt: skip
        emulate(kernel, out, x, norm, *(weight.rows for weight in own), *more, *groups, seed=seed)
    return out


def down(h: np.ndarray, weight: Weight, chosen: np.ndarray, seed: int = 1) -> np.ndarray:
    """[T C, O] of h [T C, I]."""
    lists, groups, O = Lists(*chosen.shape, X), listed(chosen, X, seed=seed), len(weight.rows) // X
    out, product = poison(lists.count, O), Product(weight.format, lists.task, O, h.shape[1])
    emulate(expert_plan.experts_matvec(VARIANT, product, lists), out, h, weight.rows, *groups, seed=seed)
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_products_by_expert(format: str) -> None:
    """Against the experts' own matrices, with a norm, and of each pair's own row."""
    I, F, T = packable_width(format, 288), 20, 13
    x, norm, chosen = numbers(T, I), numbers(I, seed=1), choices(T)
    weights = weight_of(X * F, I, format), weight_of(X * F, I, format, seed=1)
    seen = normed(x, norm)
    gate, up = (np.einsum("tcoi,ti->tco", w.values.reshape(X, F, I)[chosen], seen) for w in weights)
    size = sum(np.einsum("tcoi,ti->tco", np.abs(w.values).reshape(X, F, I)[chosen], np.abs(seen)) for w in weights) + 1
    close(gate_up(x, norm, weights, chosen), (gate / (1 + np.exp(-gate)) * up).reshape(-1, F), (size * size).reshape(-1, F))

    h = numbers(T * C, I)
    own = weights[0].values.reshape(X, F, I)[chosen]
    want, size = np.einsum("tcoi,tci->tco", own, h.reshape(T, C, I)), np.einsum("tcoi,tci->tco", np.abs(own), np.abs(h).reshape(T, C, I))
    close(down(h, weights[0], chosen), want.reshape(-1, F), size.reshape(-1, F))


@pytest.mark.parametrize("gelu_gate, clamp", [(False, None), (True, None), (False, CLAMP)], ids=["silu", "gelu", "clamped"])
def test_biases_and_gates(gelu_gate: bool, clamp: GateClamp | None) -> None:
    """In one launch, and in two with the same bits."""
    I, F, T = 64, 20, 5
    x, norm, chosen = numbers(T, I), numbers(I, seed=1), choices(T)
    biases = numbers(X * F, seed=4), numbers(X * F, seed=5)
    weights = weight_of(X * F, I, "F16"), weight_of(X * F, I, "F16", seed=1)
    gate, up = (
        np.einsum("tcoi,ti->tco", w.values.reshape(X, F, I)[chosen], normed(x, norm)) * 0.125 + b.reshape(X, F)[chosen]
        for w, b in zip(weights, biases, strict=True)
    )
    if clamp is not None:
        low = np.minimum(gate, clamp.limit)
        want = low / (1 + np.exp(-clamp.alpha * low)) * (np.clip(up, -clamp.limit, clamp.limit) + 1)
    else:
        want = (gelu(gate) if gelu_gate else gate / (1 + np.exp(-gate))) * up
    small = norm * np.float32(0.125)
    got = gate_up(x, small, weights, chosen, biases, gelu_gate, clamp)
    np.testing.assert_allclose(got, want.reshape(-1, F), rtol=2e-5, atol=1e-4)
    same_bits(gate_up(x, small, weights, chosen, biases, gelu_gate, clamp, apart=True), got)


@pytest.mark.parametrize("residual", [True, False])
def test_the_sum_over_a_rows_experts(residual: bool) -> None:
    T, E = 3, 1040
    outputs, shares, more, out = numbers(T * C, E), numbers(T, C), numbers(T, E, seed=2), poison(T, E)
    kernel = expert_plan.experts_sum(VARIANT, Lists(T, C, X), E, residual)
    emulate(kernel, out, outputs, shares, *([more] if residual else []), one(T))
    want = (outputs.reshape(T, C, E) * shares[..., None]).sum(1) + (more if residual else 0)
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("format", ["BF16", pytest.param("Q4_K", marks=pytest.mark.long)])
def test_a_pair_has_the_same_bits_with_any_others(format: str) -> None:
    """Alone, with others of its expert, in tasks of other sizes; those of a dense layer with the expert's own matrices."""
    I, F, T = packable_width(format, 288), 20, 40
    x, norm, chosen = numbers(T, I), numbers(I, seed=1), choices(T)
    weights = weight_of(X * F, I, format), weight_of(X * F, I, format, seed=1)
    whole = gate_up(x, norm, weights, chosen).reshape(T, C, F)
    assert {Lists(rows, C, X).task for rows in (1, 2, 7, T)} == {1, 2, 8, 16}
    for first, count in ((0, 1), (20, 2), (31, 7)):
        cut = slice(first, first + count)
        got = gate_up(laid(x[cut]), norm, weights, chosen[cut], seed=5).reshape(count, C, F)
        same_bits(got, whole[cut])
    expert = int(chosen[0, 0])
    own, dense = [laid(w.rows[expert * F : (expert + 1) * F]) for w in weights], poison(1, F)
    emulate(plan.norm_gate_up_silu(VARIANT, format, 1, I, F, NORM), dense, laid(x[:1]), norm, *own, one(1))
    same_bits(dense, np.ascontiguousarray(whole[0, :1]))


def test_experts_that_no_row_has_are_not_read() -> None:
    """Their weights are NaN, which would reach a sum."""
    chosen, weight = np.tile([4, 0, 2], (7, 1)), weight_of(X * 20, 64, "BF16")
    weight.rows.reshape(X, -1)[[1, 3]] = 0xFF
    assert np.isfinite(down(numbers(7 * C, 64), weight, chosen)).all()
