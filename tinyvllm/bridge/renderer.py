"""What this project replaces in tinygrad's renderer of C, for generated CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tinygrad import dtypes
from tinygrad.dtype import to_storage_scalar
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat


def _bits(constant: UOp) -> str:
    return f"((unsigned short)({to_storage_scalar(constant.arg, dtypes.bfloat16)}u))"


_CONSTANTS = PatternMatcher([(UPat(Ops.CONST, dtypes.bfloat16, name="x"), lambda ctx, x: _bits(x))])


def render_bfloat16_as_bits() -> None:
    """Let generated C for the CPU hold bfloat16 in `unsigned short` instead of clang's `__bf16`.

    tinygrad converts bfloat16 by its bits anyway. But clang selects between two `__bf16` as floats and rounds the result back, which is a
    call of __truncsfbf2 where the processor has no AVX512-BF16, and a generated kernel is linked with nothing: `p ? *a : 0`, as in every
    gather, ended in "undefined symbol".
    """
    if dtypes.bfloat16 not in ClangRenderer.type_map:
        ClangRenderer.type_map = ClangRenderer.type_map | {dtypes.bfloat16: "unsigned short"}
        ClangRenderer.string_rewrite = _CONSTANTS + ClangRenderer.string_rewrite


_supported_dtypes: Callable[[Any], set[Any]] = ClangRenderer.supported_dtypes


def emulate_half_without_f16c(features: Collection[str]) -> None:
    """Let generated C for x86-64 hold float16 as its bits, and convert with integers, where the processor has no F16C.

    clang converts __fp16 there by calls of __extendhfsf2 and __truncsfhf2, and a generated kernel is linked with nothing. `features` are
    this processor's, by Linux's names: what a target named "native" has.
    """

    def supported_dtypes(renderer: Any) -> set[Any]:
        dtypes_of_target = _supported_dtypes(renderer)
        return dtypes_of_target if _has_f16c(renderer.target.arch, features) else dtypes_of_target - {dtypes.half}

    renderer: Any = ClangRenderer
    renderer.supported_dtypes = supported_dtypes


def _has_f16c(target: str, features: Collection[str]) -> bool:
    """Whether code for a target of tinygrad's, such as "x86_64,native" or "x86_64,x86-64-v2,f16c", may convert float16 by instructions."""
    architecture, *more = target.split(",")
    if architecture != "x86_64" or "f16c" in more:
        return True
    if "-f16c" in more or "x86-64" in more or "x86-64-v2" in more:
        return False
    return "f16c" in features or "native" not in more
