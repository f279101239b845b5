"""The benchmark of kernels against tinygrad's own code."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tinygrad import Tensor

from benchmarks.reference import captured
from tests.started import device

__all__ = ["device"]  # the tests run on a started CPU device


@pytest.mark.parametrize("given", [None, "all=avx2"])
def test_the_reference_is_forced_for_its_own_capture_alone(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record says what was forced for all of it, and figures leave out such records."""
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    if given is not None:
        monkeypatch.setenv("TINYVLLM_KERNELS", given)
    seen: list[str | None] = []

    def make(kernel: bool) -> Callable[[], Tensor]:
        seen.append(os.environ.get("TINYVLLM_KERNELS"))
        numbers = Tensor.ones(4, device="CPU").contiguous().realize()
        return lambda: numbers + 1

    for kernel in (True, False):
        captured(make, kernel)()
    assert seen == [given, "all=ref"] and os.environ.get("TINYVLLM_KERNELS") == given
