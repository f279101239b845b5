"""One table and one picture from results/compare.jsonl: the newest line of every shape, format and test.

    python -m benchmarks.plot [--results FOLDER] [--picture compare.png]

The table is markdown; bars are drawn in the terminal always, and as a PNG where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, table

Line = dict[str, Any]
_WIDTH = 48  # characters of the longest bar


def newest(path: Path) -> list[Line]:
    """The last line of each (shape, format, test, threads), in the order of their first appearance."""
    lines: dict[tuple[object, ...], Line] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        lines[tuple(line[k] for k in ("shape", "format", "test", "threads"))] = line
    return list(lines.values())


def contestants(lines: list[Line]) -> list[str]:
    """Every name that has a figure anywhere, in order of appearance."""
    return list(dict.fromkeys(name for line in lines for name in line["tok_s"]))


def title(line: Line) -> str:
    return f"{line['shape']} {line['format']} {line['test']}"


def ratios(lines: list[Line]) -> str:
    """Tokens a second of every engine, the roof where there is one, and how much faster tinyvllm is than the best of the others."""
    names = contestants(lines)
    rows: list[list[object]] = []
    for line in lines:
        rates = {name: figures["rate"] for name, figures in line["tok_s"].items()}
        others = [rate for name, rate in rates.items() if name != "tinyvllm"]
        lead = rates["tinyvllm"] / max(others) if others and "tinyvllm" in rates else None
        rows.append([title(line), *(rates.get(name) for name in names), line.get("roof_tok_s"), lead])
    return table(["tok/s", *names, "roof", "tinyvllm / best other"], rows)


def bars(line: Line) -> str:
    """One test as bars of text; `|` marks the quartiles' upper end where it is beyond the bar."""
    most = max(figures["high"] for figures in line["tok_s"].values())
    out = [title(line)]
    for name, figures in line["tok_s"].items():
        length, high = (round(_WIDTH * figures[k] / most) for k in ("rate", "high"))
        out.append(f"  {name:<14}{'█' * length}{' ' * (high - length - 1) + '|' if high > length else ''} {figures['rate']:.1f}")
    return "\n".join(out)


def draw(lines: list[Line], picture: Path) -> bool:
    """Horizontal bars with quartiles, a panel a test; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = contestants(lines)
    figure, panels = pyplot.subplots(len(lines), 1, figsize=(7, 1 + 1.3 * len(lines)), squeeze=False)
    for panel, line in zip(panels[:, 0], lines, strict=True):
        here = [name for name in reversed(names) if name in line["tok_s"]]
        figures = [line["tok_s"][name] for name in here]
        rates = [f["rate"] for f in figures]
        spans = [[f["rate"] - f["low"] for f in figures], [f["high"] - f["rate"] for f in figures]]
        panel.barh(here, rates, xerr=spans, color=["C0" if name == "tinyvllm" else "0.7" for name in here], height=0.7)
        if line.get("roof_tok_s"):
            panel.axvline(line["roof_tok_s"], color="0.3", linestyle=":", linewidth=1)
        panel.set_title(title(line), fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
    panels[-1, 0].set_xlabel("tokens a second; whiskers: quartiles; dotted: reading the weights")
    figure.tight_layout()
    figure.savefig(picture, dpi=150)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="table and picture of results/compare.jsonl")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=Path("compare.png"))
    options = parser.parse_args()
    path = options.results / "compare.jsonl"
    if not path.is_file():
        raise SystemExit(f"plot: there is no {path}; run python -m benchmarks.compare first")
    lines = newest(path)
    print(ratios(lines), *(bars(line) for line in lines), sep="\n\n")
    if draw(lines, options.picture):
        print(f"picture: {options.picture}", file=sys.stderr)
    else:
        print("no picture: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
