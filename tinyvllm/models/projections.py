"""The weights of a layer's products, under the names of the projections whose outputs stand side by side.

A loader may pack several projections into one matrix; a layer asks here and need not know.
"""

from __future__ import annotations

from typing import Any

from tinygrad import Tensor

from tinyvllm.ops.linear import TensorWeight, Weight


def weight_of(owner: Any, *names: str) -> Weight:
    """The weight of projections `names` of a layer, in this order: packed, if the loader packed them, or their tensors."""
    packed: Weight | None = owner.__dict__.get("packed", {}).get(names)
    return packed if packed is not None else TensorWeight(tuple(getattr(owner, name).weight for name in names))


def bias_of(owner: Any, *names: str) -> Tensor | None:
    """The biases of projections `names`, one behind the other, or None. Joined once: in a captured step it would be a kernel."""
    parts = [getattr(owner, name).bias for name in names]
    if parts[0] is None:
        return None
    joined: dict[tuple[str, ...], Tensor] = owner.__dict__.setdefault("joined_biases", {})
    if names not in joined:
        joined[names] = parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:]).contiguous().realize()
    return joined[names]
