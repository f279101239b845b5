"""Matrix products of activations with weights, accumulated in float32.

A weight is a tensor [O, I], several of them whose outputs stand side by side, or panels (weight.py). Whatever holds it, a product with
bfloat16 weights rounds x to bfloat16 first, and one with Q8_0 or Q4_0 weights rounds it to int8 in blocks of 32, each with a scale of its
own: that is what processors multiply, and so it is what a product means here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinyvllm.backends.base import calls_of
from tinyvllm.backends.registry import select
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FORMATS, Activations
from tinyvllm.quant.layouts import BLOCK, PackedWeight, StoredWeight


@dataclass(frozen=True, eq=False)
class TensorWeight:
    """Weights [O_i, I] as plain tensors; their outputs stand side by side."""

    parts: tuple[Tensor, ...]

    @property
    def O(self) -> int:  # noqa: E743  the dimension's letter
        return sum(int(part.shape[0]) for part in self.parts)

    @property
    def I(self) -> int:  # noqa: E743
        return int(self.parts[0].shape[1])


Weight = TensorWeight | PackedWeight | StoredWeight


def linear(
    x: Tensor, weight: Weight, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """x [T, I] float32 times weight [O, I] transposed, plus bias [O], through gelu if asked, plus residual [T, O]; float32 [T, O].

    rows [1] int32 says how many rows of x count; what the others become is not defined.
    """
    if not isinstance(weight, TensorWeight):
        calls = calls_of(str(x.device))
        row = select("matmul", Placement.of(x.device), f"{weight.O}x{weight.I} {weight.format}", calls.refuses_product(weight))
        if row is not None:
            return calls.matmul(row, x, weight, rows, bias, residual, gelu)
    y = product(x, weight)
    y = y if bias is None else y + bias.float()
    y = y.gelu() if gelu else y
    return y if residual is None else y + residual


def product(x: Tensor, weight: Weight) -> Tensor:
    """The reference: x [T, I] float32 times weight transposed, float32 [T, O]."""
    if isinstance(weight, PackedWeight):
        return rounded(x.float(), weight.format) @ weight.dense().contiguous().transpose()
    if isinstance(weight, StoredWeight):  # what reads these multiplies float32
        return x.float() @ weight.dense().contiguous().transpose()
    formats = {dtypes.bfloat16: "BF16"}
    products = [rounded(x.float(), formats.get(part.dtype, "F32")) @ part.float().transpose() for part in weight.parts]
    return products[0] if len(products) == 1 else products[0].cat(*products[1:], dim=1)


def rounded(x: Tensor, format: str) -> Tensor:
    """x [T, I] float32 as products with weights of this format see it, float32."""
    if format == "BF16":
        return x.cast(dtypes.bfloat16).float()
    if FORMATS[format].activations is not Activations.INT8:
        return x
    blocks = x.reshape(int(x.shape[0]), -1, BLOCK)
    largest = blocks.abs().max(2, keepdim=True)
    quants = (blocks * (largest > 1e-36).where(127.0 / largest, 0.0)).round()
    return (quants * (largest / 127.0)).reshape(*x.shape)


def gate_up_silu(x: Tensor, norm: Norm, weight: Weight, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(g) * u of the normalised x, the SwiGLU of Shazeer (2020, arXiv:2002.05202).

    x [T, E] float32; weight [2F, E], the rows of gate and then those of up; bias [2F]; result [T, F] float32. `rows` as for `linear`.
    """
    F = weight.O // 2
    if not isinstance(weight, TensorWeight):
        calls = calls_of(str(x.device))
        row = select("norm_gate_up_silu", Placement.of(x.device), f"{weight.I}->{F} {weight.format}", calls.refuses_gate_up(weight, norm))
        if row is not None:
            return calls.gate_up_silu(row, x, norm, weight, rows, bias)
    y = product(norm(x).contiguous(), weight)
    y = (y if bias is None else y + bias.float()).contiguous()
    return y[:, :F].silu() * y[:, F:]
