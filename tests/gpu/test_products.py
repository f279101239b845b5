"""Products on the GPU: every format against the reference at a model's shapes, few rows and many, and the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.gpu.operands import FORMATS, best_variant, both, same_bits, tiled
from tests.ops.inputs import by_kernel, int32, numbers, realized
from tests.ops.test_qkv import batch_of
from tinyvllm.backends import registry
from tinyvllm.backends.cuda import hopper_plan
from tinyvllm.batch import LayerCache
from tinyvllm.bridge import alias
from tinyvllm.ops.experts import Routing, RoutingPolicy, experts_down, experts_gate_up_silu, norm_route
from tinyvllm.ops.head import embed, norm_head
from tinyvllm.ops.linear import gate_up_silu, linear
from tinyvllm.ops.norm import Norm
from tinyvllm.ops.qkv import QKV, norm_qkv_rope_store
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import RowWeight, StoredWeight
from tinyvllm.weights.memory import place_bytes

# Results are about 1. Sums of float32 over 2048 columns, which tensor cores round in their own way; where x is rounded to blocks, the
# reference's division may tip a number to its neighbour: 3/127 times a weight of 0.02 to 0.1.
TOLERANCE = {"BF16": 3e-4, "F16": 1e-3, "Q8_0": 3e-3, "Q4_0": 3e-3}
# After a norm a last bit may tip a rounded number to its neighbour, at worst some of 2048: 2**-9 or 3/127 of a number times 0.02.
TIPPED = {"BF16": 4e-3, "F16": 1e-3, "Q8_0": 2e-2, "Q4_0": 2e-2}
COUNTS = (1, 3, 8, 40, 300)


def counts(max_rows: int) -> list[int]:
    return sorted({min(T, max_rows) for T in COUNTS})


@pytest.mark.parametrize("T", COUNTS)
@pytest.mark.parametrize("format", FORMATS)
def test_matmul_equals_its_reference(monkeypatch, sizes, format, T):
    """With bias and residual, 8 rows beyond those that count, and outputs that fill no tile."""
    T, O, I = min(T, sizes.max_rows), sizes.E + 8, sizes.E
    x, residual, bias, weight = realized(numbers(T + 8, I)), realized(numbers(T + 8, O)), realized(numbers(O)), tiled(format, O, I)
    got, want = both(monkeypatch, "matmul", lambda: linear(x, weight, int32(T), bias, residual).numpy()[:T])
    np.testing.assert_allclose(got, want, atol=TOLERANCE[format])
    assert np.abs(got - want).mean() < TOLERANCE[format] / 4


@pytest.mark.parametrize("format", FORMATS)
def test_matmul_has_the_same_bits_in_any_batch(monkeypatch, sizes, format):
    """For the second product of a feed-forward layer, whose columns are many pieces."""
    O, I, max_rows = sizes.E, sizes.F, sizes.max_rows
    x, weight = numbers(max_rows, I), tiled(format, O, I)
    monkeypatch.setenv("TINYVLLM_KERNELS", f"matmul={best_variant('matmul')}")

    def bits(start: int, T: int) -> np.ndarray:
        return linear(realized(x[start : start + T]), weight, int32(T)).numpy()

    whole = bits(0, max_rows)
    for T in (*counts(max_rows)[:-1], 2, 9, 17):
        start = 7 * T % (max_rows - T)
        same_bits(bits(start, T), whole[start : start + T], f"{T} rows")


@pytest.mark.parametrize("format", ["BF16", "F16"])
def test_every_variant_that_can_run_gives_the_same_bits(sizes, format, monkeypatch):
    """NVIDIA does not promise that Hopper's own instructions round as the others do; the self-test replaces them where they do not."""
    rows = registry.usable_variants(Placement("CUDA"), "matmul")
    if len(rows) == 1:
        pytest.skip(f"{rows[0]} is the only variant for this GPU")
    monkeypatch.setattr(hopper_plan, "LEAST_ROWS", 16)
    x, weight = realized(numbers(sizes.max_rows, sizes.E)), tiled(format, sizes.F, sizes.E)
    results = [by_kernel(monkeypatch, "matmul", row, lambda: linear(x, weight, int32(sizes.max_rows)).numpy()) for row in rows]
    for row, other in zip(rows[1:], results[1:], strict=True):
        same_bits(other, results[0], f"{row} against {rows[0]}")


@pytest.mark.parametrize("T", [1, 8, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_gate_up_silu(monkeypatch, sizes, format, T):
    T, F, E = min(T, sizes.max_rows), sizes.F // 4, sizes.E
    x, weight, norm = realized(numbers(T, E)), tiled(format, 2 * F, E), Norm("RMS", realized(numbers(E)), 1e-5)
    got, want = both(monkeypatch, "norm_gate_up_silu", lambda: gate_up_silu(x, norm, weight, int32(T)).numpy())
    np.testing.assert_allclose(got, want, atol=5 * TIPPED[format])
    assert np.abs(got - want).mean() < TIPPED[format] / 2
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_gate_up_silu={best_variant('norm_gate_up_silu')}")
    same_bits(gate_up_silu(realized(numbers(T, E)[-1:]), norm, weight, int32(1)).numpy(), got[-1:], "the last row alone")


@pytest.mark.parametrize("T", [1, 8, 300])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_norm_qkv_rope_store(monkeypatch, sizes, T, qk_norm):
    T, S = min(T, sizes.max_rows), 16
    H, K, D, E, P = sizes.H, sizes.K, sizes.D, sizes.E, -(-sizes.max_rows // 16) + 1
    norm, weight = Norm("RMS", realized(numbers(E)), 1e-5), tiled("BF16", (H + 2 * K) * D, E)
    qkv = QKV(weight, realized(numbers((H + 2 * K) * D)), *([realized(numbers(D, seed=seed)) for seed in (2, 3)] if qk_norm else ()))
    x, angles = numbers(T, E), numbers(T, D, seed=4)

    def run(rows: slice) -> np.ndarray:
        """q, and keys and values of the rows' slots."""
        pool = Tensor.zeros(P, 2, K, S, D, dtype=dtypes.bfloat16).contiguous().realize()
        slots = list(range(T))[rows]
        batch = batch_of(slots, len(slots))
        q, cache = norm_qkv_rope_store(realized(x[rows]), norm, qkv, realized(angles[rows]), LayerCache(pool, alias(pool)), batch)
        Tensor.realize(q, *cache)
        stored = cache.keys.float().numpy().transpose(0, 3, 1, 2, 4).reshape(P * S, -1)
        return np.concatenate([q.numpy().reshape(len(slots), -1), stored[slots]], axis=1)

    got, want = both(monkeypatch, "norm_qkv_rope_store", lambda: run(slice(0, T)))
    np.testing.assert_allclose(got, want, atol=7e-2)  # the cache rounds to 8 bits
    assert np.abs(got - want).mean() < 2e-3
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_qkv_rope_store={best_variant('norm_qkv_rope_store')}")
    same_bits(run(slice(T - 1, T)), got[-1:], "the last row alone")


@pytest.mark.parametrize("N", [1, 5, 40])
def test_norm_head(monkeypatch, sizes, N):
    E, V, rows = sizes.E, sizes.V, min(N, sizes.max_rows)
    x, weight, norm = realized(numbers(rows + 2, E)), tiled("BF16", V, E), Norm("RMS", realized(numbers(E)), 1e-5)
    picked = list(range(rows, 0, -1))

    def op() -> np.ndarray:
        logits, best = norm_head(x, norm, weight, int32(*picked), int32(rows))
        if best is not None:
            Tensor.realize(logits, best)
            np.testing.assert_array_equal(best.numpy(), logits.numpy().argmax(1))
        return logits.numpy()

    got, want = both(monkeypatch, "norm_head", op)
    np.testing.assert_allclose(got, want, atol=5 * TIPPED["BF16"])


@pytest.mark.parametrize("format", FORMATS)
def test_embed_is_exact(monkeypatch, sizes, format):
    table = tiled(format, min(sizes.V, 4099), sizes.E)
    tokens = int32(*np.random.default_rng(0).integers(0, table.O, 40).tolist())
    got, want = both(monkeypatch, "embed", lambda: embed(table, tokens, int32(40)).numpy())
    same_bits(got, want, format)


# --- experts

X, C = 16, 4


def router_of(E: int) -> StoredWeight:
    """Float32, in rows."""
    return StoredWeight((RowWeight(place_bytes(numbers(X, E, seed=5).view(np.uint8).reshape(-1), "CUDA"), "F32", X, E),))


def routed_rows(T: int, E: int) -> tuple[Norm, Tensor, Routing]:
    """A norm, x [T, E], and its experts by the kernel."""
    norm, x = Norm("RMS", realized(numbers(E)), 1e-5), realized(numbers(T, E))
    routing = norm_route(x, norm, router_of(E), int32(T), RoutingPolicy(X, C, True))
    Tensor.realize(routing.shares, routing.chosen, *(routing.groups or ()))
    return norm, x, routing


@pytest.mark.parametrize("T", COUNTS)
def test_the_choice_of_experts(monkeypatch, sizes, T):
    """Logits are float32 products, so that experts are those of the reference but for ties of rounding, which these numbers have not."""
    T = min(T, sizes.max_rows)

    def op() -> np.ndarray:
        _, _, routing = routed_rows(T, sizes.E)
        return np.concatenate([routing.shares.numpy(), routing.chosen.numpy().astype(np.float32)], axis=1)

    got, want = both(monkeypatch, "norm_route", op)
    np.testing.assert_allclose(got, want, atol=1e-4)
    monkeypatch.setenv("TINYVLLM_KERNELS", f"norm_route={best_variant('norm_route')}")
    same_bits(op(), got, "once more")


@pytest.mark.parametrize("T", COUNTS[:-1])
@pytest.mark.parametrize("format", FORMATS)
def test_products_by_expert(monkeypatch, sizes, format, T):
    """Up to 40 rows: the reference gathers the matrices of every pair."""
    T, E, F = min(T, sizes.max_rows), sizes.E, sizes.F // 8
    norm, x, routing = routed_rows(T, E)
    first, second, residual = tiled(format, 2 * X * F, E), tiled(format, X * E, F), realized(numbers(T, E, seed=6))
    h = realized(numbers(T * C, F, seed=7))
    got, want = both(monkeypatch, "experts_gate_up_silu", lambda: experts_gate_up_silu(x, norm, first, routing, int32(T), X).numpy())
    np.testing.assert_allclose(got, want, atol=5 * TIPPED[format])
    got, want = both(monkeypatch, "experts_down", lambda: experts_down(h, second, routing, int32(T), X, residual).numpy())
    np.testing.assert_allclose(got, want, atol=4 * TOLERANCE[format])


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_with_any_others(sizes, format):
    """The whole mixture; other rows choose other experts, and more rows have larger tasks."""
    E, F, max_rows = sizes.E, sizes.F // 8, sizes.max_rows
    norm, x, router = Norm("RMS", realized(numbers(E)), 1e-5), numbers(max_rows, E), router_of(E)
    first, second = tiled(format, 2 * X * F, E), tiled(format, X * E, F)

    def bits(start: int, T: int) -> np.ndarray:
        rows = realized(x[start : start + T])
        routing = norm_route(rows, norm, router, int32(T), RoutingPolicy(X, C, True))
        h = experts_gate_up_silu(rows, norm, first, routing, int32(T), X).contiguous()
        return experts_down(h, second, routing, int32(T), X, rows).numpy()

    whole = bits(0, max_rows)
    for T in (*counts(max_rows)[:-1], 2, 9, 17):
        start = 7 * T % (max_rows - T)
        same_bits(bits(start, T), whole[start : start + T], f"{T} rows")
