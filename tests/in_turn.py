"""Cases that take turns: the plain suite runs each with one variant, the long tests with all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(cases: Iterable[Any], variants: Sequence[str]) -> list[Any]:
    """Parameters of each case (a tuple, or one value) and of each variant; a case's others than its turn's have the mark `long`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            variant,
            id=f"{'-'.join(map(str, case)) if isinstance(case, tuple) else case}-{variant}",
            marks=() if i % len(variants) == j else pytest.mark.long,
        )
        for i, case in enumerate(cases)
        for j, variant in enumerate(variants)
    ]
