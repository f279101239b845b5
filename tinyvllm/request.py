"""What a user asks and what comes back: sampling parameters, one request's sequences, outputs. Knows no text and no tensors."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Any

from tinyvllm.errors import ArgumentError

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Names, meanings and defaults are those of vLLM's class of the same name.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch the filter off. A `seed` makes the tokens a function of
    (model, prompt, parameters) alone; without one the engine draws a seed for the request.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, "a string or a list of strings")
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        for name, low, high, kind in _RANGES:
            _check_range(name, getattr(self, name), low, high, kind)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, math.inf, int)
            if self.min_tokens > self.max_tokens:
                raise ArgumentError(f"SamplingParams: min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1, int)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS, int)
        if any(not isinstance(s, str) or not s for s in stop):
            raise ArgumentError(f"SamplingParams: stop must hold non-empty strings, got {_brief(stop)}")
        if any(type(t) is not int or t < 0 for t in stop_token_ids):
            raise ArgumentError(f"SamplingParams: stop_token_ids must hold token ids, got {_brief(stop_token_ids)}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"SamplingParams: {name} must be True or False, got {_brief(getattr(self, name))}")
        _check_bias(self.logit_bias)

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)


_RANGES: tuple[tuple[str, float, float, type], ...] = (
    ("n", 1, 1024, int),
    ("temperature", 0, 100, float),
    ("top_k", -1, math.inf, int),
    ("top_p", 0, 1, float),
    ("min_p", 0, 1, float),
    ("repetition_penalty", 1e-6, 100, float),
    ("presence_penalty", -2, 2, float),
    ("frequency_penalty", -2, 2, float),
    ("min_tokens", 0, math.inf, int),
)


def _check_range(name: str, value: object, low: float, high: float, kind: type) -> None:
    number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (name == "top_p" and value == 0):  # type: ignore[operator]
        article = "an integer" if kind is int else "a number"
        bounds = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
        above = " (above 0)" if name == "top_p" else ""
        raise ArgumentError(f"SamplingParams: {name} must be {article} {bounds}{above}, got {_brief(value)}")


def _as_tuple(name: str, value: object, expected: str) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, (list, tuple)):
        raise ArgumentError(f"SamplingParams: {name} must be {expected}, got {_brief(value)}")
    return tuple(value or ())


def _check_bias(biases: object) -> None:
    if biases is not None and not isinstance(biases, dict):
        raise ArgumentError(f"SamplingParams: logit_bias must be a dict of token ids and values, got {_brief(biases)}")
    for token, bias in (biases or {}).items():
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if type(token) is not int or token < 0 or not number or not -100 <= bias <= 100:
            got = f"{_brief(token)}: {_brief(bias)}"
            raise ArgumentError(f"SamplingParams: logit_bias maps token ids to values in [-100, 100], got {got}")


def _brief(value: object) -> str:
    """A value as a message shows it: in one line, not all of it if it is long."""
    return " ".join(f"{value!r:.80}".split())


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One line of tokens being continued. The scheduler owns `status`, `block_table` and `num_computed`; the engine appends tokens.

    `num_computed` counts the tokens whose keys and values lie in the cache: the scheduler sets it back to 0 on preemption and
    everything, prompt and output alike, is then computed again.
    """

    sequence_id: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0  # which of the request's n
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    row: int = -1  # the row of sampling state held while running

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of prompt and output joined, without building the whole list."""
        prompt = len(self.prompt_token_ids)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(0, start - prompt) : max(0, stop - prompt)]

    def token_at(self, position: int) -> int:
        """One token of prompt and output joined."""
        prompt = len(self.prompt_token_ids)
        return self.prompt_token_ids[position] if position < prompt else self.output_token_ids[position - prompt]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability under the unmodified logits, and its rank (1 is the most probable)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One continuation. `text` and `token_ids` grow until `finish_reason` is "stop", "length", "abort", or "error" for broken logits.

    `stop_reason` is the stop string or stop token id that ended it, None for the end-of-sequence token or a full length.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestMetrics:
    """Seconds on the engine's monotonic clock; None until it happened."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0


@dataclass
class RequestOutput:
    """All continuations of one prompt, so far (`finished` False) or for good."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
