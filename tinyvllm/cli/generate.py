"""`tinyvllm --prompt ...`: one prompt streams to stdout; many run together and are printed, or written as JSON lines, when all are done."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.arguments import MAX_TOKENS, engine_options, sampling_options
from tinyvllm.cli.figures import LoadBar, closing_line, say
from tinyvllm.cli.jsonl import Job, new_file, read_prompts, result
from tinyvllm.config import resolve
from tinyvllm.errors import ArgumentError, RequestError
from tinyvllm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tinyvllm.engine.llm import LLM


def run(options: argparse.Namespace) -> int:
    """Everything that can be wrong with the arguments is found before anything is loaded."""
    sampling = {"max_tokens": MAX_TOKENS["generate"], **sampling_options(options)}
    check_engine_options(options)
    _check_output(options)
    jobs = _read_jobs(options)
    for job in jobs:
        _params(SamplingParams(), sampling, job)
    if options.output is None:
        with load(options) as llm:
            return _print_answers(llm, jobs, sampling, options.quiet)
    with new_file(options.output) as publish, load(options) as llm:
        outputs = _generate(llm, jobs, sampling, options.quiet)
        publish("".join(result(job, output) + "\n" for job, output in zip(jobs, outputs, strict=True)))
        _close(llm, outputs, options.quiet)
    return 0


def check_engine_options(options: argparse.Namespace) -> None:
    """Refuse what the engine would refuse, without waiting for it to be imported."""
    given = engine_options(options)
    resolve(given.pop("model", None), **given)


def load(options: argparse.Namespace) -> LLM:
    """The model, behind a bar on a terminal."""
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
        raise ArgumentError("--logprobs needs --output FILE.jsonl to go to (- is stdout)")
    if output is not None and output != "-" and not output.endswith(".jsonl"):
        raise ArgumentError(f"--output must end in .jsonl, or be - for stdout, got {output!r}")
    if output is not None and prompts is not None and Path(output).resolve() == Path(prompts).resolve():
        raise ArgumentError(f"--output {output} is also --prompts-file: it would replace the prompts")


def _read_jobs(options: argparse.Namespace) -> list[Job]:
    jobs = [Job(_read_prompt(text), f"--prompt {number}") for number, text in enumerate(options.prompt or [], 1)]
    if options.prompts_file is not None:
        jobs += read_prompts(options.prompts_file)
    if not jobs:
        raise ArgumentError("nothing to do: give --prompt TEXT or --prompts-file FILE (tinyvllm chat talks, --help lists all options)")
    return jobs


def _read_prompt(text: str) -> str:
    if text == "-":
        text = sys.stdin.read().removesuffix("\n")
        if not text:
            raise ArgumentError("--prompt - found nothing on stdin")
    try:
        text.encode()
    except UnicodeEncodeError:  # how Python carries bytes of an argument that are not UTF-8
        raise ArgumentError(f"--prompt is not UTF-8 text: {text!r:.60}") from None
    return text


def _params(default: SamplingParams, sampling: Mapping[str, Any], job: Job) -> SamplingParams:
    """The model's recommendation, overridden by the command line, overridden by the prompt's own line."""
    try:
        return replace(default, **{**sampling, **job.sampling})
    except (ArgumentError, TypeError) as error:
        raise ArgumentError(f"{job.source}: {error}") from error


def _generate(llm: LLM, jobs: list[Job], sampling: Mapping[str, Any], quiet: bool) -> list[RequestOutput]:
    from tinyvllm.engine.prompt import PromptError

    params = [_params(llm.default_params, sampling, job) for job in jobs]
    try:
        return llm.generate([job.prompt for job in jobs], params, use_tqdm=len(jobs) > 1 and sys.stderr.isatty() and not quiet)
    except PromptError as error:
        raise RequestError(f"{jobs[error.index].source}: {error.reason}") from error


def _print_answers(llm: LLM, jobs: list[Job], sampling: Mapping[str, Any], quiet: bool) -> int:
    params = _params(llm.default_params, sampling, jobs[0])
    if len(jobs) == 1 and params.n == 1:
        outputs = [_stream(llm, jobs[0], params)]
    else:
        outputs = _generate(llm, jobs, sampling, quiet)
        for job, output in zip(jobs, outputs, strict=True):
            for part in output.outputs:
                print(f"=== {_title(job)}" + (f" ({part.index + 1}/{len(output.outputs)})" if len(output.outputs) > 1 else ""))
                print(part.text)
    _close(llm, outputs, quiet)
    return 0


def _title(job: Job) -> str:
    """The prompt on one line, not all of it if it is long."""
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


def _close(llm: LLM, outputs: list[RequestOutput], quiet: bool) -> None:
    if not quiet:
        say(closing_line(llm, outputs))
