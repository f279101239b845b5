"""`tinyvllm replay`: run a recording again; prints that it is identical, or where it diverges (exit code 1)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tinyvllm.cli.options import engine_options
from tinyvllm.cli.progress import say

if TYPE_CHECKING:
    from tinyvllm.engine.tools.comparison import Outcome

MAX_SHOWN = 4  # entries of a step


def run(options: argparse.Namespace) -> int:
    from tinyvllm.engine.tools.recording import read_run
    from tinyvllm.engine.tools.replay import config_of, replay

    recorded = read_run(options.file)
    config = config_of(recorded, engine_options(options))
    remark = (lambda text: None) if options.quiet else (lambda text: say(f"replay: {text}"))
    outcome = replay(recorded, config, options.tokens_only, remark)
    print("\n".join(_lines(outcome)))
    return 0 if outcome.identical else 1


def _lines(outcome: Outcome) -> list[str]:
    notes = []
    if outcome.skipped:
        notes.append(f"skipped, because logits processors cannot be recorded: {', '.join(outcome.skipped)}")
    if outcome.refused:
        notes.append(f"{outcome.refused} requests were refused when it was recorded, and were not sent again")
    if outcome.identical:
        return [f"identical: {outcome.requests} requests, {outcome.tokens} tokens", *notes]
    lines = []
    if outcome.step is not None:
        lines.append(f"DIVERGES: the schedule of step {outcome.step}: expected {_shown(outcome.expected)}, got {_shown(outcome.got)}")
    if (d := outcome.difference) is not None:
        step = "" if d.step is None else f", of step {d.step}"
        where = f"request {d.request_id}, continuation {d.continuation}, token {d.index}{step}"
        lines.append(f"DIVERGES: {where}: expected {d.expected}, got {d.got}")
    elif outcome.step is not None:
        lines.append(f"the tokens are identical: {outcome.requests} requests, {outcome.tokens} tokens")
    return [*lines, *notes]


def _shown(entries: list[tuple[str, int, int, int]]) -> str:
    parts = [f"{name}[{index}] {start}..{start + count}" for name, index, start, count in entries[:MAX_SHOWN]]
    more = [f"{len(entries) - MAX_SHOWN} more"] if len(entries) > MAX_SHOWN else []
    return ", ".join([*parts, *more]) or "nothing"
