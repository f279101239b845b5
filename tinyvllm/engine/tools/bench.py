"""Tokens a second of prompts and of decoding, at a depth and a number of sequences, as `tinyvllm bench` reports them.

The tests are those of llama.cpp's llama-bench, by its names: pp512 is a prompt of 512 tokens, tg128 the decoding of 128, `@ d4096` after a
context of 4096 tokens that is in the cache; `x16` is for 16 sequences together. Greedy, with random token ids; drafts are off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm.engine.tools.stepping import Stepping
from tinyvllm.errors import KernelError, ToolchainError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.runner.opened import open_model
from tinyvllm.runner.planned import StepTimes, measured_times, streamed_matrices

if TYPE_CHECKING:
    from tinyvllm.engine.llm import LLM


@dataclass(frozen=True)
class Workload:
    """What is timed: `prompt` or `decoded` tokens (the other is 0) of each of `batch` sequences, after `depth` tokens."""

    prompt: int
    decoded: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        what = f"pp{self.prompt}" if self.prompt else f"tg{self.decoded}"
        return what + (f" @ d{self.depth}" if self.depth else "") + (f" x{self.batch}" if self.batch > 1 else "")

    @property
    def length(self) -> int:
        """The context that a sequence needs: it must not end in the last step that is timed."""
        return max(self.depth, 1) + self.prompt + self.decoded + 3  # the first token, one untimed step, and one token that is not decoded

    @property
    def context(self) -> float:
        """Tokens in the KV cache of a sequence, on average over the test."""
        return self.depth + (self.prompt + self.decoded) / 2


@dataclass(frozen=True)
class Speed:
    """Tokens a second of all sequences together, a repetition each."""

    test: Workload
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.rates)

    @property
    def deviation(self) -> float:
        return stdev(self.rates) if len(self.rates) > 1 else 0.0


def bench_options(tests: list[Workload], block_size: int) -> dict[str, Any]:
    """Limits of an engine that every test fits: its context, its sequences, and the blocks for both."""
    longest = max(test.length for test in tests)
    blocks = max(test.batch * (-(-test.length // block_size) + 1) for test in tests)
    return dict(max_model_len=longest, max_num_seqs=max(test.batch for test in tests), num_blocks=blocks + 1)


def run_tests(llm: LLM, tests: list[Workload], repetitions: int) -> Iterator[Speed]:
    """Each test once untimed, which captures its steps, and then `repetitions` times."""
    timer = _Timer(llm)
    for test in tests:
        timer.run(test)
        yield Speed(test, tuple(timer.run(test) for _ in range(repetitions)))


class _Timer:
    def __init__(self, llm: LLM):
        self._stepping, self._vocabulary = Stepping(llm), llm.engine.runner.config.vocab_size
        self._cache, self._block = llm.engine.scheduler.prefix, llm.engine.config.block_size
        self._random = np.random.default_rng(0)

    def run(self, test: Workload) -> float:
        """Tokens a second. RuntimeError if a step failed."""
        return self._prompts(test) if test.prompt else self._decodes(test)

    def _prompts(self, test: Workload) -> float:
        """From the arrival of the prompts to the first token of the last. What the prefix cache has of them does not count."""
        contexts = [self._ids(test.depth) for _ in range(test.batch)]
        if test.depth:
            self._stepping.prefill(*contexts)
        prompts = [context + self._ids(test.prompt) for context in contexts]
        computed = sum(len(ids) - self._cached(ids) for ids in prompts)
        start = time.perf_counter()
        self._stepping.prefill(*prompts)
        return computed / (time.perf_counter() - start)

    def _cached(self, ids: list[int]) -> int:
        """The tokens of a prompt that are in the prefix cache."""
        return 0 if self._cache is None else self._cache.known(self._cache.hash_blocks(ids)) * self._block

    def _decodes(self, test: Workload) -> float:
        self._stepping.begin([self._ids(max(test.depth, 1)) for _ in range(test.batch)])
        self._stepping.steps(1)
        start = time.perf_counter()
        self._stepping.steps(test.decoded)
        seconds = time.perf_counter() - start
        self._stepping.stop()
        return test.batch * test.decoded / seconds

    def _ids(self, count: int) -> list[int]:
        """Random token ids: nothing of them is in the prefix cache."""
        return [int(i) for i in self._random.integers(0, self._vocabulary, count)]


def roofs(llm: LLM, tests: list[Workload]) -> dict[Workload, float | None]:
    """Tokens a second that the machine's roof allows. Decoding reads its bytes as fast as the device reads memory: the weights once a step,
    and each sequence's context. A prompt is multiplied as fast as 256 rows of each format of the weights were; None where the reference
    multiplies a format, no compiler is there, or several ranks share the machine.
    """
    config = llm.engine.config
    if config.num_ranks > 1:
        return dict.fromkeys(tests)
    opened = open_model(config, config.device)
    try:
        times = measured_times(streamed_matrices(opened.outline().held), opened, again=True)
    except (KernelError, ToolchainError):
        return dict.fromkeys(tests)
    weights = llm.engine.model_bytes_per_token
    return {test: _prompt_roof(times, test) if test.prompt else _decode_roof(times, weights, test) for test in tests}


def _prompt_roof(times: StepTimes, test: Workload) -> float:
    return test.prompt / times.prompt(test.prompt, test.depth)


def _decode_roof(times: StepTimes, weights: int, test: Workload) -> float:
    nbytes = weights + test.batch * test.context * times.kv_token_bytes
    return test.batch * times.roof.bandwidth / nbytes
