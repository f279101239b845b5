"""tinygrad's patterns are compiled once they have been matched a few times: a first capture tries most of its 280 patterns less often.

tinygrad writes a function in Python for each pattern at its first match, and compiles it: a millisecond, for which its interpreter matches
the pattern 50 times. Both find the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinygrad.uop import ops

MATCHES = 16  # before a pattern is compiled

Match = Callable[[Any, Any], Any]


def interpret_first() -> None:
    """From now on, patterns that are defined are interpreted first: those of the scheduler and the code generator, which come later."""
    module: Any = ops
    module.upat_deferred_compile = _interpreted


def _interpreted(pattern: Any, function: Callable[..., Any], entry: list[Any]) -> Match:
    """The match of a pattern, which replaces itself in its `entry` of a matcher."""
    interpreted: Match | None = None
    left = MATCHES

    def match(node: Any, context: Any) -> Any:
        nonlocal interpreted, left
        interpreted = interpreted or ops.upat_interpret(pattern, function)
        left -= 1
        if left <= 0:
            from tinygrad.uop.upat import upat_compile

            entry[1] = upat_compile(pattern, function) or interpreted
        return interpreted(node, context)

    return match
