"""The GPUs' kernels of the gated delta rule, in the emulator, against float64 and the CPU's kernel: gated_delta and delta_norm."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels import delta_rule
from tests.kernels.calling import aligned, call
from tests.kernels.cuda.tiles import laid, numbers, one, same_bits, untouched
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.operands import DeltaShape
from tinyvllm.backends.recurrent import plan

VARIANTS = {"cuda": "sm_80", "metal": "apple7"}
EPS, SCRATCH = 1e-6, 6  # SCRATCH: the slot of padding
SHAPES = [  # a head's columns in blocks of 16 and of 32; keys in a lane's four, eight, and 64; one key head for three value heads
    DeltaShape(2, 6, 32, 48, 4),
    DeltaShape(3, 3, 16, 64, 2),
    DeltaShape(1, 2, 256, 32, 4),
    DeltaShape(2, 4, 48, 16, 4, tiled=True),
]
Chunk = tuple[int, int, int]  # slot, position of the first row, rows
Slots = tuple[int, int, int]  # the slot before the step, that of a copy, and after how many tokens it is made


class Layer:
    """Random weights, states of seven slots that keep `drafts` drafts, and the launches of a step."""

    def __init__(self, backend: str, shape: DeltaShape, drafts: int = 0) -> None:
        s = shape
        self.shape, self.backend, self.drafts = shape, backend, drafts
        self.taps, self.norm = numbers(s.taps, s.channels, seed=1) * 0.5, numbers(s.value_dim, seed=4)
        self.decay, self.shift = laid(-np.exp(numbers(s.value_heads, seed=2) - 2)), numbers(s.value_heads, seed=3)
        self.states = numbers(SCRATCH + 1, s.slot(drafts), seed=5) * np.float32(0.3)
        self.before = self.states.copy()

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {"taps": self.taps.reshape(-1), "decay": self.decay, "shift": self.shift, "norm": self.norm}

    def step(
        self, y: np.ndarray, decodes: list[Chunk], chunks: list[Chunk], slots: dict[int, Slots] | None = None, seed: int = 0
    ) -> np.ndarray:
        """float32 rows of decodes and chunks, with a padded sequence after the decodes and after the chunks, and a padded row at the end.

        `slots`: by slot another one before the step, that of a copy, and after how many tokens it is made.
        """
        s, used, sequences = self.shape, len(decodes), [*decodes, (SCRATCH, 0, 1), *chunks, (SCRATCH, 0, 0)]
        starts = np.cumsum([0, *(rows for *_, rows in sequences)])
        T = int(starts[-1]) + 1
        laid_y, positions = np.full((T, s.width), np.nan, np.float32), np.zeros(T, np.int32)
        counted = [t for t in range(T - 1) if t != used]
        laid_y[counted] = y
        for (_, position, rows), start in zip(sequences, starts, strict=False):
            positions[start : start + rows] = range(position, position + rows)
        named = [(slot, *(slots or {}).get(slot, (slot, SCRATCH, 0))) for slot, *_ in sequences]
        out, self.states = aligned((T, s.values), np.float32), laid(self.states)
        rows = [laid(np.array(named, np.int32)), laid(positions), laid(starts.astype(np.int32)), one(used)]
        rows.append(laid(np.array([used + 1, len(chunks)], np.int32)))
        (self._on_the_cpu if self.backend == "cpu" else self._on_a_gpu)(out, laid(laid_y), rows, seed)
        assert untouched(np.delete(out, counted, axis=0))
        return out[counted]

    def _on_a_gpu(self, out: np.ndarray, y: np.ndarray, rows: list[np.ndarray], seed: int) -> None:
        B = len(rows[0])
        rule, norm = plan(self.backend, VARIANTS[self.backend], self.shape, len(y), B, f"{EPS}f", self.drafts)
        taken = [aligned((B,), np.int32)] if self.drafts else []
        emulate(rule, out, self.states, *taken, y, laid(self.taps), self.decay, self.shift, *rows, seed=seed)
        emulate(norm, out, self.states, y, self.norm, *taken, *rows, seed=seed)

    def _on_the_cpu(self, out: np.ndarray, y: np.ndarray, rows: list[np.ndarray], seed: int) -> None:
        s = self.shape
        sizes = dict(KH=s.key_heads, VH=s.value_heads, DK=s.key_dim, DV=s.value_dim, TAPS=s.taps, TILED=int(s.tiled), EPS=EPS)
        scratch = aligned((len(y), s.channels + 2 * s.value_heads + s.key_heads), np.float32)
        ins = [y, laid(self.taps), self.decay, self.shift, self.norm, *rows]
        call(Kernel("gated_delta", "cpu", "plain", (*sizes.items(), ("DRAFTS", self.drafts)), 3, 10), out, scratch, self.states, *ins)

    def state(self, slot: int) -> np.ndarray:
        """The numbers [STATE] of a slot, without what it keeps of drafts."""
        s = self.shape
        rows, matrix = (s.taps - 1) * s.channels, (s.taps - 1 + self.drafts) * s.channels
        return np.concatenate([self.states[slot, :rows], self.states[slot, matrix:][: s.state - rows]])


@pytest.mark.parametrize("backend", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_states_are_those_of_the_rule(backend: str, shape: DeltaShape) -> None:
    """Two decodes, of which one begins its sequence; a chunk of more rows than are convolved at a time; one that continues from
    another slot and is copied in its middle."""
    layer, y = Layer(backend, shape), numbers(2 + 9 + 4, shape.width, seed=6)
    decodes, chunks = [(4, 9, 1), (0, 0, 1)], [(2, 0, 9), (5, 7, 4)]
    got = layer.step(y, decodes, chunks, {5: (1, 3, 9)}, seed=len(shape.__dict__))
    states, first = layer.before.astype(np.float64), 0
    for slot, position, rows in [*decodes, *chunks]:
        source = states[1 if slot == 5 else slot] * (position > 0)
        if slot == 5:
            states[3] = delta_rule.gated_delta(shape, y[first : first + 2], source, layer.weights, EPS)[1]
        values, states[slot] = delta_rule.gated_delta(shape, y[first : first + rows], source, layer.weights, EPS)
        np.testing.assert_allclose(got[first : first + rows], values, atol=2e-4)
        first += rows
    np.testing.assert_allclose(layer.states[:SCRATCH], states[:SCRATCH], atol=1e-4)
    same_bits(layer.states[[1, SCRATCH]], layer.before[[1, SCRATCH]])  # read, or of padding


@pytest.mark.parametrize("backend", VARIANTS)
def test_a_sequence_has_the_same_bits_in_any_batch_and_in_any_pieces(backend: str) -> None:
    shape = SHAPES[0]
    y, others = numbers(19, shape.width, seed=6), numbers(3, shape.width, seed=7)
    whole, pieces = Layer(backend, shape), Layer(backend, shape)
    together = whole.step(y, [], [(2, 0, 19)])
    parts = [pieces.step(np.concatenate([others[:1], y[:10], others[1:]]), [(0, 5, 1)], [(3, 0, 10), (1, 8, 2)], seed=1)[1:11]]
    parts += [pieces.step(y[10:11], [(3, 10, 1)], [], seed=2)]
    parts += [pieces.step(np.concatenate([others[:2], y[11:18]]), [], [(0, 6, 2), (3, 11, 7)], {3: (3, 5, 18)}, seed=3)[2:]]
    parts += [pieces.step(np.concatenate([others[:1], y[18:]]), [(0, 8, 1), (4, 18, 1)], [], {4: (5, SCRATCH, 0)}, seed=4)[1:]]
    same_bits(np.concatenate(parts), together)
    same_bits(pieces.states[4], whole.states[2])


@pytest.mark.parametrize(("backend", "shape"), [("cuda", SHAPES[0]), ("metal", SHAPES[0]), ("cuda", SHAPES[3]), ("metal", SHAPES[1])])
def test_drafts_leave_the_bits_of_a_sequence_without(backend: str, shape: DeltaShape) -> None:
    """Accepted and rejected ones, as many as a slot keeps and fewer, next to decodes, chunks and padding; copies, one of a sequence that
    takes drafts. A slot holds what it holds on the CPU.
    """
    y, wrong, whole = numbers(13, shape.width, seed=6), numbers(3, shape.width, seed=7), Layer(backend, shape)
    layer, other = Layer(backend, shape, 3), Layer("cpu", shape, 3)
    expected = whole.step(y, [], [(2, 0, 13)])

    def step(rows: list[np.ndarray], decodes: list[Chunk], chunks: list[Chunk], slots: dict[int, Slots] | None = None) -> np.ndarray:
        given = np.concatenate(rows)
        out, same = layer.step(given, decodes, chunks, slots, seed=len(given)), other.step(given, decodes, chunks, slots)
        np.testing.assert_allclose(out, same, atol=2e-4)
        np.testing.assert_allclose(layer.states, other.states, atol=1e-4)
        return out

    def run(slot: int, first: int, count: int) -> list[Chunk]:
        return [(slot, first + n, 1) for n in range(count)]

    parts = [step([y[:1], y[:4]], [(0, 0, 1)], [(3, 0, 4)])[1:]]
    parts += [step([y[1:2], y[4:7], wrong[:1], y[:2]], [(0, 1, 1), *run(3, 4, 4)], [(5, 0, 2)])[1:4]]
    parts += [step([y[7:8], wrong[:2], y[2:3]], [*run(3, 7, 3), (0, 2, 1)], [])[:1]]  # after two accepted drafts
    parts += [step([y[8:9]], [(3, 8, 1)], [])]
    parts += [step([y[9:11]], run(3, 9, 2), [], {3: (3, 1, 10)})]
    parts += [step([y[11:12]], [], [(3, 11, 1)], {3: (3, 4, 12)})]
    parts += [step([y[12:], wrong], run(3, 12, 4), [])[:1]]
    same_bits(np.concatenate(parts), expected)
    same_bits(step([y[10:12], wrong[:1]], run(1, 10, 3), [])[:2], expected[10:12])
    same_bits(step([y[12:]], [(5, 12, 1)], [], {5: (4, SCRATCH, 0)}), expected[12:])
    for slot in (3, 5):
        same_bits(layer.state(slot), whole.state(2))
