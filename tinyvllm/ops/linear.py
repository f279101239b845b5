"""Matrix products of activations with weights, accumulated in float32.

A weight is a tensor [O, I], several of them whose outputs are concatenated, panels, tiles or rows of a file (quant/layouts). In whatever
layout, a product with bfloat16 weights in panels or tiles rounds x to bfloat16 first, and one with Q8_0 or Q4_0 weights rounds it to int8
in blocks of 32, each with a scale of its own (`Activations` in quant/formats.py): that is what processors multiply, and therefore what a
product means here. Products with rows of a file multiply float32.
"""

from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor, dtypes

from tinyvllm.backends.operands import TensorWeight, Weight, matrices_of, packed_parts
from tinyvllm.backends.registry import select
from tinyvllm.errors import KernelError
from tinyvllm.ops.facts import product_facts
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FORMATS, Activations
from tinyvllm.quant.layouts import BLOCK, PackedWeight, StoredWeight
from tinyvllm.quant.slices import ColumnShare

__all__ = [
    "TensorWeight",
    "Weight",
    "add_output",
    "gate_up_silu",
    "linear",
    "product",
    "products",
    "rounded",
]


def linear(
    x: Tensor,
    weight: Weight,
    rows: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gelu: bool = False,
    norm: Norm | None = None,
    scale: float = 1.0,
) -> Tensor:
    """x [T, I] float32 times weight [O, I] transposed, plus bias [O] or that of each row [T, O], through gelu if `gelu`, through `norm`,
    times `scale`, plus residual [T, O]; float32 [T, O].

    rows [1] int32 is how many rows of x count; the result's other rows are undefined.
    """
    if isinstance(weight, PackedWeight) and isinstance(weight.share, ColumnShare):
        return _reduced(x, weight, weight.share, rows, bias, residual, gelu, norm, scale)
    if not isinstance(weight, TensorWeight):
        placement, shape = Placement.of(x.device), f"{weight.O}x{weight.I} {weight.format}"
        facts = product_facts(placement, weight)
        if norm is not None or scale != 1.0:
            after = replace(facts, output_norm=norm is not None, output_scale=scale != 1.0)
            kernel = select("matmul", placement, f"{shape}{' normed' * after.output_norm}{' scaled' * after.output_scale}", after)
            if kernel is None:  # the product alone by its kernel
                return add_output(residual, linear(x, weight, rows, bias, None, gelu), norm, scale)
            return kernel.backend.matmul(kernel.variant, x, weight, rows, bias, residual, gelu, norm, scale)
        kernel = select("matmul", placement, shape, facts)
        if kernel is not None:
            return kernel.backend.matmul(kernel.variant, x, weight, rows, bias, residual, gelu, None, 1.0)
    y = product(x, weight)
    y = y if bias is None else y + bias.float()
    return add_output(residual, y.gelu() if gelu else y, norm, scale)


def _reduced(
    x: Tensor, weight: PackedWeight, share: ColumnShare, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool,
    norm: Norm | None, scale: float,
) -> Tensor:  # fmt: skip
    """`linear` of all ranks, each of which has some of the columns of x and of the weight."""
    placement = Placement.of(x.device)
    facts = product_facts(placement, weight)
    kernel = select("matmul", placement, f"{weight.O}x{share.columns} {weight.format} of a rank", facts)
    if kernel is None or gelu:
        raise KernelError("tensor parallelism: no kernel adds the parts of a divided product; leave TINYVLLM_KERNELS out")
    part = kernel.backend.matmul(kernel.variant, x, weight, rows, None, None, False, None, 1.0)
    after = replace(facts, output_norm=norm is not None, output_scale=scale != 1.0)
    if kernel.backend.unsupported("matmul", after) is not None:  # as it has no norm of outputs in products
        return add_output(residual, kernel.backend.all_reduce(kernel.variant, part, share.group, rows, bias, None), norm, scale)
    return kernel.backend.all_reduce(kernel.variant, part, share.group, rows, bias, residual, norm, scale)


def add_output(residual: Tensor | None, y: Tensor, norm: Norm | None, scale: float) -> Tensor:
    """residual + scale * norm(y), float32 [T, O]: how an output joins the residual stream."""
    y = y if norm is None else norm(y.contiguous())
    y = y if scale == 1.0 else y * scale
    return y if residual is None else y + residual


def product(x: Tensor, weight: Weight) -> Tensor:
    """The reference: x [T, I] float32 times weight transposed, float32 [T, O]."""
    products = [rounded(x.float(), activations) @ matrix.transpose() for activations, matrix in matrices_with_rounding(weight)]
    return products[0] if len(products) == 1 else products[0].cat(*products[1:], dim=1)


def matrices_with_rounding(weight: Weight) -> list[tuple[Activations, Tensor]]:
    """The matrices of which a weight consists, float32 [O_i, I], each with how x is rounded for it."""
    if isinstance(weight, StoredWeight):
        return [(Activations.FLOAT32, weight.dense().contiguous())]
    if isinstance(weight, TensorWeight):
        kinds = {dtypes.bfloat16: Activations.BFLOAT16}
        return [(kinds.get(part.dtype, Activations.FLOAT32), part.float()) for part in weight.parts]
    return [(FORMATS[part.format].activations, part.dense().contiguous()) for part in packed_parts(weight)]


def rounded(x: Tensor, activations: Activations) -> Tensor:
    """x [T, I] float32, rounded as products multiply it; float32."""
    if activations is Activations.BFLOAT16:
        return x.cast(dtypes.bfloat16).float()
    if activations is Activations.FLOAT32:
        return x
    blocks = x.reshape(int(x.shape[0]), -1, BLOCK)
    largest = blocks.abs().max(2, keepdim=True)
    quants = (blocks * (largest > 1e-36).where(127.0 / largest, 0.0)).round()
    return (quants * (largest / 127.0)).reshape(*x.shape)


def gate_up_silu(x: Tensor, norm: Norm | None, weight: Weight, rows: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """silu(g) * u of the normalised x, the SwiGLU of Shazeer (2020, arXiv:2002.05202); with `gelu` gelu(g) * u.

    x [T, E] float32, not normalised if `norm` is None; weight [2F, E], the rows of gate and then those of up; bias [2F], or
    [T, 2F] of each row; result [T, F] float32. `rows` as for `linear`.
    """
    F, by_kernels = weight.O // 2, gelu or norm is None
    if not isinstance(weight, TensorWeight):
        placement = Placement.of(x.device)
        shape, facts = f"{weight.I}->{F} {weight.format}{' gelu' * gelu}", product_facts(placement, weight, norm, outputs=F)
        facts = replace(facts, gelu=gelu)
        kernel = select("norm_gate_up_silu", placement, shape, facts)
        if kernel is not None:
            return kernel.backend.gate_up_silu(kernel.variant, x, norm, weight, rows, bias, gelu)
    y = products(x if norm is None else norm(x).contiguous(), weight, rows, bias, by_kernels)
    g, u = y[:, :F], y[:, F:]
    return (g.gelu() if gelu else g.silu()) * u


def products(x: Tensor, weight: Weight, rows: Tensor, bias: Tensor | None, by_kernels: bool) -> Tensor:
    """x times weight, plus bias, float32 [T, O], contiguous: where an op's own kernel does not have a family's policy, each matrix by the
    kernel of `linear`, else by the reference.
    """
    if not by_kernels or isinstance(weight, TensorWeight):
        y = product(x, weight)
        return (y if bias is None else y + bias.float()).contiguous()
    parts, done = matrices_of(weight), 0
    outputs = []
    for part in parts:
        own = None if bias is None else bias[..., done : done + part.O].contiguous()
        outputs.append(linear(x, part, rows, own))
        done += part.O
    return (outputs[0] if len(outputs) == 1 else outputs[0].cat(*outputs[1:], dim=1)).contiguous()
