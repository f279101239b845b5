"""Which kernel runs an op here: a hand-written one, or the reference in plain tinygrad. Every choice is remembered with its reason.

A backend's rows are ordered, best first; the first whose needs this machine meets is taken, unless the op refuses its shape or
`TINYVLLM_KERNELS=attention_decode=ref,matmul=avx2,all=plain` says otherwise. A forced choice that cannot be had is an error.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import dataclass

from tinygrad import Device

from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.bridge import open_device as _open
from tinyvllm.config import environment
from tinyvllm.errors import ArgumentError, KernelError
from tinyvllm.placement import Placement

REFERENCE = "ref"

# The ops that have kernels, by the stem of their source.
STEMS = (
    "embed",
    "norm_qkv_rope_store",
    "kv_append",
    "attention_decode",
    "attention_prefill",
    "matmul",
    "norm_gate_up_silu",
    "norm_head",
    "advance",
    "kv_copy",
    "sample",
    "accept_drafts",
)
ONLY_ON = {"accept_drafts": ("CUDA", "METAL")}  # stems that not every backend with kernels has

# Rows of the CPU: what a processor must have, by Linux's names.
_CPU_VARIANTS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimd",),
    "plain": (),
}
# Rows of CUDA: the oldest GPU that they run on. Each is compiled for the very GPU at hand.
_CUDA_VARIANTS = {"sm_80": 80}
# A row for products on Hopper alone. Only for who asks: whether its instructions round as the others' do has not been seen, and if they do
# not, a request's tokens would depend on how many rows are computed with it.
_PRODUCTS = ("matmul", "norm_gate_up_silu", "norm_qkv_rope_store", "norm_head")
_HOPPER = "sm_90a"
# The row of Metal: the oldest family of Apple's GPUs that it runs on, M1's.
_APPLE = "apple7"
# A row for products on the same GPUs that multiplies thirteen to sixteen rows by simdgroup_matrix. Only for who asks: a request's bits
# then depend on how many rows are computed with it.
_APPLE_MATRIX = "apple7_matrix"
_VARIANTS = (*_CPU_VARIANTS, *_CUDA_VARIANTS, _HOPPER, _APPLE, _APPLE_MATRIX)


@dataclass(frozen=True)
class Choice:
    """What runs an op of one shape: `variant` is the kernel variant's name or "ref", `why` the reason in words."""

    stem: str
    shape: str
    variant: str
    why: str


_choices: dict[tuple[str, str, str], Choice] = {}


def select(stem: str, placement: Placement, shape: str, refused: str | None = None) -> str | None:
    """The kernel variant that runs this op at `placement`, or None for the reference.

    `shape` is for the table of choices; `refused` is the op's own reason against a kernel, such as a size that it cannot take.
    """
    choice = _choose(stem, placement, shape, refused, _forced(os.environ.get("TINYVLLM_KERNELS", "")))
    _choices[stem, placement.device, shape] = choice
    return None if choice.variant == REFERENCE else choice.variant


def choices(device: str | None = None) -> list[Choice]:
    """All choices of this process in their order, or those of one device."""
    return [choice for (_, at, _), choice in _choices.items() if device in (None, at)]


def forget_choices() -> None:
    """Empty the list of choices, to see those of one engine."""
    _choices.clear()


def open_device(placement: Placement) -> None:
    """Open the device; raises what tinygrad's device raises where it cannot be opened."""
    _open(placement.device)


def usable_variants(placement: Placement, stem: str | None = None) -> list[str]:
    """Names of the variants that this machine can run, best first."""
    return [name for name, lacking in variants(placement, stem).items() if lacking is None]


def variants(placement: Placement, stem: str | None = None) -> dict[str, str | None]:
    """The kernel variants at a placement, best first, each with what this machine lacks for it, or None.

    With `stem`, also those that only this op has.
    """
    if placement.is_cuda:
        return _cuda_variants(placement.device, stem)
    if placement.is_metal:
        return _metal_variants(placement.device, stem)
    if not placement.is_cpu:
        return {}
    arm = platform.machine().lower() in ("arm64", "aarch64")
    has = cpu_features()
    named = {name: needs for name, needs in _CPU_VARIANTS.items() if name == "plain" or (name == "neon") == arm}
    return {name: _lacking(needs, has) for name, needs in named.items()}


def _cuda_variants(device: str, stem: str | None) -> dict[str, str | None]:
    name = str(Device[device].arch)
    architecture = int(re.sub(r"\D", "", name))
    found = {row: None if architecture >= oldest else f"the GPU is {name}, older than {row}" for row, oldest in _CUDA_VARIANTS.items()}
    if stem in _PRODUCTS:
        found[_HOPPER] = None if architecture == 90 else f"the GPU is {name}, and it is for sm_90 alone"
    return found


def _metal_variants(device: str, stem: str | None) -> dict[str, str | None]:
    family = str(Device[device].arch)
    number = re.fullmatch(r"Apple(\d+)", family)
    lacks = None if number and int(number[1]) >= 7 else f"the GPU is of the family {family}, and it is for Apple7 and later"
    return {row: lacks for row in (_APPLE, *([_APPLE_MATRIX] if stem in _PRODUCTS else []))}


def _lacking(needs: tuple[str, ...], has: frozenset[str]) -> str | None:
    missing = [need for need in needs if need not in has]
    return f"the processor has no {', '.join(missing)}" if missing else None


def _choose(stem: str, placement: Placement, shape: str, refused: str | None, forced: dict[str, str]) -> Choice:
    assert stem in STEMS, stem
    available, wanted, kind = variants(placement, stem), forced.get(stem, forced.get("all")), placement.kind
    if wanted == REFERENCE:
        return Choice(stem, shape, REFERENCE, "TINYVLLM_KERNELS asks for it")
    if not available and wanted is not None:
        raise KernelError(f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}, but there are no kernels for {kind} yet; only {REFERENCE}")
    if not available:
        return Choice(stem, shape, REFERENCE, f"there are no kernels for {kind} yet")
    if kind not in ONLY_ON.get(stem, (kind,)):
        refused = f"{kind} has no kernel for it"
    if refused is not None:
        if stem in forced:
            raise KernelError(f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}, which cannot run {shape}: {refused}")
        return Choice(stem, shape, REFERENCE, refused)
    if wanted is not None:
        if wanted not in available:
            raise KernelError(
                f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}; {placement} here has {', '.join(available)}, and {REFERENCE}"
            )
        if available[wanted] is not None:
            raise KernelError(f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}, but {available[wanted]}")
        return Choice(stem, shape, wanted, "TINYVLLM_KERNELS asks for it")
    passed: list[str] = []
    for name, lacking in available.items():
        if lacking is None:
            return Choice(stem, shape, name, "; ".join(passed) or "the best variant for this processor")
        passed.append(f"not {name}: {lacking}")
    return Choice(stem, shape, REFERENCE, "; ".join(passed))


@functools.cache
def _forced(text: str) -> dict[str, str]:
    forced: dict[str, str] = environment({"TINYVLLM_KERNELS": text}).get("TINYVLLM_KERNELS", {}) if text else {}
    for stem, variant in forced.items():
        if stem not in (*STEMS, "all"):
            raise ArgumentError(f"TINYVLLM_KERNELS: there is no op {stem!r}; there are {', '.join(STEMS)}, and all")
        if variant not in (*_VARIANTS, REFERENCE):
            raise ArgumentError(
                f"TINYVLLM_KERNELS: there is no variant {variant!r} for {stem}; there are {', '.join(_VARIANTS)}, and {REFERENCE}"
            )
    return forced
