"""Low-rank adapters (LoRA, Hu et al., 2021, arXiv:2106.09685): what they add to a product, as a bias of each row.

A product of a layer is y = x W^T + bias; an adapter adds scale * (x A^T) B^T. That sum needs nothing of the product, so it comes first, and
enters the product where a bias does: before an activation, a norm, a rotation or the residual. A row without an adapter gets the bias that
the product has, or -0 where it has none: y + -0 has the bits of y, also where y is -0.
"""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import AdapterStack
from tinyvllm.backends.registry import select
from tinyvllm.errors import KernelError
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement

__all__ = ["AdapterStack", "lora_bias", "pair_biases"]


def lora_bias(x: Tensor, norm: Norm | None, stack: AdapterStack, bias: Tensor | None, adapters: Tensor, rows: Tensor) -> Tensor:
    """The bias of each row, float32 [T, O]: `bias` [O] and what the row's adapter makes of the normed x.

    x [T, I] float32, not normed if `norm` is None; adapters int32 [T], n for adapter n - 1 of the stack and 0 for none. `rows` as for
    `linear`.
    """
    placement = Placement.of(x.device)
    (N, P, R, I), O = (int(d) for d in stack.a.shape), int(stack.b.shape[2])
    ends = [*stack.starts[1:], O]
    widths = [end - start for start, end in zip(stack.starts, ends, strict=True)]
    odd = next((width for width in widths if width % 16), O)  # kernels have no sixteen outputs of two projections
    facts = ShapeFacts(placement, inputs=I, outputs=odd, norm="" if norm is None else norm.kind)
    kernel = select("lora_bias", placement, f"{N} adapters of {I}->{O}, ranks up to {R}", facts)
    if kernel is not None:
        return kernel.backend.lora_bias(kernel.variant, x, norm, stack, bias, adapters, rows)
    if stack.share is not None:
        raise KernelError("tensor parallelism: no kernel adds the parts of an adapter's sums; leave TINYVLLM_KERNELS out")
    T, x = int(x.shape[0]), (x.float() if norm is None else norm(x)).contiguous()
    numbers = Tensor.arange(1, N + 1, device=x.device).reshape(1, N)
    changes = (adapters.unsqueeze(1) == numbers) & (stack.ranks.unsqueeze(0) > 0)
    hidden = (x @ stack.a.reshape(N * P * R, I).transpose()).reshape(T, N, P, R)
    hidden = changes.reshape(T, N, 1, 1).where(hidden, 0.0).contiguous()
    parts = [hidden[:, :, p].reshape(T, N * R) @ stack.b[:, :, stack.starts[p] : ends[p]].reshape(N * R, -1) for p in range(P)]
    added = parts[0] if P == 1 else parts[0].cat(*parts[1:], dim=1)
    own = added if bias is None else added + bias.float()
    return changes.any(1, keepdim=True).where(own, -0.0 if bias is None else bias.float()).contiguous()


def pair_biases(x: Tensor, norm: Norm | None, stack: AdapterStack, chosen: Tensor, adapters: Tensor, rows: Tensor, matrices: int) -> Tensor:
    """What adapters add to products with some of several matrices, a row's experts or heads: float32 [T, C, O], -0 for rows without one.

    x [T, I], or [T, C, I] of pairs; `chosen` [T, C] int32 are the numbers of each row's matrices. Of M `matrices` the stack has entry
    n M + m for adapter n and matrix m. The others as in `lora_bias`, whose order of arithmetic a pair has.
    """
    T, C = (int(d) for d in chosen.shape)
    own = adapters.reshape(T, 1)
    numbers = (own > 0).where((own - 1) * matrices + chosen + 1, 0).cast(dtypes.int32).reshape(T * C).contiguous()
    pairs = x if len(x.shape) == 3 else x.reshape(T, 1, -1).expand(T, C, int(x.shape[1]))
    count = (rows * C).cast(dtypes.int32).contiguous()
    return lora_bias(pairs.reshape(T * C, -1).contiguous(), norm, stack, None, numbers, count).reshape(T, C, -1)
