"""Which variants of the CPU's kernels this machine can run, best first. Imports no tinygrad."""

from __future__ import annotations

import platform

from tinyvllm.backends.cpu.tiles import tiles_refused
from tinyvllm.backends.cpu.toolchain import cpu_features

# What a processor must have for each variant, by Linux's names of its features.
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c")
NEEDS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_bf16", "avx512_vnni", "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"),
    "avx512": _AVX512,
    "avxvnni": ("avx_vnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimd",),
    "plain": (),
}


def cpu_variants() -> dict[str, str | None]:
    """The variants of this architecture, each with what this machine lacks for it, or None."""
    arm = platform.machine().lower() in ("arm64", "aarch64")
    has = cpu_features()
    named = {name: needs for name, needs in NEEDS.items() if name == "plain" or (name == "neon") == arm}
    lacking = {name: _lacking(needs, has) for name, needs in named.items()}
    if "amx" in lacking and lacking["amx"] is None:
        lacking["amx"] = tiles_refused()
    return lacking


def best_variant() -> str:
    """The first one that this machine can run."""
    return next(name for name, lacking in cpu_variants().items() if lacking is None)


def _lacking(needs: tuple[str, ...], has: frozenset[str]) -> str | None:
    missing = [need for need in needs if need not in has]
    return f"the processor has no {', '.join(missing)}" if missing else None
