"""Products with a matrix of each head, of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

They are products with experts, each row's head being the one that a router would have chosen: the same kernels compute both.
"""

from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor, dtypes

from tinyvllm.backends.operands import TensorWeight, Weight
from tinyvllm.backends.registry import select
from tinyvllm.ops.facts import product_facts
from tinyvllm.ops.linear import matrices_with_rounding, rounded
from tinyvllm.placement import Placement


def head_products(x: Tensor, weight: Weight, rows: Tensor) -> Tensor:
    """x [T, H, I] float32 times each head's matrix, transposed: float32 [T, H, O].

    weight [H O, I], one head's rows after the other's; `rows` [1] int32 is how many rows of x count, the result's others are undefined.
    """
    T, H, I = (int(d) for d in x.shape)
    O = weight.O // H
    if not isinstance(weight, TensorWeight):
        placement = Placement.of(x.device)
        facts = replace(product_facts(placement, weight, outputs=O), experts=H)
        kernel = select("experts_down", placement, f"{H} heads times {O}x{I} {weight.format}", facts)
        if kernel is not None:
            pairs, count = x.reshape(T * H, I).contiguous(), (rows * H).cast(dtypes.int32).contiguous()
            routing = kernel.backend.list_heads(kernel.variant, T, H, rows)
            y = kernel.backend.experts_down(kernel.variant, pairs, weight, routing, count, H, None)
            return y.reshape(T, H, O)
    ((activations, matrix),) = matrices_with_rounding(weight)
    x = rounded(x.reshape(T * H, I), activations).reshape(T, H, 1, I)
    return (x @ matrix.reshape(1, H, O, I).transpose(2, 3)).reshape(T, H, O).contiguous()
