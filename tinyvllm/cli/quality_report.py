"""The results of `tinyvllm quality`: a record a row for JSON lines, their table in Markdown, and the rows that are best for their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tinyvllm.errors import one_line

if TYPE_CHECKING:
    from tinyvllm.engine.tools.quality import Footprint
    from tinyvllm.engine.tools.token_scores import Figures

Record = Mapping[str, Any]
HEADINGS = ("weights", "KV cache", "computed as", "MB", "KV bytes/token", "perplexity", "change", "KL mean", "KL median", "KL 90%",
            "KL 99%", "KL max", "same top", "mean Δp", "RMS Δp", "tok/s")  # fmt: skip


def record(weights: str, kv_cache: str, is_reference: bool, footprint: Footprint, figures: Figures, tok_s: float | None) -> dict[str, Any]:
    """One row: what was measured, its size, its figures (each an object of value and error), and tokens a second of decoding."""
    sizes = {"formats": footprint.formats, "weight_bytes": footprint.weight_bytes, "kv_bytes_per_token": footprint.kv_bytes_per_token}
    head = {"weights": weights, "kv_cache": kv_cache, "reference": is_reference}
    return head | sizes | asdict(figures) | {"decode_tok_s": None if tok_s is None else round(tok_s, 1)}


def best(records: Sequence[Record]) -> list[Record]:
    """The rows, other than the reference, that no row beats: with no more bytes, of weights and of KV cache, and no larger divergence."""
    rows = [one for one in records if not one["reference"]]
    return [one for one in rows if not any(_beats(other, one) for other in rows)]


def _beats(one: Record, other: Record) -> bool:
    a, b = _costs(one), _costs(other)
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _costs(one: Record) -> tuple[float, float, float]:
    return one["weight_bytes"], one["kv_bytes_per_token"], one["kl"]["value"]


def name_of(one: Record) -> str:
    """What a row is called: its weights, and its KV cache if that is not the model's own."""
    return one["weights"] if one["kv_cache"] == "auto" else f"{one['weights']} with KV {one['kv_cache']}"


def best_line(records: Sequence[Record]) -> str:
    """A line that names the best rows; empty if there is only the reference."""
    names = ", ".join(name_of(one) for one in sorted(best(records), key=lambda one: -one["weight_bytes"]))
    return f"Best for their size (no other row has a smaller mean KL divergence without more bytes): {names}" if names else ""


def table(records: Sequence[Record]) -> str:
    """A table in Markdown, the first column to the left; without tokens a second where they were not measured."""
    columns = len(HEADINGS) if any(one["decode_tok_s"] is not None for one in records) else len(HEADINGS) - 1
    rows = [row[:columns] for row in (HEADINGS, *(_cells(one) for one in records))]
    widths = [max(len(row[i]) for row in rows) for i in range(columns)]
    lines = ["| " + " | ".join(_aligned(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join([":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]


def _cells(one: Record) -> tuple[str, ...]:
    name = f"{_escaped(one['weights'])}{' (reference)' if one['reference'] else ''}"
    speed = "" if one["decode_tok_s"] is None else f"{one['decode_tok_s']:.0f}"
    sizes = f"{one['weight_bytes'] / 1e6:.2f}", f"{one['kv_bytes_per_token']}"
    head = name, one["kv_cache"], " ".join(one["formats"]), *sizes, _with_error(one["perplexity"], 4)
    if one["reference"]:
        return (*head, *[""] * 9, speed)
    ratio, percentiles = (
        one["perplexity_ratio"],
        [value for _, value in sorted(one["kl_percentiles"].items(), key=lambda pair: int(pair[0]))],
    )
    change = f"{_hundredths(ratio['value'] - 1):+.2f}% ± {100 * ratio['error']:.2f}"
    kl = _with_error(one["kl"], 6), *(f"{value:.6f}" for value in percentiles), f"{one['kl_max']:.3f}"
    return (*head, change, *kl, _percent(one["same_top"]), _percent(one["mean_dp"]), _percent(one["rms_dp"]), speed)


def _with_error(estimate: Record, digits: int) -> str:
    return f"{estimate['value']:.{digits}f} ± {estimate['error']:.{digits}f}"


def _percent(estimate: Record) -> str:
    return f"{_hundredths(estimate['value']):.2f}% ± {100 * estimate['error']:.2f}"


def _hundredths(share: float) -> float:
    """A share in percent, rounded as it is printed: without a minus before zero."""
    return round(100 * share, 2) + 0.0


def _escaped(name: str) -> str:
    return one_line(name).replace("|", "\\|")
