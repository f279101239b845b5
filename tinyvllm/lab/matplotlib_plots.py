"""The same charts by matplotlib, for PNG and PDF. The extra `lab` brings it; SVG needs no library."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from tinyvllm.errors import ArgumentError
from tinyvllm.lab.charts import Chart

FORMATS = ("png", "pdf")


def figure_type(kind: str) -> Any:
    """matplotlib's Figure. ArgumentError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # no pyplot: it would choose a window system
    except ImportError as error:
        raise ArgumentError(f"--plot-format {kind} needs matplotlib: pip install 'tinyvllm[lab]', or use svg") from error
    return Figure


def files(charts: Sequence[Chart], kind: str) -> dict[str, bytes]:
    """The pictures by the names of their files. ArgumentError without matplotlib."""
    figure = figure_type(kind)
    return {f"{chart.name}.{kind}": _picture(figure(figsize=(8, 5)), chart, kind) for chart in charts}


def _picture(figure: Any, chart: Chart, kind: str) -> bytes:
    axes = figure.add_subplot()
    for series in chart.series:
        xs, ys = zip(*series.points)
        style = {"linestyle": "--"} if series.dashed else {"marker": "o", "linestyle": "-" if series.joined else "none"}
        axes.plot(xs, ys, label=series.name, **style)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.guide == "one":
        axes.axhline(1.0, color="0.6", linestyle=":")
    if chart.guide == "diagonal":
        axes.axline((1, 1), slope=1, color="0.6", linestyle=":")
    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=140)
    return data.getvalue()
