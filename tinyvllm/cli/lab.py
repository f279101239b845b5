"""`tinyvllm lab`: a sweep over ways of speculation, from its description to the table."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.lines import AnswerFile, read_lines
from tinyvllm.cli.new_file import new_file
from tinyvllm.cli.options import engine_options
from tinyvllm.cli.progress import LoadBar, Progress, say
from tinyvllm.config.values import expand_home
from tinyvllm.errors import ArgumentError, OutputError, TinyvllmError, nearest, one_line

if TYPE_CHECKING:
    from tinyvllm.lab.costs import StepCosts
    from tinyvllm.lab.report import Row
    from tinyvllm.lab.run import SweepRun
    from tinyvllm.lab.sweep import Sweep
    from tinyvllm.lab.target import Target

_LISTS = {"drafters": ",", "k": ",", "policies": ";", "batch_sizes": ",", "temperatures": ",", "prompts": ","}
_NUMBERS = ("num_prompts", "max_tokens", "repeats", "warmup", "seed", "ignore_eos", "quality", "paired")
PLOT_FORMATS = ("svg", "png", "pdf")


def run(options: argparse.Namespace) -> int:
    from tinyvllm.lab.prompts import prompts_of
    from tinyvllm.lab.settings import folder_of

    if options.plot_format not in PLOT_FORMATS:
        hint = nearest(options.plot_format, PLOT_FORMATS)
        raise ArgumentError(f"--plot-format: expected one of {', '.join(PLOT_FORMATS)}, got {options.plot_format!r}{hint}")
    sweep = sweep_of(options)
    if options.traffic is not None:
        return _replay_traffic(options, sweep)
    prompts = prompts_of(sweep, folder_of(options.sweep))
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(contextlib.closing(_target_of(sweep, options)))
        target.check(sweep.cells())
        if options.plan:
            return _plan(sweep)
        output = _Results(options.output, stack)
        publish = stack.enter_context(new_file(options.table)) if options.table else None
        folder = _folder(options.plots, options.plot_format) if options.plots else None
        work = _sweep_run(sweep, target, prompts, output)
        failed = _measure(work, output, options.quiet)
        text = _report(work, folder, options.plot_format)
        if publish is not None:
            publish(text)
    print(text, end="")
    broken = _broken(work)
    return 1 if failed or broken else 0


def _sweep_run(sweep: Sweep, target: Target, prompts: Any, output: _Results) -> SweepRun:
    from tinyvllm.lab.run import SweepRun

    return SweepRun(sweep, target, prompts, output.earlier())


# --- settings


def sweep_of(options: argparse.Namespace) -> Sweep:
    """The sweep of the file, with the keys that are options replaced."""
    from tinyvllm.lab.settings import read_settings
    from tinyvllm.lab.sweep import parse_sweep

    values = read_settings(options.sweep) if options.sweep else {}
    values |= {name: getattr(options, name) for name in _NUMBERS if hasattr(options, name)}
    values |= {name: _list(name, getattr(options, name)) for name in _LISTS if hasattr(options, name)}
    if options.url:
        values["servers"] = dict(_named_url(text) for text in options.url)
    engine = engine_options(options)
    if engine:
        given = values.get("engine", {})
        if not isinstance(given, dict):
            raise ArgumentError(f"{options.sweep}: engine must be a mapping of names, got {given!r:.60}")
        if "model" in engine:
            values.pop("model", None)
        values["engine"] = given | engine
    return parse_sweep(values, options.sweep or "lab")


def _list(name: str, text: str) -> list[Any]:
    """The entries of an option, numbers as numbers; a file of prompts as its mapping."""
    entries = [part.strip() for part in text.split(_LISTS[name]) if part.strip()]
    if name in ("k", "batch_sizes"):
        return [int(one) if one.isdecimal() else one for one in entries]
    if name == "temperatures":
        return [_number(one) for one in entries]
    if name == "prompts":
        return [{"file": str(expand_home("--prompts", one).resolve())} if one.endswith(".jsonl") else one for one in entries]
    return entries


def _named_url(text: str) -> tuple[str, str]:
    """Name and URL of [NAME=]URL."""
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else ("server", text)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _target_of(sweep: Sweep, options: argparse.Namespace) -> Target:
    if sweep.fake is not None:
        from tinyvllm.lab.fake import FakeTarget

        return FakeTarget(sweep.fake)
    if sweep.servers:
        from tinyvllm.lab.http_target import HttpTarget

        return HttpTarget(sweep, options.api_key, options.served_model)
    from tinyvllm.lab.engine_target import EngineTarget

    bar = LoadBar() if sys.stderr.isatty() and not options.quiet else None
    return EngineTarget(sweep, bar)


def _replay_traffic(options: argparse.Namespace, sweep: Sweep) -> int:
    """The table of a recording with each drafter and K; the sweep's other axes do not apply."""
    from tinyvllm.engine.tools.recording import read_run
    from tinyvllm.lab.traffic import Simulation, check_lookup, costs_of, table, traffic_of

    ways = [(drafter, k) for drafter in sweep.drafters if drafter.speculates for k in sweep.k]
    for drafter, k in ways:
        check_lookup(drafter, k)
    recorded = read_run(options.traffic)
    traffic, costs = traffic_of(recorded), sweep.costs or costs_of(recorded)
    if not traffic.sequences:
        raise ArgumentError(f"--traffic {options.traffic}: no request in it has ended with output")
    if costs is None:
        raise ArgumentError(
            f"--traffic {options.traffic}: its steps of decodes have too few different numbers of rows for a cost curve; "
            "give one as `costs` in SWEEP, such as {1: 9.5, 8: 12, 32: 20}, from a sweep on that machine"
        )
    progress = Progress(len(traffic.sequences) * (1 + len(ways)), 0, "sequences", options.quiet)
    try:
        outcomes = [Simulation(traffic, costs).run(progress.add)]
        outcomes += [Simulation(traffic, costs, drafter, k).run(progress.add) for drafter, k in ways]
    finally:
        progress.close()
    print(table(outcomes))
    if traffic.skipped:
        print(f"skipped: {traffic.skipped} requests of beam search or without an end")
    return 0


def _plan(sweep: Sweep) -> int:
    cells = sweep.cells()
    print("\n".join(str(cell) for cell in cells))
    print(f"{len(cells)} cells, each {sweep.repeats} repeats")
    return 0


# --- results


class _Results:
    """`--output`: a JSON line a cell, appended to those of earlier runs."""

    def __init__(self, name: str | None, stack: contextlib.ExitStack):
        self._file: AnswerFile | None = None
        self._name = name
        if name is not None:
            if not name.endswith(".jsonl"):
                raise ArgumentError(f"--output must end in .jsonl, got {name!r}")
            self._file = AnswerFile(name, _Any(), lambda record: key if isinstance(key := record.get("key"), str) else None)
            stack.callback(self._file.close)

    def earlier(self) -> Iterator[Mapping[str, Any]]:
        """The records of the file. The last line, if it was incomplete, is not among them: opening the file has cut it off."""
        for _, line in read_lines(self._name, "--output") if self._name is not None else ():
            yield json.loads(line)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self._file.sync_if_due()


class _Any:
    """Contains every key: results of other sweeps may be in the same file."""

    def __contains__(self, key: object) -> bool:
        return True


def _measure(work: SweepRun, output: _Results, quiet: bool) -> int:
    """Measure the missing cells; the number of those that failed."""
    missing = len(work.missing)
    progress = Progress(len(work.cells), len(work.cells) - missing, "cells", quiet)

    def report(record: Mapping[str, Any]) -> None:
        output.write(record)
        if record["kind"] == "cell":
            progress.add(failed=bool(record["error"]))

    def tell(cell: object, error: TinyvllmError) -> None:
        say(f"lab: {cell}: {one_line(str(error))}")

    try:
        return work.run(report, tell)
    finally:
        progress.close()


def _broken(work: SweepRun) -> bool:
    """Whether an exact policy changed a token; a line on stderr for each."""
    from tinyvllm.lab.run import broken_promises

    broken = broken_promises(work.records)
    for record in broken:
        share = record["divergence"]["difference"]
        say(f"lab: {record['drafter']} k={record['k']} {record['policy']}, {record['prompts']}: {share:.2%} of the tokens are not those "
            "without speculation: a defect")  # fmt: skip
    return bool(broken)


def _report(work: SweepRun, folder: Path | None, kind: str) -> str:
    from tinyvllm.lab.charts import charts_of
    from tinyvllm.lab.report import rows_of, table

    rows = rows_of(work.records, work.curve)
    if folder is not None:
        _draw(folder, rows, work.curve, kind, charts_of)
    return f"{table(rows)}\n"


def _draw(folder: Path, rows: list[Row], costs: StepCosts | None, kind: str, charts_of: Any) -> None:
    from tinyvllm.lab import matplotlib_plots, svg

    charts = charts_of(rows, costs)
    pictures: Mapping[str, str | bytes] = svg.files(charts) if kind == "svg" else matplotlib_plots.files(charts, kind)
    for name, data in pictures.items():
        try:
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
        except OSError as error:
            raise OutputError(f"cannot write {folder / name}: {error.strerror or error}") from error


def _folder(name: str, kind: str) -> Path:
    """The folder for the pictures, and the library that they need, before anything is measured."""
    if kind != "svg":
        from tinyvllm.lab.matplotlib_plots import figure_type

        figure_type(kind)
    folder = expand_home("--plots", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--plots {name}: {error.strerror or error}") from error
    return folder
