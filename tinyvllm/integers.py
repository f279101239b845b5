"""Integer arithmetic of sizes."""

from __future__ import annotations


def ceil_div(amount: int, divisor: int) -> int:
    """`amount` divided by `divisor`, rounded up."""
    return -(-amount // divisor)


def round_up(amount: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `amount`."""
    return ceil_div(amount, multiple) * multiple
