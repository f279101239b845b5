"""`tinyvllm batch IN.jsonl -o OUT.jsonl`: OpenAI's batch files without a server. Each line goes through the server's handlers, in process.

Each answer is in OUT.jsonl at once: after a kill, the same command computes only the missing ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.batch_file import check_input, custom_id_of, is_failed, read_requests
from tinyvllm.cli.lines import MAX_LINE, SYNC_SECONDS, AnswerFile
from tinyvllm.cli.options import engine_options
from tinyvllm.cli.progress import Progress, say
from tinyvllm.cli.serve import check_adapters, check_profile, model_specs, say_profile
from tinyvllm.config.engine import resolve
from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.batch_lines import Line, answer_line
from tinyvllm.server.core.local_call import RETRY_STATUS, call

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tinyvllm.metrics import EnergyTotals

_ATTEMPTS = 10
_MAX_PAUSE = 30.0  # seconds before a request is tried again


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if requests failed, in this run or an earlier one; their lines have the reasons."""
    specs = model_specs(getattr(options, "model", None), options.served_model_name, engine_options(options))
    check_profile(specs)
    check_adapters([*specs], specs)
    for spec in specs.values():
        resolve(**spec)
    if options.concurrency is not None and options.concurrency < 1:
        raise ArgumentError(f"--concurrency must be 1 or more, got {options.concurrency}")
    if Path(options.output).resolve() == Path(options.input).resolve():
        raise ArgumentError(f"--output {options.output} is also the input")
    wanted = check_input(options.input)
    try:
        import tinyvllm.server.http.app  # noqa: F401  before anything is written
    except ImportError as error:
        raise ArgumentError(f"batch needs the packages of the extra 'server': pip install 'tinyvllm[server]' ({error})") from error
    output = AnswerFile(options.output, wanted, custom_id_of, is_failed)
    progress = Progress(len(wanted), len(output.done), "requests", options.quiet, failed=output.failed)
    try:
        if output.done and not options.quiet:
            say(_resumed_line(output, len(wanted)))
        return asyncio.run(_answer_all(options, specs, output, progress))
    except KeyboardInterrupt:
        progress.close()
        if not options.quiet:
            say(f"interrupted: {progress.done} of {progress.total} requests are answered; the same command answers the others")
        raise
    finally:
        progress.close()
        output.close()


@dataclass
class Tally:
    """Counts of a run."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    energy: list[EnergyTotals] = field(default_factory=list)  # of each model

    def add(self, status: int, body: Any) -> None:
        self.answered += 1
        self.failed += status >= 400
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


async def _answer_all(options: argparse.Namespace, specs: Mapping[str, Mapping[str, Any]], output: AnswerFile, progress: Progress) -> int:
    from tinyvllm.server.core.config import ServerConfig
    from tinyvllm.server.core.models import Models
    from tinyvllm.server.http.app import create_app

    if progress.done == progress.total:
        return 1 if output.failed else 0
    waiting = (line for line in read_requests(options.input) if line.custom_id not in output.done)
    models = Models(specs)
    models.on_unload = partial(say_profile, options.quiet)
    config = ServerConfig(lenient=getattr(options, "lenient", False), access_log=False, beat_seconds=3600.0, max_body=MAX_LINE)
    app, _ = create_app(config, models)
    tally, start = Tally(), time.monotonic()
    try:
        await models.start()
        start = time.monotonic()
        workers = options.concurrency or 2 * max(resolve(**spec).all_seqs for spec in specs.values())
        await _run_workers(min(workers, progress.total - progress.done), app, waiting, output, tally, progress)
        tally.energy = [totals for llm in models.loaded().values() if (totals := await llm.energy()) is not None]
    finally:
        await models.close()
    progress.close()
    if not options.quiet:
        say(_closing_line(tally, time.monotonic() - start))
    return 1 if tally.failed or output.failed else 0


async def _run_workers(count: int, app: ASGIApp, waiting: Iterator[Line], output: AnswerFile, tally: Tally, progress: Progress) -> None:
    """Answer all lines. An error of a worker or of the disk stops all of them."""
    try:
        async with asyncio.TaskGroup() as group:
            ticker = group.create_task(_tick(output, progress))
            workers = [group.create_task(_work(app, waiting, output, tally, progress)) for _ in range(count)]
            await asyncio.wait(workers)
            ticker.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _tick(output: AnswerFile, progress: Progress) -> None:
    """Every SYNC_SECONDS: bring answers to the disk, and show the progress."""
    while True:
        await asyncio.sleep(SYNC_SECONDS)
        await asyncio.to_thread(output.sync_if_due)
        progress.tick()


async def _work(app: ASGIApp, waiting: Iterator[Line], output: AnswerFile, tally: Tally, progress: Progress) -> None:
    """Answer lines until none is left; workers share the iterator."""
    for line in waiting:
        status, request_id, body = await _answer(app, line)
        output.write(answer_line(line.custom_id, status, request_id, body))
        tally.add(status, body)
        progress.add(failed=status >= 400)


async def _answer(app: ASGIApp, line: Line) -> tuple[int, str, Any]:
    """(status, request id, body). A request that is refused for want of room is tried again later."""
    for attempt in range(_ATTEMPTS):
        status, headers, raw = await call(app, line.url, json.dumps(line.body).encode())
        if status not in RETRY_STATUS or attempt == _ATTEMPTS - 1:
            break
        await asyncio.sleep(min(_MAX_PAUSE, max(0.05 * 2**attempt, float(headers.get("retry-after", 0)))))
    return status, headers.get("x-request-id", ""), json.loads(raw)


def _resumed_line(output: AnswerFile, total: int) -> str:
    line = f"{len(output.done)} of {total} requests were answered by an earlier run"
    return f"{line}, {output.failed} of them with an error: to have these tried again, delete their lines" if output.failed else line


def _closing_line(tally: Tally, seconds: float) -> str:
    failed = f", {tally.failed} failed" if tally.failed else ""
    tokens = f"{tally.prompt_tokens} prompt + {tally.completion_tokens} generated tokens"
    energy = "".join(f"; {totals.sentence(tally.completion_tokens)}" for totals in tally.energy)
    rate = tally.completion_tokens / max(seconds, 1e-9)
    return f"{tally.answered} requests{failed}, {tokens} in {seconds:.2f} s, {rate:.1f} tok/s{energy}"
