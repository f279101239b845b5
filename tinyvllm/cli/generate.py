"""`tinyvllm --prompt ...`: a single prompt streams to stdout; several run together, printed or written as JSON lines at the end."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.arguments import MAX_TOKENS, engine_options, sampling_options
from tinyvllm.cli.broken import is_broken, no_logits
from tinyvllm.cli.jsonl import Job, new_file, read_prompts, result
from tinyvllm.cli.progress import LoadBar, closing_line, say
from tinyvllm.config import resolve
from tinyvllm.errors import ArgumentError, RequestError
from tinyvllm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tinyvllm.engine.llm import LLM


def run(options: argparse.Namespace) -> int:
    """Generate. All arguments are validated before anything is loaded."""
    sampling = {"max_tokens": MAX_TOKENS["generate"], **sampling_options(options)}
    check_engine_options(options)
    _check_output(options)
    jobs = _read_jobs(options)
    for job in jobs:
        _params(SamplingParams(), sampling, job)
    file: AbstractContextManager[Callable[[str], None] | None]
    file = contextlib.nullcontext() if options.output is None else new_file(options.output)
    with file as publish, load(options) as llm:
        steps = llm.engine.stats.num_steps
        if publish is None:
            outputs = _print_answers(llm, jobs, sampling, options.quiet)
        else:
            outputs = _generate(llm, jobs, sampling, options.quiet)
            publish("".join(result(job, output) + "\n" for job, output in zip(jobs, outputs, strict=True)))
        if not options.quiet:
            say(closing_line(llm, outputs, llm.engine.stats.num_steps - steps))
    broken = [job.source for job, output in zip(jobs, outputs, strict=True) if is_broken(output)]
    if broken:
        raise no_logits(broken[0] + (f" and {len(broken) - 1} more" if len(broken) > 1 else ""))
    return 0


def check_engine_options(options: argparse.Namespace) -> None:
    """Raise the engine's ArgumentErrors without waiting for its import."""
    fields = engine_options(options)
    resolve(fields.pop("model", None), **fields)


def load(options: argparse.Namespace) -> LLM:
    """Load the model, with a progress bar on a terminal."""
    from tinyvllm.engine.llm import LLM

    bar = LoadBar() if sys.stderr.isatty() and not options.quiet else None
    try:
        return LLM(**engine_options(options), progress=bar)
    finally:
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


def _read_jobs(options: argparse.Namespace) -> list[Job]:
    jobs = [Job(_read_prompt(text), f"--prompt {number}") for number, text in enumerate(options.prompt or [], 1)]
    if options.prompts_file is not None:
        jobs += read_prompts(options.prompts_file)
    if not jobs:
        raise ArgumentError("no prompt: give --prompt TEXT or --prompts-file FILE (see also tinyvllm chat; --help lists all options)")
    return jobs


def _read_prompt(text: str) -> str:
    if text == "-":
        text = sys.stdin.read().removesuffix("\n")
        if not text:
            raise ArgumentError("--prompt -: stdin is empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # Python carries bytes of an argument that are not UTF-8 as surrogates
        raise ArgumentError(f"--prompt is not UTF-8 text: {text!r:.60}") from None
    return text


def _params(default: SamplingParams, sampling: Mapping[str, Any], job: Job) -> SamplingParams:
    """The model's recommendation, overridden by the command line, overridden by the prompt's own line."""
    try:
        return replace(default, **{**sampling, **job.sampling})
    except ArgumentError as error:
        raise ArgumentError(f"{job.source}: {error}") from error


def _generate(llm: LLM, jobs: list[Job], sampling: Mapping[str, Any], quiet: bool) -> list[RequestOutput]:
    from tinyvllm.engine.prompt import PromptError

    params = [_params(llm.default_params, sampling, job) for job in jobs]
    try:
        return llm.generate([job.prompt for job in jobs], params, use_tqdm=len(jobs) > 1 and sys.stderr.isatty() and not quiet)
    except PromptError as error:
        raise RequestError(f"{jobs[error.index].source}: {error.reason}") from error


def _print_answers(llm: LLM, jobs: list[Job], sampling: Mapping[str, Any], quiet: bool) -> list[RequestOutput]:
    params = _params(llm.default_params, sampling, jobs[0])
    if len(jobs) == 1 and params.n == 1:
        return [_stream(llm, jobs[0], params)]
    outputs = _generate(llm, jobs, sampling, quiet)
    for job, output in zip(jobs, outputs, strict=True):
        for part in output.outputs:
            print(f"=== {_title(job)}" + (f" ({part.index + 1}/{len(output.outputs)})" if len(output.outputs) > 1 else ""))
            print(part.text)
    return outputs


def _title(job: Job) -> str:
    """The prompt on one line, shortened."""
    text = " ".join(job.prompt.split()) if isinstance(job.prompt, str) else job.source
    return text if len(text) <= 70 else text[:67] + "..."


def _stream(llm: LLM, job: Job, params: SamplingParams) -> RequestOutput:
    shown = 0
    for output in llm.follow(job.prompt, params):
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")
    return output
