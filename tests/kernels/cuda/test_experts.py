"""The CUDA kernels of a mixture of experts, in the emulator: norm_route, list_experts, experts_sum, and matmul by expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda import tiles
from tests.ops.test_experts import POLICIES, chosen_by_hand
from tinyvllm.backends.cases.experts import is_listed_in_groups
from tinyvllm.backends.cuda import expert_plan, plan
from tinyvllm.backends.cuda.expert_plan import Lists
from tinyvllm.backends.operands import GateClamp, RoutingPolicy
from tinyvllm.backends.shapes import Product
from tinyvllm.quant.random_rows import packable_width

VARIANT, EPS, GPU = "sm_80", 1e-5, plan.GPU(132, 227 << 10, 228 << 10)
X, C = 5, 3
# One for each way through the headers of large products; the others, whose products are the same, are long.
OFTEN = ("BF16", "Q4_K", "MXFP4")
FORMATS = [pytest.param(format, marks=() if format in OFTEN else pytest.mark.long) for format in tiles.KINDS]
CLAMP = GateClamp(1.702, 0.5)


def floats(*shape: int) -> np.ndarray:
    return aligned(shape, np.float32)


def integers(*shape: int) -> np.ndarray:
    return aligned(shape, np.int32, -1)


# --- the choice


def route(
    x: np.ndarray,
    norm: np.ndarray | None,
    weight: np.ndarray,
    policy: RoutingPolicy,
    bias: np.ndarray | None = None,
    rows: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Shares, experts, and the gates of the shared expert."""
    T, E = x.shape
    kernel, logits, counters = expert_plan.norm_route(VARIANT, T, E, policy, None if norm is None else f"{EPS}f")
    router, gate = weight[: policy.experts], weight[policy.experts :]
    gates = [floats(T)] if policy.gated else []
    outs = [floats(T, policy.chosen), integers(T, policy.chosen), *gates, floats(logits), aligned((counters,), np.uint32, 0)]
    ins = [x, norm, tiles.laid(router), tiles.laid(gate) if policy.gated else None, bias if policy.bias else None]
    emulate(kernel, *outs, *(array for array in ins if array is not None), tiles.one(T if rows is None else rows), seed=3)
    assert not outs[-1].any(), "counters are zero between launches"
    return outs[0], outs[1], gates[0] if gates else None


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_policies_of_the_choice(policy: RoutingPolicy) -> None:
    E, T = 64, 11
    x, norm = tiles.numbers(T, E), tiles.numbers(E, seed=1)
    weight, bias = tiles.numbers(policy.experts + policy.gated, E, seed=2) * np.float32(0.3), tiles.numbers(policy.experts, seed=3)
    shares, chosen, gates = route(x, norm, weight, policy, bias)
    logits = tiles.rms_normed(x, norm, EPS).astype(np.float64) @ weight.T.astype(np.float64)
    want, by_hand = chosen_by_hand(logits[:, : policy.experts], policy, bias)
    np.testing.assert_array_equal(chosen, want)
    np.testing.assert_allclose(shares, by_hand, rtol=2e-4)
    if gates is not None:
        np.testing.assert_allclose(gates, 1 / (1 + np.exp(-logits[:, -1])), rtol=1e-4)


@pytest.mark.parametrize("experts, chosen", [(60, 8), (130, 4)])
def test_a_row_has_the_same_experts_and_shares_in_any_batch(experts: int, chosen: int) -> None:
    """More rows have other launches. Without a norm; later rows are not touched."""
    E, T = 96, 18
    x, weight, policy = tiles.numbers(T, E), tiles.numbers(experts, E) * np.float32(0.2), RoutingPolicy(experts, chosen, True)
    shares, best, _ = route(x, None, weight, policy)
    np.testing.assert_array_equal(best, np.argsort(-(x.astype(np.float64) @ weight.T), axis=1, kind="stable")[:, :chosen])
    for first, count, padded in ((0, 1, 1), (7, 3, 8), (3, 14, 16)):
        some = np.full((padded, E), np.nan, np.float32)
        some[:count] = x[first : first + count]
        got, own, _ = route(tiles.laid(some), None, weight, policy, rows=count)
        tiles.same_bits(got[:count], shares[first : first + count])
        np.testing.assert_array_equal(own[:count], best[first : first + count])
        assert tiles.untouched(got[count:]) and (own[count:] == -1).all()


def test_of_equal_logits_the_first_experts_are_chosen_and_a_nan_has_nan_shares() -> None:
    x = tiles.numbers(4, 64)
    x[2, 5], x[3, 7] = np.nan, np.inf
    shares, chosen, _ = route(x, tiles.numbers(64), np.zeros((20, 64), np.float32), RoutingPolicy(20, 3, True))
    np.testing.assert_array_equal(chosen, [[0, 1, 2]] * 4)
    np.testing.assert_allclose(shares[:2], 1 / 3, rtol=1e-6)
    assert np.isnan(shares[2:]).all()


# --- lists


def listed(chosen: np.ndarray, experts: int, rows: int | None = None, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """`order` and `tasks` for the first `rows` rows."""
    lists = Lists(*chosen.shape, experts)
    order, tasks = integers(lists.places), integers(2 + 3 * lists.tasks)
    count = tiles.one(len(chosen) if rows is None else rows)
    emulate(expert_plan.list_experts(VARIANT, lists), order, tasks, tiles.laid(chosen.astype(np.int32)), count, seed=seed)
    return order, tasks


@pytest.mark.parametrize("T, chosen, experts", [(1, 1, 1), (9, 8, 300), (200, 3, 5), (40, 2, 130)])
def test_every_pair_is_listed_with_its_expert(T: int, chosen: int, experts: int) -> None:
    """In tasks of no more places than planned; also where few rows count, one or none."""
    random, lists = np.random.default_rng(T), Lists(T, chosen, experts)
    own = np.array([random.choice(experts, chosen, replace=False, p=powers(experts)) for _ in range(T)])
    for rows in {T, T // 2, 1, 0}:
        order, tasks = listed(own, experts, rows)
        assert is_listed_in_groups(own[:rows].reshape(-1), order, tasks)
        assert (tasks[2:].reshape(-1, 3)[: tasks[1], 2] <= lists.task // 8).all() and (order[tasks[0] :] == -1).all()


def powers(experts: int) -> np.ndarray:
    """Shares that fall: some experts have many rows, some none."""
    falling = 0.9 ** np.arange(experts)
    return np.asarray(falling / falling.sum())


def test_lists_of_the_worst_choices_have_room() -> None:
    """Each expert one pair more than fills its tasks."""
    for T, experts in ((34, 2), (85, 5), (27, 3)):
        own = np.arange(T)[:, None] % experts
        order, tasks = listed(own, experts)
        assert is_listed_in_groups(own.reshape(-1), order, tasks)


# --- products


def choices(T: int) -> np.ndarray:
    """[T, C], C of X experts; most rows have expert 3, few have expert 1."""
    random, shares = np.random.default_rng(T), np.array([4, 1, 4, 40, 9]) / 58
    return np.array([random.choice(X, C, replace=False, p=shares) for _ in range(T)])


def by_expert(
    x: np.ndarray, weight: tiles.Tiled, O: int, chosen: np.ndarray, norm: np.ndarray | None = None, bias: np.ndarray | None = None,
    silu: bool = False, gelu: bool = False, clamp: GateClamp | None = None, seed: int = 1,
) -> np.ndarray:  # fmt: skip
    """[T C, O]: of x [T, I] if `silu`, otherwise of x [T C, I]."""
    (T, chosen_of_row), I, format = chosen.shape, x.shape[1], weight.format
    lists, groups = Lists(T, chosen_of_row, X), listed(chosen, X, seed=seed)
    kernel = expert_plan.gathered(VARIANT, format, lists, I, None if norm is None else f"{EPS}f", chosen_of_row if silu else 1)
    prepared = aligned((tiles.prepared_bytes(format, lists.places, I),), np.uint8)
    emulate(kernel, prepared, *(array for array in (x, norm) if array is not None), *groups, seed=seed)
    product = Product(format, lists.places, O, I, bias=bias is not None, silu=silu)
    out = floats(lists.count, O)
    biases = [] if bias is None else [bias]
    emulate(expert_plan.experts_matmul(VARIANT, product, lists, GPU, gelu, clamp), out, prepared, weight.tiles, *biases, *groups, seed=seed)
    return out


def summed(
    outputs: np.ndarray, shares: np.ndarray, residual: np.ndarray | None, bias: np.ndarray | None = None, chosen: np.ndarray | None = None
) -> np.ndarray:
    (T, count), E = shares.shape, outputs.shape[1]
    out, kernel = floats(T, E), expert_plan.experts_sum(VARIANT, Lists(T, count, X), E, residual is not None, bias is not None)
    pairs = None if chosen is None else tiles.laid(chosen.astype(np.int32))
    arrays = (outputs, bias, shares, pairs, residual, tiles.one(T))
    emulate(kernel, out, *(array for array in arrays if array is not None))
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_products_by_expert(format: str) -> None:
    """Against the experts' own matrices, with a norm, and of each pair's own row; more than one piece of columns."""
    I, O, T = packable_width(format, 544), 48, 23
    x, norm, chosen = tiles.numbers(T, I), tiles.numbers(I, seed=1), choices(T)
    weight = tiles.tiled(tiles.numbers(2 * X * O, I) * np.float32(I**-0.5), format)
    seen = tiles.as_rounded(tiles.rms_normed(x, norm, EPS), format)
    both = weight.values.reshape(2, X, O, I)[:, chosen]
    gate, up = np.einsum("htcoi,ti->htco", both, seen)
    size = np.einsum("htcoi,ti->htco", np.abs(both), np.abs(seen)).sum(0) + 1
    got = by_expert(x, weight, O, chosen, norm, silu=True)
    tiles.close(got, (gate / (1 + np.exp(-gate)) * up).reshape(-1, O), (size * size).reshape(-1, O))

    h, weight = tiles.numbers(T * C, I), tiles.tiled(tiles.numbers(X * O, I, seed=1) * np.float32(I**-0.5), format)
    seen, own = tiles.as_rounded(h, format).reshape(T, C, I), weight.values.reshape(X, O, I)[chosen]
    want, size = np.einsum("tcoi,tci->tco", own, seen), np.einsum("tcoi,tci->tco", np.abs(own), np.abs(seen))
    tiles.close(by_expert(h, weight, O, chosen), want.reshape(-1, O), size.reshape(-1, O))


@pytest.mark.parametrize("gelu, clamp", [(False, None), (True, None), (False, CLAMP)], ids=["silu", "gelu", "clamped"])
def test_biases_and_gates(gelu: bool, clamp: GateClamp | None) -> None:
    I, O, T = 64, 32, 9
    x, bias, chosen = tiles.numbers(T, I), tiles.numbers(2 * X * O, seed=4), choices(T)
    weight = tiles.tiled(tiles.numbers(2 * X * O, I) * np.float32(0.2), "F16")
    seen = tiles.as_rounded(x, "F16")
    gate, up = np.einsum("htcoi,ti->htco", weight.values.reshape(2, X, O, I)[:, chosen], seen) + bias.reshape(2, X, O)[:, chosen]
    if clamp is not None:
        low = np.minimum(gate, clamp.limit)
        want = low / (1 + np.exp(-clamp.alpha * low)) * (np.clip(up, -clamp.limit, clamp.limit) + 1)
    elif gelu:
        want = gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    else:
        want = gate / (1 + np.exp(-gate)) * up
    got = by_expert(x, weight, O, chosen, bias=bias, silu=True, gelu=gelu, clamp=clamp)
    np.testing.assert_allclose(got, want.reshape(-1, O), atol=2e-5)


@pytest.mark.parametrize("residual", [True, False])
def test_the_sum_over_a_rows_experts(residual: bool) -> None:
    T, E = 3, 1040
    outputs, shares, more = tiles.numbers(T * C, E), tiles.numbers(T, C), tiles.numbers(T, E, seed=2)
    want = (outputs.reshape(T, C, E) * shares[..., None]).sum(1) + (more if residual else 0)
    np.testing.assert_allclose(summed(outputs, shares, more if residual else None), want, atol=1e-5)
    bias, chosen = tiles.numbers(X * E, seed=3), choices(T)
    want += (bias.reshape(X, E)[chosen] * shares[..., None]).sum(1)
    np.testing.assert_allclose(summed(outputs, shares, more if residual else None, bias, chosen), want, atol=1e-5)


@pytest.mark.parametrize("format", ["BF16", pytest.param("Q4_K", marks=pytest.mark.long)])
def test_a_pair_has_the_same_bits_with_any_others(format: str) -> None:
    """Alone, with others of its expert, in tasks of other sizes."""
    I, O, T = packable_width(format, 544), 48, 90
    x, norm, chosen = tiles.numbers(T, I), tiles.numbers(I, seed=1), choices(T)
    weight = tiles.tiled(tiles.numbers(2 * X * O, I), format)
    whole = by_expert(x, weight, O, chosen, norm, silu=True).reshape(T, -1)
    assert Lists(T, C, X).task > Lists(7, C, X).task
    for first, count in ((0, 1), (40, 2), (61, 7)):
        cut = slice(first, first + count)
        got = by_expert(tiles.laid(x[cut]), weight, O, chosen[cut], norm, silu=True, seed=5).reshape(count, -1)
        tiles.same_bits(got, whole[cut])


def test_an_expert_has_the_bits_of_a_dense_layer() -> None:
    """Of the kernel for few rows with the expert's own matrix."""
    I, O, T, expert = 1056, 32, 6, 3
    h, weight = tiles.numbers(T, I), tiles.numbers(X * O, I)
    chosen = np.stack([np.full(T, expert), np.arange(T) % 2, np.full(T, 4)], axis=1)
    got = by_expert(np.repeat(h, C, axis=0), tiles.tiled(weight, "Q8_0"), O, chosen).reshape(T, C, O)[:, 0]
    own, dense = tiles.tiled(weight.reshape(X, O, I)[expert], "Q8_0"), floats(T, O)
    emulate(plan.matvec(VARIANT, Product("Q8_0", T, O, I), GPU), dense, h, own.tiles, tiles.one(T))
    tiles.same_bits(np.ascontiguousarray(got), dense)


def test_experts_that_no_row_has_are_not_read() -> None:
    """Their weights are NaN, which would reach a sum."""
    chosen, weights = np.tile([4, 0, 2], (7, 1)), tiles.numbers(X, 48, 64)
    weights[[1, 3]] = np.nan
    assert np.isfinite(by_expert(tiles.numbers(7 * C, 64), tiles.tiled(weights.reshape(-1, 64), "BF16"), 48, chosen)).all()


# --- plans


@pytest.mark.parametrize("memory", [99, 163, 227])
@pytest.mark.parametrize("format", tiles.TILED)
def test_every_gpu_has_a_cut_for_every_task(format: str, memory: int) -> None:
    """An RTX 3090 has 99 KiB of shared memory for a block of threads."""
    gpu = plan.GPU(82, memory << 10, memory + 1 << 10)
    for T in (1, 64, 512, 4096):
        lists = Lists(T, 8, 128)
        for product in (Product(format, lists.places, 768, 2048, silu=True), Product(format, lists.places, 2048, 768)):
            kernel = expert_plan.experts_matmul(VARIANT, product, lists, gpu)
            assert kernel.shared + 1024 <= gpu.shared and dict(kernel.defines)["TASK"] * 8 % dict(kernel.defines)["TILE_T"] == 0


def test_texts_do_not_depend_on_the_number_of_rows() -> None:
    few, more = (Lists(T, 8, 128) for T in (1, 3))
    assert replace(expert_plan.list_experts(VARIANT, few), bytes=0) == replace(expert_plan.list_experts(VARIANT, more), bytes=0)
