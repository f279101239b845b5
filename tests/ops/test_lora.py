"""What adapters add to a product: the kernel and its reference, the bits of rows without an adapter, and of rows in other batches."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tests.ops.inputs import VARIANTS, by_kernel, int32, numbers, packed, realized
from tinyvllm.backends import registry
from tinyvllm.ops.linear import gate_up_silu, linear
from tinyvllm.ops.lora import AdapterStack, lora_bias
from tinyvllm.ops.norm import Norm

I, R = 96, 8
PRODUCTS = [(("BF16", "Q4_0")[i % 2], variant) for i, variant in enumerate(VARIANTS)]
RANKS = (5, 8, 0)  # of three adapters; the last leaves the product as it is
ROWS = (0, 1, 2, 2, 3, 1, 0, 2, 1, 1)  # the adapter of each row


def stack_of(starts: tuple[int, ...], O: int) -> AdapterStack:
    a, b = numbers(3, len(starts), R, I, seed=1), numbers(3, R, O, seed=2)
    for n, rank in enumerate(RANKS):
        a[n, :, rank:] = 0
    return AdapterStack(realized(a), realized(b), int32(*RANKS), starts)


def expected(x: np.ndarray, stack: AdapterStack, bias: np.ndarray | None) -> np.ndarray:
    a, b = stack.a.numpy().astype(np.float64), stack.b.numpy().astype(np.float64)
    out = np.zeros((len(x), b.shape[2])) + (0 if bias is None else bias)
    ends = [*stack.starts[1:], b.shape[2]]
    for t, n in enumerate(ROWS):
        for p, (start, end) in enumerate(zip(stack.starts, ends)):
            if n:
                rank = RANKS[n - 1]
                out[t, start:end] += (a[n - 1, p, :rank] @ x[t]) @ b[n - 1, :rank, start:end]
    return out


@pytest.mark.parametrize("variant", [*VARIANTS, "ref"])
@pytest.mark.parametrize(("starts", "O"), [((0,), 288), ((0, 32), 64), ((0, 48, 64, 80), 96)])
@pytest.mark.parametrize("biased", [False, True])
def test_each_row_gets_what_its_adapter_adds(variant, starts, O, biased, monkeypatch):
    x, norm = numbers(len(ROWS), I), None if len(starts) == 1 else Norm("RMS", realized(numbers(I, seed=3)), 1e-5)
    bias, stack = numbers(O, seed=4) if biased else None, stack_of(starts, O)
    tensors = realized(x), None if bias is None else realized(bias), int32(*ROWS), int32(len(ROWS))

    def op() -> np.ndarray:
        return lora_bias(tensors[0], norm, stack, *tensors[1:]).numpy()

    got = by_kernel(monkeypatch, "lora_bias", variant, op)
    normed = x if norm is None else norm(Tensor(x)).numpy()
    np.testing.assert_allclose(got, expected(normed, stack, bias), atol=2e-4)
    alone = np.array([n in (0, 3) for n in ROWS])
    neutral = np.full(O, -0.0, np.float32) if bias is None else bias
    assert (got[alone].view(np.int32) == neutral.view(np.int32)).all(), "-0, which changes no bit of a sum"


def test_projections_that_share_sixteen_outputs_have_no_kernel():
    stack, x = stack_of((0, 40, 44), 48), numbers(len(ROWS), I)
    registry.forget_choices()
    got = lora_bias(realized(x), None, stack, None, int32(*ROWS), int32(len(ROWS))).numpy()
    (choice,) = registry.choices()
    assert choice.variant == "ref" and "outputs in multiples of 16; the model has 40" in choice.why
    np.testing.assert_allclose(got, expected(x, stack, None), atol=2e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_any_batch(variant, monkeypatch):
    stack, x = stack_of((0, 64, 80), 96), numbers(len(ROWS), I)
    norm = Norm("RMS", realized(numbers(I, seed=3)), 1e-5)

    def op(rows: list[int]) -> np.ndarray:
        own = [ROWS[t] for t in rows]
        return lora_bias(realized(x[rows]), norm, stack, None, int32(*own), int32(len(rows))).numpy()

    together = by_kernel(monkeypatch, "lora_bias", variant, lambda: op(list(range(len(ROWS)))))
    for t in range(len(ROWS)):
        assert (op([t]) == together[t]).all()
    order = np.random.default_rng(0).permutation(len(ROWS)).tolist()
    assert (op(order) == together[order]).all()


@pytest.mark.parametrize(("format", "variant"), PRODUCTS)
def test_products_take_a_bias_of_each_row(format, variant, monkeypatch):
    """The sum of the product and each row's own bias; -0 leaves the bits of a product without bias."""
    T, O = 21, 64
    weight = packed(format, O, 256, seed=5)
    x, bias, rows = numbers(T, 256, seed=6), numbers(T, O, seed=7), int32(T)
    bias[::2] = -0.0

    def product(own: np.ndarray | None) -> np.ndarray:
        def op() -> np.ndarray:
            return linear(realized(x), weight, rows, None if own is None else realized(own), realized(numbers(T, O, seed=8))).numpy()

        return by_kernel(monkeypatch, "matmul", variant, op)

    plain, biased = product(None), product(bias)
    assert (plain[::2] == biased[::2]).all()
    np.testing.assert_allclose(biased, plain + bias, atol=1e-5)


@pytest.mark.parametrize(("format", "variant"), PRODUCTS)
def test_gates_take_a_bias_of_each_row(format, variant, monkeypatch):
    T, F = 21, 48
    weight, norm = packed(format, 2 * F, 256, seed=5), Norm("RMS", realized(numbers(256, seed=3)), 1e-5)
    x, bias, rows = numbers(T, 256, seed=6), numbers(T, 2 * F, seed=7), int32(T)
    bias[::2] = -0.0

    def gates(own: np.ndarray | None) -> np.ndarray:
        def op() -> np.ndarray:
            return gate_up_silu(realized(x), norm, weight, rows, None if own is None else realized(own)).numpy()

        return by_kernel(monkeypatch, "norm_gate_up_silu", variant, op)

    plain, biased = gates(None), gates(bias)
    assert (plain[::2] == biased[::2]).all()
    for t in (1, 19):
        assert (biased[t] == gates(bias[t])[t]).all(), "as a bias of all rows"
