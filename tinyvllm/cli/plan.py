"""`tinyvllm plan`: what a model takes in memory, what fits, which kernels run and how fast, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from tinyvllm.cli.kernels import HEADINGS
from tinyvllm.cli.options import engine_options
from tinyvllm.cli.tables import table
from tinyvllm.config.engine import resolve
from tinyvllm.config.values import parse_size

if TYPE_CHECKING:
    from tinyvllm.engine.tools.plan import Plan, Speed
    from tinyvllm.engine.tools.plan_sizes import Sizes


def run(options: argparse.Namespace) -> int:
    config = resolve(**engine_options(options))
    memory = None if options.memory is None else parse_size("--memory", options.memory)
    from tinyvllm.engine.frontend import plan_engine

    plan = plan_engine(config, memory, options.speed)
    print(json.dumps(plan.record()) if options.json else "\n".join(lines_of(plan)))
    return 0 if plan.sizes.refusal is None else 1


def lines_of(plan: Plan) -> list[str]:
    """The plan as text."""
    formats = ", ".join(f"{name} {size_of(nbytes)}" for name, nbytes in plan.formats.items())
    lines = [f"{plan.model} on {plan.device} ({plan.architecture})", "", f"weights  {formats}", *_memory(plan.sizes), ""]
    lines += [
        "what fits at the same time",
        *table(("sequences", "longest context"), [(f.sequences, f.context) for f in plan.sizes.fits]),
        "",
    ]
    lines += [*_candidates(plan.sizes), "", *_speed(plan.speed, plan.unpredicted), ""]
    rows = [(one.op, one.shape, one.variant, one.why) for one in plan.kernels]
    return [*lines, *table(HEADINGS, rows), *plan.skipped]


def _memory(sizes: Sizes) -> list[str]:
    m = sizes.memory
    rows: list[tuple[object, ...]] = [
        ("weights", size_of(m.weights)),
        ("KV cache", f"{m.kv_token} bytes a token"),
        ("scratch", size_of(m.scratch)),
        ("running", size_of(m.run)),
        *([("drafter", size_of(m.drafter))] if m.drafter else []),
        ("available", f"{size_of(m.available)} ({m.limit})"),
    ]
    start, lines = sizes.start, [*table(("memory", ""), rows), *_ranks(sizes)]
    if start is None:
        return [*lines, f"an engine would not start: {sizes.refusal}"]
    cache = f"{start.num_blocks} KV blocks, {size_of(start.kv_bytes)}; the longest sequence has {start.max_model_len} tokens"
    return [*lines, f"an engine with these options takes {cache}"]


def _ranks(sizes: Sizes) -> list[str]:
    """What each of several ranks takes of the weights and the KV cache."""
    headings: tuple[str, ...] = ("rank", "layers", "weights", "KV cache")
    rows: list[tuple[object, ...]] = []
    for one in sizes.ranks:
        device = () if one.free is None else (one.device, size_of(one.free))
        rows.append((one.rank, f"{one.layers[0]} to {one.layers[1] - 1}", size_of(one.weights), f"{one.kv_token} bytes a token", *device))
    if any(one.free is not None for one in sizes.ranks):
        headings += ("device", "available")
    return ["", *table(headings, rows), ""] if rows else []


def _candidates(sizes: Sizes) -> list[str]:
    rows = [
        (one.quantization or "as in the file", size_of(one.weights), one.longest, "yes" if one.fits else "no") for one in sizes.candidates
    ]
    best = sizes.best
    name = "none" if best is None else "as in the file" if best.quantization is None else f"--quantization {best.quantization}"
    headings = "quantization", "weights", "longest context", f"one sequence of {sizes.wanted_context} tokens fits"
    return [*table(headings, rows), f"the most bits that fit: {name}"]


def _speed(speed: Speed | None, unpredicted: str | None) -> list[str]:
    if speed is None:
        return [f"no speed is predicted: {unpredicted}"]
    rows = [
        ("decode, 1 sequence", f"{speed.decode:.1f}"),
        (f"decode, {speed.sequences} sequences", f"{speed.decode_all:.1f}"),
        ("prompt", f"{speed.prompt:.0f}"),
    ]
    roof = f"memory is read at {speed.read_bytes_per_second / 1e9:.1f} GB/s"
    return table((f"predicted with {speed.context} tokens of context", f"tok/s; {roof}"), rows)


def size_of(nbytes: int) -> str:
    """ "13.4 MB", "1.50 GB" or, below a megabyte, bytes."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB" if nbytes >= 10**6 else f"{nbytes} bytes"
