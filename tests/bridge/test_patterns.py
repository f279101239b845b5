"""tinygrad's patterns are interpreted at first, then compiled, and find the same."""

from __future__ import annotations

import pytest
from tinygrad import UOp, dtypes
from tinygrad.uop import ops
from tinygrad.uop.ops import Ops, PatternMatcher, UPat

from tinyvllm.bridge import patterns


def test_a_pattern_is_compiled_after_a_few_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_pattern = list[UPat](), __import__("tinygrad.uop.upat", fromlist=["upat"]).upat_compile

    def note(pattern: UPat, function: object) -> object:
        compiled.append(pattern)
        return compile_pattern(pattern, function)

    monkeypatch.setattr("tinygrad.uop.upat.upat_compile", note)
    patterns.interpret_first()
    assert ops.upat_deferred_compile is patterns._interpreted
    matcher = PatternMatcher([(UPat.var("x") + UPat.cvar("c"), lambda x, c: x if c.arg == 0 else None)])
    x = UOp.variable("x", 0, 9)
    for n in range(2 * patterns.MATCHES):
        zero, other = (UOp(Ops.ADD, dtypes.weakint, (x, UOp.const(dtypes.weakint, number))) for number in (0, n + 1))
        assert matcher.rewrite(zero) is x and matcher.rewrite(other) is None
        assert len(compiled) == (2 * n + 2 >= patterns.MATCHES)
