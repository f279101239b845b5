"""Figures of several repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def summary(values: Sequence[float], digits: int = 6) -> dict[str, Any]:
    """Mean, median, standard deviation (of a sample; None of one value), minimum and maximum, to `digits` significant digits."""

    def short(value: float) -> float:
        return float(f"{value:.{digits}g}")

    return {
        "mean": short(statistics.fmean(values)),
        "median": short(statistics.median(values)),
        "sd": short(statistics.stdev(values)) if len(values) > 1 else None,
        "min": short(min(values)),
        "max": short(max(values)),
        "n": len(values),
    }


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None of nothing."""
    return part / whole if whole else None
