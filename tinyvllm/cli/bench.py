"""`tinyvllm bench`: tokens a second of prompts and of decoding, in the tests of llama-bench, each next to what the machine allows."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.options import engine_options
from tinyvllm.cli.progress import Progress
from tinyvllm.config.engine import default_block_size
from tinyvllm.errors import ArgumentError
from tinyvllm.version import VERSION

if TYPE_CHECKING:
    from tinyvllm.engine.llm import LLM
    from tinyvllm.engine.tools.bench import Speed, Workload

MAX_TOKENS, MAX_BATCH, MAX_TESTS, MAX_REPETITIONS = 1 << 20, 1024, 256, 1000
COLUMNS = ("test", "tok/s", "roof", "share of roof")
Record = dict[str, Any]


def run(options: argparse.Namespace) -> int:
    tests = wanted_tests(options)
    write = FORMATS.get(options.output_format)
    if write is None:
        raise ArgumentError(f"--output-format: {options.output_format!r} is not one of {', '.join(FORMATS)}")
    if not 1 <= options.repetitions <= MAX_REPETITIONS:
        raise ArgumentError(f"--repetitions: expected 1 to {MAX_REPETITIONS}, got {options.repetitions}")
    from tinyvllm.engine.llm import LLM
    from tinyvllm.engine.tools.bench import bench_options

    given = engine_options(options)
    limits = bench_options(tests, given.get("block_size") or default_block_size(given.get("context_parallel_size", 1)))
    with LLM(**given, **limits, speculative_config="off", skip_tokenizer_init=True) as llm:
        records = [*measured(llm, tests, options)]
    sys.stdout.write(write(records))
    return 0


def measured(llm: LLM, tests: list[Workload], options: argparse.Namespace) -> Iterator[Record]:
    """A record a test, with a progress bar on stderr."""
    from tinyvllm.engine.tools.bench import roofs, run_tests

    roof, progress = roofs(llm, tests), Progress(len(tests), 0, "tests", options.quiet)
    try:
        for speed in run_tests(llm, tests, options.repetitions):
            yield record(llm, speed, roof[speed.test])
            progress.add()
    finally:
        progress.close()


def wanted_tests(options: argparse.Namespace) -> list[Workload]:
    """Every depth with every batch: prompts, then decodes. ArgumentError for numbers out of their range, and for no test."""
    from tinyvllm.engine.tools.bench import Workload

    prompts, decodes, depths = (
        numbers(flag, text, 0, MAX_TOKENS)
        for flag, text in (("--n-prompt", options.n_prompt), ("--n-gen", options.n_gen), ("--n-depth", options.n_depth))
    )
    batches = numbers("--batch", options.batch, 1, MAX_BATCH)
    tests = [
        Workload(*tokens, depth, batch)
        for depth in depths
        for batch in batches
        for tokens in (*((count, 0) for count in prompts if count), *((0, count) for count in decodes if count))
    ]
    if not 1 <= len(tests) <= MAX_TESTS:
        raise ArgumentError(f"bench: expected 1 to {MAX_TESTS} tests, got {len(tests)} of -p {options.n_prompt} and -n {options.n_gen}")
    return tests


def numbers(flag: str, text: str, low: int, high: int) -> list[int]:
    """Whole numbers, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    found = [int(word) if word.isascii() and word.isdigit() and len(word) < 12 else -1 for word in words]
    if any(not low <= number <= high for number in found):
        raise ArgumentError(f"{flag}: expected numbers from {low} to {high}, separated by commas, got {text[:60]!r}")
    return found


def record(llm: LLM, speed: Speed, roof: float | None) -> Record:
    """One test's figures, and of what."""
    engine, test = llm.engine, speed.test
    runner, config = engine.runner, engine.config
    what = {"version": VERSION, "model": Path(config.model).name, "device": config.device_names, "num_threads": runner.num_threads()}
    size = {
        "weight_bytes": runner.weight_bytes,
        "kv_cache_dtype": config.kv_cache_dtype,
        "dtype": str(runner.dtype).removeprefix("dtypes."),
    }
    shape = {"test": test.name, "n_prompt": test.prompt, "n_gen": test.decoded, "n_depth": test.depth, "batch": test.batch}
    share = None if roof is None else speed.mean / roof
    figures = {"tok_s": speed.mean, "deviation": speed.deviation, "rates": list(speed.rates), "roof_tok_s": roof, "share": share}
    return what | size | shape | figures


def as_markdown(records: Sequence[Record]) -> str:
    """What was measured, in a line, and a table."""
    first = records[0]
    what = f"{first['model']}, {first['weight_bytes'] / 1e6:.1f} MB of weights, {first['dtype']}, KV cache {first['kv_cache_dtype']}"
    where = f"{first['device']}, {first['num_threads']} threads, tinyvllm {first['version']}"
    rows = [COLUMNS, *(_cells(one) for one in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) + " |" for row in rows
    ]
    rule = "|" + "|".join([":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([f"{what}; {where}", "", lines[0], rule, *lines[1:], ""])


def _cells(one: Record) -> tuple[str, ...]:
    roof = ("", "") if one["roof_tok_s"] is None else (f"{one['roof_tok_s']:.1f}", f"{one['share']:.2f}")
    return one["test"], f"{one['tok_s']:.2f} ± {one['deviation']:.2f}", *roof


def as_json(records: Sequence[Record]) -> str:
    return json.dumps(list(records), indent=1) + "\n"


def as_csv(records: Sequence[Record]) -> str:
    text = io.StringIO()
    rows = [{key: value for key, value in one.items() if key != "rates"} for one in records]
    writer = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


FORMATS: dict[str, Callable[[Sequence[Record]], str]] = {"md": as_markdown, "json": as_json, "csv": as_csv}
