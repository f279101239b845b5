"""A mixture's experts, low-rank adapters and recurrent states on a GPU, op by op, with random operands: the part `experts` of gpu.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tinygrad import Device, Tensor

from benchmarks.gpu_figures import attempt, bandwidth_of, computing, effort, emit, start
from benchmarks.gpu_ops import Op, bytes_of, chunk, decodes, floats, int32, kernel_weight, on_device, seconds_of
from tinyvllm.backends.operands import AdapterStack, DeltaShape, DeltaWeights
from tinyvllm.batch import StateCache
from tinyvllm.ops.delta import gated_delta
from tinyvllm.ops.experts import Routing, RoutingPolicy, experts_down, experts_gate_up_silu, norm_route
from tinyvllm.ops.lora import lora_bias
from tinyvllm.ops.norm import Norm
from tinyvllm.quant.layouts import RowWeight, StoredWeight
from tinyvllm.weights.memory import place_bytes

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_K")
RANK, ADAPTERS = 16, 4


@dataclass(frozen=True)
class Mixture:
    """A layer of X experts [F, E], of which each row has C."""

    E: int
    F: int
    X: int
    C: int

    @property
    def policy(self) -> RoutingPolicy:
        return RoutingPolicy(self.X, self.C, renormalize=True)

    def used(self, T: int) -> float:
        """How many experts T rows have in the mean, each row with C that are drawn without preference."""
        return self.X * (1 - (1 - self.C / self.X) ** T)


QWEN3_30B_A3B, TOY = Mixture(2048, 768, 128, 8), Mixture(256, 256, 4, 2)
QWEN3_5_27B, TOY_RULE = DeltaShape(16, 48, 128, 128, 4), DeltaShape(2, 4, 32, 32, 4)


class MixtureWeights:
    """Those of one layer, with experts in one format."""

    def __init__(self, m: Mixture, format: str):
        numbers = np.random.default_rng(0).standard_normal((m.X, m.E), np.float32)
        router = RowWeight(place_bytes(numbers.view(np.uint8), Device.DEFAULT), "F32", m.X, m.E)
        self.format, self.router = format, StoredWeight((router,))
        self.gate_up, self.down = kernel_weight(format, (m.X * m.F, m.X * m.F), m.E), kernel_weight(format, (m.X * m.E,), m.F)


def mixture_ops(m: Mixture, weights: MixtureWeights, T: int) -> list[Op]:
    """The three ops of the layer for T rows. Bytes are those of the matrices of `used` experts; every set of operands has rows of its own,
    and so other experts.
    """
    rows, norm, chance = int32([T]), Norm("RMS", floats(m.E), 1e-6), np.random.default_rng(T)

    def routing() -> tuple[Tensor, Routing]:
        x = on_device(chance.standard_normal((T, m.E), np.float32))
        routing = norm_route(x, norm, weights.router, rows, m.policy)
        groups = () if routing.groups is None else routing.groups
        Tensor.realize(routing.shares, routing.chosen, *groups)
        return x, routing

    def route(kernel: bool) -> Callable[[], Tensor]:
        x = on_device(chance.standard_normal((T, m.E), np.float32))
        return lambda: norm_route(x, norm, weights.router, rows, m.policy).shares

    def gated(kernel: bool) -> Callable[[], Tensor]:
        x, own = routing()
        return lambda: experts_gate_up_silu(x, norm, weights.gate_up, own, rows, m.X)

    def summed(kernel: bool) -> Callable[[], Tensor]:
        (residual, own), h = routing(), floats(T * m.C, m.F)
        return lambda: experts_down(h, weights.down, own, rows, m.X, residual)

    each, pairs = round(m.used(T)) * bytes_of(weights.format, m.F, m.E), T * m.C
    return [
        Op("norm_route", "norm_route", route, 4 * m.X * m.E, 2 * T * m.X * m.E),
        Op("experts_gate_up_silu", "experts_gate_up_silu", gated, 2 * each, 4 * pairs * m.F * m.E),
        Op("experts_down", "experts_down", summed, each, 2 * pairs * m.F * m.E),
    ]


def adapter_op(E: int, O: int, T: int) -> Op:
    """What adapters add to a product [O, E] of T rows, each of the first ADAPTERS rows with another one, as the others in turn."""
    rows, norm, x = int32([T]), Norm("RMS", floats(E), 1e-6), floats(T, E)
    adapters = int32([1 + t % ADAPTERS for t in range(T)])

    def make(kernel: bool) -> Callable[[], Tensor]:
        stack = AdapterStack(floats(ADAPTERS, 1, RANK, E), floats(ADAPTERS, RANK, O), int32([RANK] * ADAPTERS), (0,))
        return lambda: lora_bias(x, norm, stack, None, adapters, rows)

    numbers = min(T, ADAPTERS) * RANK * (E + O)
    return Op(f"lora_bias {E}->{O}, {ADAPTERS} adapters of rank {RANK}", "lora_bias", make, 4 * numbers, 2 * T * RANK * (E + O))


def gated_delta_op(s: DeltaShape, rows: int, sequences: int, drafts: int = 0) -> Op:
    """Decodes of `sequences`, or one sequence of `rows`; or a decode with `drafts`, when the last step has accepted none. Bytes
    are those of the states, once read and once written.
    """
    T = max(rows, sequences) + drafts
    batch, y = chunk(T) if rows > 1 else decodes(T, 2), floats(T, s.width)
    batch = replace(batch, states=int32([[b, b, sequences, 0] for b in ([0] * T if drafts else range(sequences))]))
    weights = DeltaWeights(
        s, floats(s.taps * s.channels), on_device(-np.ones(s.value_heads, np.float32)), floats(s.value_heads), floats(s.value_dim), 1e-6
    )

    def make(kernel: bool) -> Callable[[], Tensor]:
        states = floats(sequences + 1, s.slot(drafts))
        cache = StateCache(states, drafts)
        return lambda: gated_delta(y, weights, cache, batch)

    held = s.value_heads * s.key_dim * s.value_dim
    name = f"gated_delta, {sequences} x {T // sequences}" if not drafts else f"gated_delta, 1 x 1 and {drafts} drafts"
    return Op(name, "gated_delta", make, 8 * sequences * held, 8 * T * held)


def experts(o: argparse.Namespace) -> None:
    """The ops of a layer of Qwen3-30B-A3B's experts by format and rows, an adapter's product, and the recurrence of a layer of Qwen3.5 27B:
    shares of the roof that bounds few rows, and of that of many.
    """
    start(o)
    m, E, O = (TOY, 64, 64) if o.tiny else (QWEN3_30B_A3B, 4096, 6144)
    counts = (1, 3) if o.tiny else (1, 16, 512)

    def timed(op: Op, name: str) -> None:
        seconds, bandwidth, compute = seconds_of(op, effort(o)), bandwidth_of(o), computing(o)
        more = {"us": round(1e6 * seconds, 2), "TFLOPs": round(op.flops / seconds / 1e12, 2)}
        if compute:
            more["compute_share"] = round(op.flops / seconds / 1e12 / compute, 4)
        emit(o, name, op.bytes / seconds / 1e9, "GB/s", o.machine.roof_name, bandwidth and bandwidth / 1e9, **more)

    def mixture(format: str) -> None:
        weights = MixtureWeights(m, format)
        for T in counts:
            for op in mixture_ops(m, weights, T):
                if op.stem != "norm_route":
                    timed(op, f"{op.name} {format}, {T} rows")
                elif format == FORMATS[0]:
                    timed(op, f"{op.name}, {T} rows")

    def adapters(T: int) -> None:
        op = adapter_op(E, O, T)
        timed(op, f"{op.name}, {T} rows")

    for format in FORMATS:
        attempt(o, mixture, format)

    def recurrence(rows: int, sequences: int, drafts: int = 0) -> None:
        op = gated_delta_op(TOY_RULE if o.tiny else QWEN3_5_27B, rows, sequences, drafts)
        timed(op, op.name)

    for T in counts:
        attempt(o, adapters, T)
    for sizes in ((1, 1), (1, counts[1]), (counts[-1], 1), (1, 1, 4)):
        attempt(o, recurrence, *sizes)
