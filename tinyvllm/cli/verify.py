"""`tinyvllm verify`: compare a model's hand-written kernels with the reference, layer by layer. Exit code 1 if they diverge."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.options import engine_options
from tinyvllm.cli.progress import LoadBar, say
from tinyvllm.config.engine import resolve
from tinyvllm.errors import ArgumentError

if TYPE_CHECKING:
    from tinyvllm.engine.tools.verify import Report

HEADINGS = ("place", "own error", "largest", "drift", "worst in")
SEQUENCES, BLOCKS = 8, 128  # of the engine, whose own cache is not used: a small one leaves memory to the comparison


def run(options: argparse.Namespace) -> int:
    given = _engine_options(options)
    resolve(**given)  # reports invalid options before tinygrad is imported
    if options.steps < 0:
        raise ArgumentError(f"--steps must be 0 or more, got {options.steps}")
    if options.tolerance is not None and not options.tolerance > 0:
        raise ArgumentError(f"--tolerance must be above 0, got {options.tolerance}")
    if any(not text for text in options.prompt or ()):
        raise ArgumentError("--prompt must not be empty")
    report = _verify(options, given)
    print(json.dumps(report.record()) if options.json else "\n".join(_lines(report)))
    return 0 if report.fine else 1


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    given = {"max_num_seqs": SEQUENCES, **engine_options(options)}
    return given if "num_blocks" in given or "kv_memory" in given else {**given, "num_blocks": BLOCKS}


def _verify(options: argparse.Namespace, given: dict[str, Any]) -> Report:
    from tinyvllm.engine.llm import LLM

    if not options.quiet:
        say("verify: the reference is slow, above all the first time on a machine")
    bar = LoadBar() if sys.stderr.isatty() and not options.quiet else None
    try:
        with LLM(**given, progress=bar) as llm:
            from tinyvllm.engine.tools.verify import (
                PROMPTS,
                verify,
            )  # it imports tinygrad, which must not happen before the device is known

            return verify(llm.engine, options.prompt or PROMPTS, options.steps, options.tolerance)
    finally:
        if bar is not None:
            bar.close()


def _lines(report: Report) -> list[str]:
    rows = [HEADINGS]
    for place in report.places:
        mark = "" if place.own <= report.tolerance else "  <- beyond the tolerance"
        rows.append((place.name, f"{place.own:.1e}", f"{place.largest:.1e}", f"{place.drift:.1e}", f"{place.kind}{mark}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]
    lines.append(
        f"{len(report.kl)} positions: KL divergence of the logits {report.kl_mean:.1e} mean, {max(report.kl):.1e} max; "
        f"the most probable token is the same at {report.agreeing} of them"
    )
    return [*lines, *_verdict(report)]


def _verdict(report: Report) -> list[str]:
    if not report.kernels:
        return ["nothing to compare: the reference runs every op of this model here (see `tinyvllm kernels`)"]
    ran = "kernels: " + ", ".join(f"{stem}={row}" for stem, row in report.kernels.items())
    if report.fine:
        return [ran, f"fine: every place is within {report.tolerance:g}, as {report.format} weights allow"]
    if report.first is None:
        return [ran, f"DIVERGES: every layer is within its tolerance, but the logits' mean KL divergence is {report.kl_mean:.1e}"]
    whose = f"; on the reference it is well with {' or '.join(report.culprits)}" if report.culprits else ""
    return [ran, f"DIVERGES: {report.first} is the first beyond the tolerance of {report.tolerance:g} ({report.format} weights){whose}"]
