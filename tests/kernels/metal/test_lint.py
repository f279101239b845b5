"""Every Metal kernel passes the lint and the check of address spaces, at the shapes at which models launch it."""

from __future__ import annotations

import pytest

from tests.emulator.emulate import declared
from tests.emulator.metal import check_record
from tests.emulator.metal_lint import lint
from tests.kernels.metal.samples import samples
from tinyvllm.backends.source import kernel_text, kernels_folder

SAMPLES = samples()


def test_every_kernel_has_a_sample() -> None:
    assert {name.split()[0] for name in SAMPLES} == {path.stem for path in (kernels_folder() / "metal").glob("*.metal")}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_kernel_is_metal(name: str) -> None:
    kernel = SAMPLES[name]
    text = kernel_text(kernel)
    check_record(kernel, text)
    threads = kernel.block if isinstance(kernel.block, int) else kernel.block[0] * kernel.block[1] * kernel.block[2]
    assert lint(text, threads) == []
    bounds, _ = declared(text)
    assert bounds == {kernel.stem: threads}  # a larger bound takes registers from the kernel, a smaller one refuses the launch
    assert threads % 32 == 0 and kernel.shared == 0 and min(kernel.grid) > 0
