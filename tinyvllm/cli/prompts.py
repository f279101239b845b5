"""The prompts of `tinyvllm --prompt ... --prompts-file ...`, with their parameters. Knows no engine."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tinyvllm.cli.jsonl import BadLine, Job, key_of_job, read_prompts
from tinyvllm.cli.options import MAX_TOKENS
from tinyvllm.errors import ArgumentError, TinyvllmError
from tinyvllm.request import SamplingParams


class Prompts:
    """The prompts of a command in their order, and the keys of their answers. A file is read twice: first to check it, then to run it.

    ArgumentError or FormatError for a bad line; with --skip-bad only if no line is good.
    """

    def __init__(self, options: argparse.Namespace, sampling: Mapping[str, Any]):
        self._typed = [Job(_read_prompt(text), f"--prompt {number}") for number, text in enumerate(options.prompt or [], 1)]
        self._path: str | None = options.prompts_file
        self._sampling = {"max_tokens": MAX_TOKENS["generate"], **sampling}
        self._has_max_tokens = "max_tokens" in sampling
        self.keys: set[str] = set()
        first_error, has_good = None, False
        for index, job in self:
            self.keys.add(key_of_job(index, job))
            error = self._error_of(job)
            has_good |= error is None
            first_error = first_error or error
            if error is not None and not options.skip_bad:
                hint = "" if job in self._typed else "; --skip-bad answers the other prompts"
                raise type(error)(f"{error}{hint}")
        if not self.keys:
            raise _no_prompt(self._path)
        if first_error is not None and not has_good:
            raise first_error

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[int, Job | BadLine]]:
        return enumerate(itertools.chain(self._typed, () if self._path is None else read_prompts(self._path)))

    def params(self, default: SamplingParams, job: Job) -> SamplingParams:
        """`default`, overridden by the command line, overridden by the prompt's own line."""
        try:
            return replace(default, **{**self._sampling, **job.sampling})
        except ArgumentError as error:
            raise ArgumentError(f"{job.source}: {error}") from error

    def has_max_tokens(self, job: Job) -> bool:
        """Whether the user set max_tokens for this prompt."""
        return self._has_max_tokens or "max_tokens" in job.sampling

    def _error_of(self, job: Job | BadLine) -> TinyvllmError | None:
        if isinstance(job, BadLine):
            return job.error
        try:
            self.params(SamplingParams(), job)
        except ArgumentError as error:
            return error
        return None


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


def _no_prompt(path: str | None) -> ArgumentError:
    if path is not None:
        return ArgumentError(f"--prompts-file {path} has no prompt")
    return ArgumentError("no prompt: give --prompt TEXT or --prompts-file FILE (see also tinyvllm chat; --help lists all options)")
