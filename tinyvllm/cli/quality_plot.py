"""The picture of `tinyvllm quality`: bytes against mean KL divergence, as SVG. Written by hand, so that it needs no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from tinyvllm.cli.quality_report import Record, best, name_of

WIDTH, HEIGHT = 900, 520  # of one panel
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 40, 50  # its margins
_LINE, _TEXT = 14, 6.6  # height of a line and width of a character, in pixels
_TICKS = 6
# distances of a name from its point: next to it, then further and further away
_PLACES = [(8.0, 0.0), (-8.0, 0.0), *((side * r, height * r) for r in (16.0, 30.0, 46.0) for height in (-1.0, 1.0) for side in (1.0, -1.0))]

Bytes = Callable[[Record], float]


def plot(records: Sequence[Record]) -> str:
    """SVG: weights in MB against divergence, and the KV cache where its types differ. A row without divergence is in no panel."""
    rows = [one for one in records if not one["reference"] and one["kl"]["value"] > 0]
    panels = [_panel("weights, MB", [one for one in rows if one["kv_cache"] == "auto"], lambda one: one["weight_bytes"] / 1e6)]
    if any(one["kv_cache"] != "auto" for one in rows):
        cached = [one for one in rows if one["kv_cache"] != "auto"]
        panels.append(_panel("KV cache, bytes a token", cached, lambda one: one["kv_bytes_per_token"]))
    panels = [panel for panel in panels if panel]
    moved = [f'<g transform="translate(0 {HEIGHT * i})">\n{panel}\n</g>' for i, panel in enumerate(panels)]
    size = f'width="{WIDTH}" height="{HEIGHT * max(1, len(moved))}"'
    style = 'font-family="sans-serif" font-size="12"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', '<rect width="100%" height="100%" fill="white"/>', *moved, "</svg>\n"]
    )


def _panel(title: str, rows: Sequence[Record], nbytes: Bytes) -> str:
    if not rows:
        return ""
    xs, ys = [nbytes(one) for one in rows], [math.log10(one["kl"]["value"]) for one in rows]
    left, right = _widened(min(xs), max(xs))
    bottom, top = math.floor(min(ys)), math.ceil(max(ys) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - left) / (right - left), (y - bottom) / max(top - bottom, 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    points = [place(x, y) for x, y in zip(xs, ys, strict=True)]
    parts = [*_grid(title, place, (left, right), (bottom, max(top, bottom + 1))), *_front(rows, points)]
    return "\n".join([*parts, *_labels(_short_names(rows), points)])


def _short_names(rows: Sequence[Record]) -> list[str]:
    """What tells the rows of a panel apart."""
    same_weights = len({one["weights"] for one in rows}) == 1 and all(one["kv_cache"] != "auto" for one in rows)
    return [one["kv_cache"] if same_weights else name_of(one) for one in rows]


def _widened(low: float, high: float) -> tuple[float, float]:
    room = 0.1 * (high - low or high or 1.0)
    return low - room, high + room


def _grid(title: str, place: Callable[[float, float], tuple[float, float]], across: tuple[float, float], up: tuple[int, int]) -> list[str]:
    """Lines at powers of ten and at round numbers of bytes, with their texts."""
    parts = []
    for power in range(up[0], up[1] + 1):
        (x, y), (end, _) = place(across[0], power), place(across[1], power)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{end:.1f}" stroke="#ddd"/>{_text(x - 6, y + 4, f"{10.0**power:g}", "end")}')
    step = _round_step((across[1] - across[0]) / _TICKS)
    for number in range(math.ceil(across[0] / step), math.floor(across[1] / step) + 1):
        (x, y), (_, end) = place(number * step, up[0]), place(number * step, up[1])
        parts.append(f'<path d="M{x:.1f} {y:.1f}V{end:.1f}" stroke="#eee"/>{_text(x, y + 16, f"{number * step:g}", "middle")}')
    parts.append(_text(WIDTH / 2, HEIGHT - 12, title, "middle"))
    return [*parts, _text(LEFT, TOP - 16, "mean KL divergence from the reference, nats; line: the best for their size", "start")]


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= step)


def _front(rows: Sequence[Record], points: Sequence[tuple[float, float]]) -> list[str]:
    """The points, and the line through the best ones."""
    names = [id(one) for one in best(rows)]
    line = sorted(point for one, point in zip(rows, points, strict=True) if id(one) in names)
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{"#c33" if id(one) in names else "#888"}"/>'
        for one, (x, y) in zip(rows, points, strict=True)
    ]
    return [f'<path d="M{path}" fill="none" stroke="#c33" stroke-opacity="0.5"/>', *dots]


def _labels(names: Sequence[str], points: Sequence[tuple[float, float]]) -> list[str]:
    """A name next to each point, or near it with a line to it, where it covers no other name and no point if there is such a place."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    parts = []
    for name, (x, y) in sorted(zip(names, points, strict=True), key=lambda pair: pair[1][1]):
        boxes = [_box(x, y, dx, dy, len(name)) for dx, dy in _PLACES]
        fits = [b[0] >= 0 and b[2] <= WIDTH and not any(_overlap(b, t) for t in taken) for b in boxes]
        place = fits.index(True) if True in fits else 0
        left, _, right, bottom = boxes[place]
        taken.append(boxes[place])
        if place > 1:
            parts.append(f'<path d="M{x:.1f} {y:.1f}L{left if left > x else right:.1f} {bottom - _LINE / 2:.1f}" stroke="#999"/>')
        parts.append(_text(left, bottom - 3, name, "start"))
    return parts


def _box(x: float, y: float, dx: float, dy: float, characters: int) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text that begins (dx > 0) or ends (dx < 0) at this distance from a point."""
    width = _TEXT * characters
    left = x + dx if dx > 0 else x + dx - width
    return left, y + dy - _LINE / 2, left + width, y + dy + _LINE / 2


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
