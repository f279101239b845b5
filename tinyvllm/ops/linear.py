"""Matrix products of activations with weights, accumulated in float32."""

from tinygrad import Tensor

from tinyvllm.ops.launch import matmul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]; float32 [..., O] whatever the weight's dtype."""
    y = matmul(x, weight) if _has_loops(x, weight) else x.float() @ weight.float().transpose()
    return y if bias is None else y + bias.float()


def _has_loops(x: Tensor, weight: Tensor) -> bool:
    """Whether launch.matmul's loops fit: the CPU device, two dimensions, sizes that divide."""
    on_cpu = isinstance(x.device, str) and x.device.split(":")[0] == "CPU"
    return on_cpu and x.ndim == 2 and int(x.shape[1]) % 4 == 0 and int(weight.shape[0]) % 4 == 0


def gate_up_silu(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None) -> Tensor:
    """silu(x gate) * (x up), the SwiGLU of Shazeer (2020, arXiv:2002.05202): x [T, E], gate and up [F, E], result [T, F]."""
    return linear(x, gate, gate_bias).silu() * linear(x, up, up_bias)
