"""The gated delta rule: the kernel and its reference against float64, and the bits of a sequence alone, in a batch and in pieces."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.in_turn import in_turn
from tests.kernels.delta_rule import gated_delta as expected
from tests.ops.inputs import VARIANTS, by_kernel, int32, numbers, realized
from tinyvllm.batch import Batch, StateCache
from tinyvllm.errors import KernelError
from tinyvllm.ops.delta import DeltaShape, DeltaWeights, gated_delta

SHAPES = [DeltaShape(2, 6, 32, 48, 4), DeltaShape(3, 3, 16, 32, 2), DeltaShape(2, 4, 32, 16, 4, tiled=True)]
EPS = 1e-6
SCRATCH = 6  # the slot of padding


class Layer:
    """Random weights of a layer, and states of seven slots that keep `drafts` drafts."""

    def __init__(self, shape: DeltaShape, drafts: int = 0):
        s = self.shape = shape
        self.numbers = {
            "taps": numbers(s.taps, s.channels, seed=1) * 0.5,
            "decay": -np.exp(numbers(s.value_heads, seed=2) - 2),
            "shift": numbers(s.value_heads, seed=3),
            "norm": numbers(s.value_dim, seed=4),
        }
        self.weights = DeltaWeights(s, *(realized(self.numbers[name].reshape(-1)) for name in ("taps", "decay", "shift", "norm")), EPS)
        self.states = numbers(SCRATCH + 1, s.slot(drafts), seed=5) * 0.3
        self.cache = StateCache(realized(self.states), drafts)

    def state(self, slot: int) -> np.ndarray:
        """The numbers [STATE] of a slot, without what it keeps of drafts."""
        s, states = self.shape, self.cache.states.numpy()[slot]
        rows, matrix = (s.taps - 1) * s.channels, (s.taps - 1 + self.cache.drafts) * s.channels
        return np.concatenate([states[:rows], states[matrix:][: s.state - rows]])

    def step(
        self,
        y: np.ndarray,
        decodes: list[tuple[int, int]],
        chunks: list[tuple[int, int, int]],
        padded: tuple[int, int] = (0, 0),
        copies: dict[int, tuple[int, int]] | None = None,
        sources: dict[int, int] | None = None,
    ) -> np.ndarray:
        """The values of a step with decodes (slot, position) and chunks (slot, position, rows), and as many padded of both; by slot the
        copy (slot, tokens) of its state, and where that is before.
        """
        Bd, used = len(decodes) + padded[0], len(decodes)
        lengths = [rows for *_, rows in chunks]
        starts = [*range(Bd + 1), *(Bd + np.cumsum(lengths, dtype=int)), *[Bd + sum(lengths)] * padded[1]]
        positions = [*(p for _, p in decodes), *[0] * padded[0], *(p + i for _, p, rows in chunks for i in range(rows))]
        T = Bd + sum(lengths) + 2 * padded[1]
        laid = np.full((T, self.shape.width), np.nan, np.float32)
        laid[:used], laid[Bd : Bd + len(y) - used] = y[:used], y[used:]
        slots = [*(s for s, _ in decodes), *[SCRATCH] * padded[0], *(s for s, *_ in chunks), *[SCRATCH] * padded[1]]
        zero = int32(0)
        batch = Batch(
            zero, int32(*positions, *[0] * (T - len(positions))), zero, zero, int32(*starts), zero, zero, int32(used),
            int32(Bd, len(chunks)), zero, zero, 1, Bd, max(lengths, default=1),
            states=realized(np.array([[s, (sources or {}).get(s, s), *(copies or {}).get(s, (SCRATCH, 0))] for s in slots], np.int32)),
        )  # fmt: skip
        # the number of chunks is that of the rows of block tables
        object.__setattr__(batch, "block_tables", realized(np.zeros((Bd + len(chunks) + padded[1], 1), np.int32)))
        out = gated_delta(realized(np.nan_to_num(laid)), self.weights, self.cache, batch).numpy()
        return np.concatenate([out[:used], out[Bd : Bd + sum(lengths)]])


@pytest.mark.parametrize(("shape", "variant"), in_turn(SHAPES, [*VARIANTS, "ref"]))
def test_values_and_states_are_those_of_the_rule(variant, shape, monkeypatch):
    """Two decodes, a chunk that begins its sequence and one that continues, with padding."""
    layer, y = Layer(shape), numbers(2 + 5 + 1 + 3, shape.width, seed=6)
    decodes, chunks = [(4, 9), (0, 0)], [(2, 0, 5), (5, 3, 1), (1, 7, 3)]
    got = by_kernel(monkeypatch, "gated_delta", variant, lambda: layer.step(y, decodes, chunks, padded=(1, 1)))
    states, first = layer.states.astype(np.float64), 0
    for slot, position, rows in [*((s, p, 1) for s, p in decodes), *chunks]:
        before = states[slot] * (position > 0)
        values, states[slot] = expected(shape, y[first : first + rows], before, layer.numbers, EPS)
        np.testing.assert_allclose(got[first : first + rows], values, atol=2e-4)
        first += rows
    after = layer.cache.states.numpy()
    np.testing.assert_allclose(after[:SCRATCH], states[:SCRATCH], atol=1e-4)
    assert (after[3] == layer.states[3]).all(), "no sequence had that slot"


@pytest.mark.parametrize(("shape", "variant"), in_turn(SHAPES, VARIANTS))
def test_a_sequence_has_the_same_bits_in_any_batch_and_in_any_pieces(variant, shape, monkeypatch):
    y, others = numbers(11, shape.width, seed=6), numbers(4, shape.width, seed=7)
    whole, pieces = Layer(shape), Layer(shape)

    def op() -> np.ndarray:
        return whole.step(y, [], [(2, 0, 11)])

    together = by_kernel(monkeypatch, "gated_delta", variant, op)
    parts = [pieces.step(np.concatenate([others[:1], y[:6], others[1:]]), [(0, 5)], [(3, 0, 6), (1, 8, 3)], padded=(1, 0))[1:7]]
    parts += [pieces.step(y[6:7], [(3, 6)], []), pieces.step(y[7:9], [], [(3, 7, 2)])]
    parts += [pieces.step(np.concatenate([others[:1], y[9 + n : 10 + n]]), [(0, 6 + n), (3, 9 + n)], [])[1:] for n in range(2)]
    assert (np.concatenate(parts) == together).all()
    assert (pieces.cache.states.numpy()[3] == whole.cache.states.numpy()[2]).all()


@pytest.mark.parametrize(("shape", "variant"), in_turn(SHAPES, [*VARIANTS, "ref"]))
def test_a_copy_of_the_state_continues_as_the_sequence_does(variant, shape, monkeypatch):
    """Copies in the middle of a chunk, after its first row, after its last, in a decode, and none beyond what the step computes."""
    y, layer = numbers(9, shape.width, seed=6), Layer(shape)

    def op() -> np.ndarray:
        whole = layer.step(y, [], [(2, 0, 9)], copies={2: (4, 5)})
        parts = [layer.step(y[5:8], [], [(0, 5, 3)], sources={0: 4}, copies={0: (5, 8)}), layer.step(y[8:], [(1, 8)], [], sources={1: 5})]
        copied = [layer.cache.states.numpy()]
        layer.step(y[:1], [(0, 0)], [], copies={0: (3, 1)})
        layer.step(y[1:2], [(0, 1)], [], copies={0: (4, 9)})
        layer.step(y[1:5], [], [(5, 1, 4)], sources={5: 3}, copies={5: (3, 2)})
        copied.append(layer.cache.states.numpy())
        close = np.testing.assert_array_equal if variant != "ref" else functools.partial(np.testing.assert_allclose, atol=1e-5)
        close(np.concatenate(parts), whole[5:])
        close(copied[0][1], copied[0][2])
        close(copied[1][3], copied[1][0])
        close(copied[1][4], copied[0][4])
        close(copied[1][5], copied[1][4])
        return whole

    by_kernel(monkeypatch, "gated_delta", variant, op)


@pytest.mark.parametrize(("shape", "variant"), in_turn(SHAPES, [*VARIANTS, "ref"]))
def test_drafts_leave_the_bits_of_a_sequence_without(variant, shape, monkeypatch):
    """Accepted and rejected ones, as many as a slot keeps and fewer, next to other decodes, a chunk and padding; then a copy."""
    y, wrong, whole, layer = numbers(13, shape.width, seed=6), numbers(3, shape.width, seed=7), Layer(shape), Layer(shape, drafts=3)

    def rows(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate(parts)

    def op() -> np.ndarray:
        expected = whole.step(y, [], [(2, 0, 13)])
        other = layer.step(rows(y[:1], y[:4]), [(0, 0)], [(3, 0, 4)])
        run = [(3, 4), (3, 5), (3, 6), (3, 7)]
        parts = [other[1:], layer.step(rows(y[1:2], y[4:7], wrong[:1], y[:2]), [(0, 1), *run], [(5, 0, 2)], padded=(3, 0))[1:4]]
        parts.append(layer.step(rows(y[7:8], wrong[:2], y[2:3]), [*((3, 7 + n) for n in range(3)), (0, 2)], [])[:1])  # 2 were accepted
        parts.append(layer.step(y[8:9], [(3, 8)], []))
        parts.append(layer.step(y[9:11], [(3, 9), (3, 10)], [], copies={3: (1, 10)}))
        parts.append(layer.step(y[11:12], [], [(3, 11, 1)], copies={3: (4, 12)}))
        parts.append(layer.step(rows(y[12:], wrong), [(3, 12 + n) for n in range(4)], [])[:1])
        again = layer.step(rows(y[10:12], wrong[:1]), [(1, 10 + n) for n in range(3)], [])[:2]
        close = np.testing.assert_array_equal if variant != "ref" else functools.partial(np.testing.assert_allclose, atol=2e-5)
        close(rows(*parts), expected)
        close(again, expected[10:12])
        close(layer.step(y[12:], [(4, 12)], []), expected[12:])
        close(layer.state(3), whole.state(2))
        close(layer.state(4), whole.state(2))
        return expected

    by_kernel(monkeypatch, "gated_delta", variant, op)


def test_the_reference_says_how_many_tokens_it_takes(monkeypatch):
    monkeypatch.setenv("TINYVLLM_KERNELS", "gated_delta=ref")
    layer = Layer(SHAPES[0])
    with pytest.raises(KernelError, match="up to 64 tokens of a sequence in a step, not 65"):
        layer.step(numbers(65, SHAPES[0].width), [], [(0, 0, 65)])
