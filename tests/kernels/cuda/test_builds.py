"""Every CUDA kernel compiles for its GPUs, without spilling registers, and fits into the shared memory of a block."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cuda import every_cut
from tests.kernels.cuda.samples import GPUS, PACKED, samples
from tinyvllm.backends.cuda import hopper_plan, nvrtc
from tinyvllm.backends.cuda import plan as records
from tinyvllm.backends.source import kernel_text, kernels_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheel is for Linux")

SAMPLES = {arch: samples(gpu, arch) for arch, gpu in GPUS.items()}


def test_every_kernel_has_a_sample() -> None:
    stems = {path.stem for path in (kernels_folder() / "cuda").glob("*.cu")}
    assert {name.split()[0] for name in SAMPLES["sm_90"]} == stems


def test_any_gpu_of_hoppers_architecture_has_its_kernels() -> None:
    """An H100 on PCIe has 114 multiprocessors."""
    names = samples(records.GPU(114, 227 << 10, 228 << 10), "sm_90")
    assert names.keys() == SAMPLES["sm_90"].keys() > SAMPLES["sm_80"].keys()
    assert any(kernel.target == hopper_plan.HOPPER for kernel in names.values())


def _is_long(name: str, arch: str) -> bool:
    """Of the formats that came later, all but the most common ones with the kernels that need most registers, and of products by expert
    all but one size: they take minutes. And products with biases of rows, which differ by an address.
    """
    usual = {f"{stem} {format} {rest}" for format in ("Q4_K", "Q6_K") for stem, rest in (("matvec", "of 8"), ("matmul", "of 4096"))}
    if "by experts" in name and not ("experts of 64" in name and arch == "sm_90"):
        return True
    if "biases of rows" in name:
        return True
    return any(word in PACKED for word in name.split()) and (name not in usual or arch != "sm_90")


def _cases() -> list[Any]:
    """A kernel with instructions of one architecture is compiled only for that; of the others each has an architecture in turn, and the
    long tests have both.
    """
    every = [(name, arch) for arch in GPUS for name, k in SAMPLES[arch].items() if k.target in (f"{arch}a", "sm_80")]
    usual = [case for case in every if not _is_long(*case)]
    both = sorted({name for name, arch in usual if all((name, other) in usual for other in GPUS)})
    turns = {name: list(GPUS)[i % len(GPUS)] for i, name in enumerate(both)}
    short = {(name, arch) for name, arch in usual if turns.get(name, arch) == arch}
    return [pytest.param(*case, marks=() if case in short else pytest.mark.long) for case in every]


@pytest.mark.parametrize("name, arch", _cases())
def test_a_kernel_does_not_spill_and_fits_in_shared_memory(name: str, arch: str) -> None:
    kernel = SAMPLES[arch][name]
    said = nvrtc.report(kernel, arch)
    assert said.spilled == 0 and said.stack == 0, said.said
    assert 0 < said.registers <= 255
    assert said.shared + kernel.shared <= GPUS[arch].shared, f"{said.shared} bytes declared, {kernel.shared} at launch"
    assert 32 <= kernel.block <= 1024 and kernel.block % 32 == 0 and min(kernel.grid) > 0 and max(kernel.grid[1:]) < 1 << 16


def _cuts() -> list[Any]:
    """All cuts, also those that the shapes of the samples do not choose; later formats are `long`, every_cut.py has the rest."""
    ways = [("BF16", "sm_90", 1), ("Q4_0", "sm_80", 1), ("BF16", "sm_80", 4)]
    later = [(format, arch, split) for format in PACKED for arch in GPUS for split in (1, 4)]
    return [
        pytest.param(cut, *way, marks=pytest.mark.long if way in later else ())
        for way in (*ways, *later)
        for cut in every_cut.cuts_of(*way)
    ]


@pytest.mark.parametrize("cut, format, arch, split", _cuts())
def test_every_cut_of_a_large_product(cut: records.Cut, format: str, arch: str, split: int) -> None:
    assert every_cut.fault(cut, format, arch, split) is None


def test_a_cut_that_the_planner_leaves_out_would_spill() -> None:
    """So the report is read: 64 sums a thread and shared columns have no registers for Q6_K."""
    cut = records.Cut(128, 128, 2, 4, 1, 1)
    assert cut in records.CUTS and cut not in every_cut.cuts_of("Q6_K", "sm_80", 4)
    assert "bytes spilled" in (every_cut.fault(cut, "Q6_K", "sm_80", 4) or "")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
@pytest.mark.parametrize("stem", sorted({name.split()[0] for name in SAMPLES["sm_90"]}))
def test_nvcc_compiles_it_too(stem: str, tmp_path: Path) -> None:
    """Another front end, mostly of another version; its assembler reports spills as well."""
    kernel = next(kernel for name, kernel in SAMPLES["sm_90"].items() if name.split()[0] == stem)
    source = tmp_path / f"{stem}.cu"
    source.write_text(kernel_text(kernel))
    target = kernel.target if kernel.target.endswith("a") else "sm_90"
    command = ["nvcc", f"-arch={target}", "-cubin", "--fmad=false", "-std=c++17", "-Xptxas", "-v", "-diag-suppress", "177"]
    done = subprocess.run([*command, "-o", str(tmp_path / "out.cubin"), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = nvrtc.read_report(done.stderr)
    assert said.registers > 0 and said.spilled == 0, done.stderr
