"""What this project replaces in tinygrad's renderer of C, for generated CPU kernels."""

from __future__ import annotations

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
