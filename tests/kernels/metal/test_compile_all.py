"""The command that compiles every Metal kernel for CI on macOS, with another compiler in place of Apple's."""

from __future__ import annotations

import sys

import pytest

from tests.kernels.metal.samples import samples
from tests.metal.compile_all import failures

COMPILER = "import sys; text = open(sys.argv[-1]).read(); sys.exit('refused' if 'kernel void argmax(' in text else 0)"


@pytest.mark.long
def test_each_kernel_goes_to_the_compiler_and_failures_are_named() -> None:
    failed = failures([sys.executable, "-c", COMPILER])
    expected = [name for name in samples() if name.split()[0] == "argmax"]
    assert expected and sorted(failed) == sorted(expected)
    assert all(message == "refused" for message in failed.values())
