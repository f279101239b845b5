"""The matrices of a product, each of which has a place and a format of its own."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.policies import bias_pitch
from tinyvllm.bridge import spans
from tinyvllm.quant.layouts import StoredWeight

HALVES = ("GATE", "UP")  # of norm_gate_up_silu, where their weights have two formats


def each_bias(bias: Tensor | None, weight: StoredWeight) -> list[Tensor]:
    """The parts of a joined bias, one for each matrix; of the biases of rows all of them, of which each kernel takes its part."""
    if bias is None:
        return []
    if bias_pitch(bias):
        return [bias] * len(weight.parts)
    starts = [sum(part.O for part in weight.parts[:i]) for i in range(len(weight.parts))]
    return spans(bias, [(start, part.O) for start, part in zip(starts, weight.parts, strict=True)])


def halves(weight: StoredWeight, biases: list[Tensor]) -> list[tuple[str, StoredWeight, list[Tensor]]]:
    """The launches of gate and up, HALF with matrices and biases: one, or, as none reads weights in two formats, two."""
    if weight.format == weight.parts[0].format:
        return [("BOTH", weight, biases)]
    parts = zip(HALVES, weight.parts, strict=True)
    return [(half, StoredWeight((part,)), biases[i : i + 1]) for i, (half, part) in enumerate(parts)]


def tensors_of(weight: StoredWeight) -> list[Tensor]:
    return [part.tensor for part in weight.parts]
