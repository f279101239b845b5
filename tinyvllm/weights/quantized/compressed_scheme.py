"""How compressed-tensors' settings say that the weights of some modules are quantized."""

from __future__ import annotations

from tinyvllm.errors import ModelError
from tinyvllm.foreign import quoted
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Scheme:
    """One group of `config_groups`; `group_size` is None for one scale a row, a block or a matrix, `block` None but for blocks."""

    format: str
    bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None = None


def unsupported(scheme: Scheme, stem: str) -> ModelError:
    kind = f"{scheme.format} with {scheme.bits} bits of type {quoted(scheme.type)}"
    return ModelError(f"compressed-tensors: {kind} is not supported ({quoted(stem)})")
