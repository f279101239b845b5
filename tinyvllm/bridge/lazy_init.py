"""tinygrad's layers without initial values, for weights that are loaded afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import to_dtype
from tinygrad.helpers import argfix

from tinyvllm.bridge import tensors


@contextlib.contextmanager
def uninitialized() -> Iterator[None]:
    """Within it, tinygrad's layers are built without initial values: drawing random weights for 22 layers takes 1.5 s."""

    def empty(*shape: Any, **kwargs: Any) -> Tensor:
        dtype = to_dtype(kwargs.get("dtype") or dtypes.default_float)
        return tensors.empty(argfix(*shape), dtype, kwargs.get("device") or Device.DEFAULT)

    names = ("uniform", "glorot_uniform", "zeros", "ones")
    kept = {name: Tensor.__dict__[name] for name in names if name in Tensor.__dict__}
    for name in names:
        setattr(Tensor, name, staticmethod(empty))
    try:
        yield
    finally:
        for name in names:
            if name in kept:
                setattr(Tensor, name, kept[name])
            else:
                delattr(Tensor, name)
