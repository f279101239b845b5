"""`tinyvllm --prompt ...`: answers stream to stdout in the order of their prompts, or become JSON lines as they are ready."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvllm.cli.answers import Answer, Answers, FileAnswers, PrintedAnswers, StdoutAnswers
from tinyvllm.cli.broken import broken_reason
from tinyvllm.cli.interrupts import deferred_interrupts
from tinyvllm.cli.jsonl import BadLine, Job, key_of_job
from tinyvllm.cli.limits import TokenLimit
from tinyvllm.cli.options import engine_options, only_adapter, sampling_options
from tinyvllm.cli.progress import LoadBar, Progress, Tally, closing_line, say
from tinyvllm.cli.prompts import Prompts
from tinyvllm.config.engine import resolve
from tinyvllm.errors import ArgumentError, ModelError, RequestError, TinyvllmError
from tinyvllm.lean_imports import import_numpy
from tinyvllm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tinyvllm.engine.llm import LLM
    from tinyvllm.engine.prompt import Encoded


def run(options: argparse.Namespace) -> int:
    """Generate. All arguments and the form of all prompts are validated before anything is loaded."""
    sampling = sampling_options(options)
    check_engine_options(options)
    _check_output(options)
    prompts = Prompts(options, sampling)
    with contextlib.closing(_open_answers(options, prompts)) as answers:
        if answers.done and not options.quiet:
            say(f"{len(answers.done)} of {len(prompts)} prompts were answered by an earlier run")
        if len(answers.done) < len(prompts):
            with load(options) as llm:
                _Run(llm, prompts, answers, options).finish()
                llm.settle()  # after the answers: nothing waits for it
    return 0


def check_engine_options(options: argparse.Namespace) -> None:
    """Raise the engine's ArgumentErrors without waiting for its import."""
    fields = engine_options(options)
    only_adapter(resolve(fields.pop("model", None), **fields))


def load(options: argparse.Namespace) -> LLM:
    """Load the model, with a progress bar on a terminal.

    Nearly all objects of a start stay, and looking through them for garbage, again and again, took a seventh of it.
    """
    gc.disable()
    bar = LoadBar() if sys.stderr.isatty() and not options.quiet else None
    try:
        import_numpy()
        from tinyvllm.engine.llm import LLM

        return LLM(**engine_options(options), progress=bar)
    finally:
        gc.freeze()
        gc.enable()
        if bar is not None:
            bar.close()


def _check_output(options: argparse.Namespace) -> None:
    output, prompts = options.output, options.prompts_file
    if output is None and hasattr(options, "logprobs"):
        raise ArgumentError("--logprobs needs --output FILE.jsonl (- is stdout)")
    if output is not None and output != "-" and not output.endswith(".jsonl"):
        raise ArgumentError(f"--output must end in .jsonl, or be - for stdout, got {output!r}")
    if output is not None and prompts is not None and Path(output).resolve() == Path(prompts).resolve():
        raise ArgumentError(f"--output {output} is also --prompts-file: it would replace the prompts")


def _open_answers(options: argparse.Namespace, prompts: Prompts) -> Answers:
    if options.output is None:
        return PrintedAnswers(len(prompts))
    return StdoutAnswers() if options.output == "-" else FileAnswers(options.output, prompts.keys)


class _Run:
    """All prompts through one engine, a bounded number at a time. A prompt that fails is an error in its place."""

    def __init__(self, llm: LLM, prompts: Prompts, answers: Answers, options: argparse.Namespace):
        from tinyvllm.engine.frontend import with_adapter

        self._llm, self._prompts, self._answers, self._quiet = llm, prompts, answers, options.quiet
        self._jobs: dict[int, Job] = {}  # that are in the engine
        self._failures = 0
        self._first_failure: tuple[str, TinyvllmError] | None = None  # its source and its error
        self._limit = TokenLimit(llm.max_model_len)
        self._options = with_adapter(llm.engine, None, only_adapter(llm.config))
        self._tally = Tally()
        self._steps = llm.engine.stats.num_steps
        quiet = options.quiet or options.output is None or (options.output == "-" and sys.stdout.isatty())  # answers are progress enough
        self._progress = Progress(len(prompts), len(answers.done), "prompts", quiet)

    def finish(self) -> None:
        """Answer all prompts; the error of the first that failed. Ctrl-C ends the run between two steps, and keeps what is written."""
        from tinyvllm.engine.tools.feed import feed

        results = feed(self._llm.engine, self._requests(), 2 * self._llm.config.max_num_seqs, self._after_step, self._options)
        try:
            with contextlib.closing(self._progress), contextlib.closing(results), deferred_interrupts() as self._interrupted:
                for index, result in results:
                    self._take(index, self._jobs[index], result)
        except KeyboardInterrupt:
            if isinstance(self._answers, FileAnswers) and not self._quiet:
                total = self._progress.total
                say(f"interrupted: {self._progress.done} of {total} prompts are answered; the same command answers the others")
            raise
        if not self._quiet:
            self._say_figures()
        if self._first_failure is not None:
            raise self._failure(*self._first_failure)

    def _requests(self) -> Iterator[tuple[int, Encoded, SamplingParams]]:
        """The prompts that are not answered yet, encoded. What fails here is an answer at once."""
        from tinyvllm.engine.prompt import encode_prompt

        for index, job in self._prompts:
            if self._answers.done and key_of_job(index, job) in self._answers.done:
                continue
            try:
                if isinstance(job, BadLine):
                    raise job.error
                params = self._prompts.params(self._llm.default_params, job)
                encoded = encode_prompt(self._llm.engine.tokenizer, job.prompt)
            except TinyvllmError as error:
                self._take(index, job, error)
                continue
            params = self._limit.apply(params, len(encoded.token_ids), job.source, self._prompts.has_max_tokens(job))
            self._jobs[index] = job
            yield index, encoded, replace(params, output_kind=self._answers.output_kind)

    def _after_step(self) -> None:
        self._answers.after_step()
        self._progress.tick()
        if self._interrupted():
            raise KeyboardInterrupt

    def _take(self, index: int, job: Job | BadLine, answer: Answer) -> None:
        if isinstance(answer, TinyvllmError):
            answer = _with_source(job.source, answer)
        self._answers.take(index, job, answer)
        if isinstance(answer, RequestOutput):
            if not answer.finished:
                return
            self._tally.add(answer)
        self._jobs.pop(index, None)
        error = answer if isinstance(answer, TinyvllmError) else broken_reason(answer)
        if error is not None:
            self._failures += 1
            self._first_failure = self._first_failure or (job.source, error)
        self._progress.add(failed=error is not None)

    def _say_figures(self) -> None:
        if line := self._limit.line():
            say(line)
        if self._tally.prompts:
            say(closing_line(self._llm, self._tally, self._llm.engine.stats.num_steps - self._steps))
        if self._llm.engine.trace is not None:
            say(self._llm.engine.trace.table.text())

    def _failure(self, source: str, error: TinyvllmError) -> TinyvllmError:
        """The error of the run: that of its only prompt, or a failure (exit code 1) that names the first of several."""
        reason = str(error).removeprefix(f"{source}: ")
        if len(self._prompts) == 1:
            return type(error)(f"{source}: {reason}")
        more = f" and {self._failures - 1} more" if self._failures > 1 else ""
        return ModelError(f"{source}{more}: {reason}")


def _with_source(source: str, error: TinyvllmError) -> TinyvllmError:
    """An error that begins with the prompt's source instead of the engine's request id."""
    if str(error).startswith(f"{source}: "):
        return error
    reason = str(error).partition(": ")[2] if str(error).startswith("request ") else str(error)
    kind = RequestError if isinstance(error, (RequestError, ArgumentError)) else TinyvllmError
    return kind(f"{source}: {reason}")
