"""The formats that tests of every kernel take: all but most of the grouped ones, whose kernels are one header with two numbers.

tests/kernels/test_grouped.py has all of those.
"""

from __future__ import annotations

from tinyvllm.quant.formats import GROUPED, Layout, formats_in

EXAMPLES = ("INT3_G64", "INT4_G128", "INT6_G32")


def sampled_formats(layout: Layout) -> tuple[str, ...]:
    return tuple(name for name in formats_in(layout) if name not in GROUPED or name in EXAMPLES)
