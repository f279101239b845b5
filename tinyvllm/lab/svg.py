"""Charts as SVG, written by hand: they need no library, and equal charts are equal bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from tinyvllm.lab.charts import Chart, Series

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 48  # margins of the plot
LEGEND = 18  # height of a line of the legend
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#000000", "#4b6")
_TICKS = 6

Place = Callable[[float, float], tuple[float, float]]


def svg(chart: Chart) -> str:
    """The text of an SVG file."""
    height = _height(chart)
    across, up, place = _axes(chart)
    parts = [*_grid(chart, across, up, place), *_guide(chart, across, up, place)]
    for number, series in enumerate(chart.series):
        parts += _drawn(series, COLOURS[number % len(COLOURS)], place)
        parts += _legend(series.name, COLOURS[number % len(COLOURS)], HEIGHT + LEGEND * number, series.dashed)
    if chart.omitted:
        parts.append(_text(LEFT, HEIGHT + LEGEND * len(chart.series) + 4, f"{chart.omitted} more are in the table", "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def stacked(charts: Sequence[Chart]) -> str:
    """The text of an SVG file with several pictures, one below the other."""
    parts, top = list[str](), 0
    for chart in charts:
        parts.append(f'<g transform="translate(0 {top})">\n{svg(chart)}</g>')
        top += _height(chart)
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{max(top, 1)}">', *parts, "</svg>\n"])


def _height(chart: Chart) -> int:
    return HEIGHT + LEGEND * (len(chart.series) + bool(chart.omitted))


def _axes(chart: Chart) -> tuple[tuple[float, float], tuple[float, float], Place]:
    """The ranges of x (its logarithm with `log_x`) and y, and where a point is."""
    xs = [_scaled(chart, x) for one in chart.series for x, _ in one.points]
    ys = [y for one in chart.series for _, y in one.points]
    if chart.guide == "one":
        ys.append(1.0)
    if chart.guide == "diagonal":
        xs, ys = [*xs, *ys], [*xs, *ys]
    across, up = _widened(min(xs), max(xs)), _widened(min([0.0, *ys]), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (_scaled(chart, x) - across[0]) / (across[1] - across[0])
        top = (y - up[0]) / (up[1] - up[0])
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - top * (HEIGHT - TOP - BOTTOM)

    return across, up, place


def _scaled(chart: Chart, x: float) -> float:
    return math.log2(x) if chart.log_x else x


def _widened(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or 0.5
    return (low - room if low else 0.0), high + room


def _grid(chart: Chart, across: tuple[float, float], up: tuple[float, float], place: Place) -> list[str]:
    """Lines at round numbers with their texts, the title and the names of the axes."""
    parts = [_text(LEFT, TOP - 18, chart.title, "start"), _text(WIDTH / 2, HEIGHT - 10, chart.x, "middle")]
    turned = f'transform="rotate(-90 14 {HEIGHT / 2:.1f})"'
    parts.append(f'<text x="14" y="{HEIGHT / 2:.1f}" text-anchor="middle" {turned}>{escape(chart.y)}</text>')
    for y in _round_numbers(up):
        _, at = place(1.0, y)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>{_text(LEFT - 6, at + 4, f"{y:g}", "end")}')
    for scaled in _round_numbers(across):
        x = 2.0**scaled if chart.log_x else scaled
        if chart.log_x and scaled != round(scaled):
            continue
        at, _ = place(x, 0.0)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>{_text(at, HEIGHT - BOTTOM + 16, f"{x:g}", "middle")}')
    return parts


def _round_numbers(limits: tuple[float, float]) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the limits, about _TICKS of them."""
    wish = (limits[1] - limits[0]) / _TICKS
    power = 10.0 ** math.floor(math.log10(wish))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= wish)
    return [round(step * i, 10) for i in range(math.ceil(limits[0] / step), math.floor(limits[1] / step) + 1)]


def _guide(chart: Chart, across: tuple[float, float], up: tuple[float, float], place: Place) -> list[str]:
    if chart.guide == "one":
        _, y = place(1.0, 1.0)
        return [f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#999" stroke-dasharray="2 3"/>']
    if chart.guide == "diagonal":
        low, high = max(across[0], up[0]), min(across[1], up[1])
        (x, y), (right, top) = place(low, low), place(high, high)
        return [f'<path d="M{x:.1f} {y:.1f}L{right:.1f} {top:.1f}" stroke="#999" stroke-dasharray="2 3"/>']
    return []


def _drawn(series: Series, colour: str, place: Place) -> list[str]:
    """The line and the points of a series; a prediction is a dashed line alone."""
    places = [place(x, y) for x, y in series.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="6 4" stroke-opacity="0.6"' if series.dashed else ""
    line = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'] if series.joined else []
    return line if series.dashed else [*line, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)]


def _legend(name: str, colour: str, y: float, dashed: bool) -> list[str]:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return [f'<path d="M{LEFT} {y:.1f}h24" stroke="{colour}" stroke-width="2"{dash}/>', _text(LEFT + 32, y + 4, name, "start")]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def files(charts: Sequence[Chart]) -> dict[str, str]:
    """The texts of the pictures by the names of their files."""
    return {f"{chart.name}.svg": svg(chart) for chart in charts}
