"""Constants of what families do differently within an op. One that changes nothing is not defined, so that texts stay as they are."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.buffers import constant
from tinyvllm.backends.kernel import Constant


def row_scale(scale: float) -> dict[str, Constant]:
    """Of `embed`: what rows of the table are multiplied by."""
    return {} if scale == 1.0 else {"ROW_SCALE": constant(scale)}


def gate(gelu: bool) -> dict[str, Constant]:
    """Of a gated product: GELU instead of SiLU."""
    return {"GATE_GELU": 1} if gelu else {}


def output_scale(scale: float) -> dict[str, Constant]:
    """Of a product: what its outputs are multiplied by before the residual is added."""
    return {} if scale == 1.0 else {"OUT_SCALE": constant(scale)}


def logits(divisor: float, cap: float) -> dict[str, Constant]:
    """Of `norm_head`: what logits are divided by, and then capped at."""
    return ({} if divisor == 1.0 else {"DIVISOR": constant(divisor)}) | score_cap(cap)


def row_bias(bias: Tensor | None) -> dict[str, Constant]:
    """Of a product: the distance from a row's bias to the next one's, where each row has its own."""
    return {} if bias is None or len(bias.shape) == 1 else {"BIAS_PITCH": int(bias.shape[1])}


def score_cap(cap: float) -> dict[str, Constant]:
    """Of attention: CAP * tanh(score / CAP) before the softmax."""
    return {} if cap == 0.0 else {"CAP": constant(cap)}
