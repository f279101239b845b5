"""Matrix products of activations with weights, accumulated in float32."""

from tinygrad import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]; float32 [..., O] whatever the weight's dtype."""
    y = x.float() @ weight.float().transpose()
    return y if bias is None else y + bias.float()


def gate_up_silu(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None) -> Tensor:
    """silu(x gate) * (x up), the SwiGLU of Shazeer (2020, arXiv:2002.05202): x [T, E], gate and up [F, E], result [T, F]."""
    return linear(x, gate, gate_bias).silu() * linear(x, up, up_bias)
