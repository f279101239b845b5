"""Every CPU kernel compiles for every variant, also for other processors than this machine's, and needs no other code."""

from __future__ import annotations

import functools
import subprocess

import pytest

from tests.kernels.samples import SAMPLES
from tinyvllm.backends.cpu.compile import _ALONE, _COMMON, _compile
from tinyvllm.backends.cpu.toolchain import CPU_TARGETS, compiler_command
from tinyvllm.backends.source import kernel_text, kernels_folder
from tinyvllm.storage.folders import temporary_folder

VARIANTS = {
    "plain": ("x86_64", ()),
    "avx2": ("x86_64", CPU_TARGETS["avx2"]),
    "avxvnni": ("x86_64", CPU_TARGETS["avxvnni"]),
    "amx": ("x86_64", CPU_TARGETS["amx"]),
    "avx512": ("x86_64", (*CPU_TARGETS["avx512"], "-mavx512bf16", "-mavx512vnni")),
    "neon": ("aarch64", CPU_TARGETS["neon"]),
    "neon with dot products": ("aarch64", (CPU_TARGETS["neon"][0] + "+dotprod+bf16",)),
}
_ONLY = {
    "avxvnni": ["matmul Q4_0"],
    "neon": ["matmul Q4_0", "matmul BF16", "attention_decode KV_INT8"],
    "amx": ["matmul Q4_0", "norm_gate_up_silu BF16", "experts_down BF16"],
}
NOT_A_KERNEL = {"thread_pool"}  # a library of its own, no kernel


def test_every_kernel_has_a_sample() -> None:
    stems = {p.stem for p in (kernels_folder() / "cpu").glob("*.c")} - NOT_A_KERNEL
    assert {name.split()[0] for name in SAMPLES} == stems


def _cases() -> list[tuple[str, str]]:
    """Everything for Arm, where nothing else may have compiled it; of each kernel one sample for the other variants.

    avxvnni differs from avx2 in the dot products of integers only, amx from avx512 in products, neon from neon with dot products in those.
    """
    one_each = {name.split()[0]: name for name in SAMPLES}.values()
    return [(name, "neon with dot products") for name in SAMPLES] + [
        (name, variant) for variant in list(VARIANTS)[:-1] for name in _ONLY.get(variant, one_each)
    ]


@functools.cache
def _arm_header(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags for the intrinsics of Arm as a precompiled header: to read it takes longer than to compile a kernel."""
    folder = temporary_folder()
    assert folder is not None
    as_header = ["c-header" if flag == "c" else flag for flag in flags if flag != "-c"]
    command = [*compiler_command(), *as_header, "-", "-o", str(folder / "arm.pch")]
    subprocess.run(command, input=b"#include <stdint.h>\n#include <arm_neon.h>\n", check=True)
    return ("-include-pch", str(folder / "arm.pch"))


@pytest.mark.parametrize("name, variant", _cases())
def test_a_kernel_compiles_and_needs_nothing(name: str, variant: str) -> None:
    architecture, more = VARIANTS[variant]
    kernel, _ = SAMPLES[name](variant.split()[0])
    flags = (*_COMMON, *_ALONE, f"--target={architecture}-none-unknown-elf", *more)
    flags += _arm_header(flags) if architecture == "aarch64" and "#include <arm_neon.h>" in kernel_text(kernel) else ()
    # says so if a symbol is undefined: a call of memset or sqrtf would be one
    assert _compile(kernel_text(kernel), flags, kernel.name)
