"""How to continue a prompt: sampling, structure, beams. No text and no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request.limits import MAX_COUNT, MAX_LOGPROB_TOKEN_IDS, MAX_TOKEN_IDS, MAX_WORD_LENGTH, MAX_WORDS, MAX_WORDS_LENGTH, brief

if TYPE_CHECKING:
    import numpy as np

MAX_LOGPROBS = 20
ALL_LOGPROBS = -1  # the whole vocabulary
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
MIN_TEMPERATURE = 1e-5  # lower temperatures are greedy: logits divided by less leave float32
OUTPUT_KINDS = ("cumulative", "delta", "final_only")
REASONING_BEGINS = ("before", "inside", "after")

T = TypeVar("T", "StructuredOutputsParams", "ReasoningParams")

# (prompt token ids, output token ids so far, logits float32 [V]) -> logits float32 [V], the same array changed or another one. Called once
# a token on the host, before penalties, masks and filters. An exception ends its request alone, with finish_reason "error".
LogitsProcessor = Callable[[list[int], list[int], "np.ndarray"], "np.ndarray"]


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output must be: exactly one of the five. Names and meanings are those of vLLM's class of the same name.

    json         a JSON schema, as a dict or as its text
    regex        a regular expression that the whole output matches
    choice       a list of texts, of which the output is one
    grammar      a Lark grammar (llguidance's dialect), or EBNF of the kind that llama.cpp calls GBNF
    json_object  True: any JSON object

    Options: `disable_any_whitespace` writes JSON without optional blanks; `whitespace_pattern` is the regular expression of what is
    allowed between JSON's tokens. `enable_in_reasoning`: the structure holds from the first token on, even if the model could reason
    first; without it a model that has marks of reasoning may reason before it (the name is that of vLLM's server setting). `lenient`:
    keywords of a JSON schema that cannot be enforced are left out, and `oneOf` is read as `anyOf`, instead of an error.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ArgumentError(f"StructuredOutputsParams: give exactly one of json, regex, choice, grammar, json_object; got {got}")
        value = getattr(self, given[0])
        kinds = {"json": (str, dict), "regex": (str,), "choice": (list, tuple), "grammar": (str,), "json_object": (bool,)}[given[0]]
        if not isinstance(value, kinds):
            raise ArgumentError(f"StructuredOutputsParams: {given[0]} cannot be {brief(value)}")
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if any(not isinstance(c, str) or not c for c in self.choice or ()):
                raise ArgumentError(f"StructuredOutputsParams: choice must hold non-empty strings, got {brief(self.choice)}")
        if not isinstance(self.enable_in_reasoning, bool):
            got = brief(self.enable_in_reasoning)
            raise ArgumentError(f"StructuredOutputsParams: enable_in_reasoning must be True or False, got {got}")

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in STRUCTURES if getattr(self, name) not in (None, False))


@dataclass(frozen=True)
class ReasoningParams:
    """How reasoning is marked and where the output begins, for callers that know better than the engine.

    Without it the engine takes the marks of the model's chat template or vocabulary, and looks at the prompt's end: the opening mark there
    means "inside", the closing one "after", anything else "before": the model may begin to reason with its first token.
    """

    opening: str
    closing: str
    begins: str = "before"

    def __post_init__(self) -> None:
        for name in ("opening", "closing"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ArgumentError(f"ReasoningParams: {name} must be a mark like <think>, got {brief(getattr(self, name))}")
        if self.begins not in REASONING_BEGINS:
            raise ArgumentError(f"ReasoningParams: begins must be one of {', '.join(REASONING_BEGINS)}, got {brief(self.begins)}")


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Names, meanings and defaults are those of vLLM's class of the same name.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch the filter off. A `seed` makes the tokens a function of
    (model, prompt, parameters) alone; without one the engine draws a seed for the request. `logprobs` and `prompt_logprobs` -1 list the
    whole vocabulary, for as many positions as MAX_LOGPROB_ENTRIES allows.
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
    best_of: int | None = None  # continuations that run, of which the n of the best mean log-probability are returned
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: tuple[LogitsProcessor, ...] | list[LogitsProcessor] | None = None
    output_kind: str = (
        "cumulative"  # what each output holds: all tokens so far, the new ones ("delta"), or nothing before the end ("final_only")
    )
    thinking_token_budget: int | None = None  # tokens of reasoning, after which its closing mark is forced
    logprob_token_ids: tuple[int, ...] | list[int] | None = None  # list these tokens instead of the most probable ones; requires logprobs
    reasoning: ReasoningParams | None = None  # for structures after reasoning and for the budget; None: the model's own marks

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        self._check_constraints()
        if self.output_kind not in OUTPUT_KINDS:
            raise ArgumentError(f"SamplingParams: output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {brief(self.output_kind)}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"SamplingParams: {name} must be True or False, got {brief(getattr(self, name))}")
        _check_bias(self.logit_bias)

    def _check_numbers(self) -> None:
        for name, low, high, kind in _RANGES:
            _check_range(name, getattr(self, name), low, high, kind)
        for name, low, high in (
            ("max_tokens", 1, MAX_COUNT),
            ("seed", -(2**63), 2**64 - 1),
            ("logprobs", ALL_LOGPROBS, MAX_LOGPROBS),
            ("prompt_logprobs", ALL_LOGPROBS, MAX_LOGPROBS),
            ("best_of", self.n, 1024),
            ("thinking_token_budget", 0, MAX_COUNT),
        ):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), low, high, int)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ArgumentError(f"SamplingParams: min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")

    def _check_stops(self) -> None:
        """Stop strings and ids become tuples."""
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, "a string or a list of strings")
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        _check_words("stop", stop)
        _check_token_ids("stop_token_ids", stop_token_ids)

    def _check_constraints(self) -> None:
        """The fields that restrict the vocabulary: words, ids, a structure, processors."""
        bad_words = _as_tuple("bad_words", self.bad_words, "a list of strings")
        object.__setattr__(self, "bad_words", bad_words or None)
        self._check_logprob_token_ids()
        _check_words("bad_words", bad_words)
        if self.allowed_token_ids is not None:
            allowed = _as_tuple("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not allowed:
                raise ArgumentError("SamplingParams: allowed_token_ids must hold at least one token id, got []")
            _check_token_ids("allowed_token_ids", allowed)
        if isinstance(self.structured_outputs, dict):  # as it comes in JSON
            object.__setattr__(self, "structured_outputs", _from_fields(StructuredOutputsParams, self.structured_outputs))
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            got = brief(self.structured_outputs)
            raise ArgumentError(f"SamplingParams: structured_outputs must be a StructuredOutputsParams, got {got}")
        if isinstance(self.reasoning, dict):
            object.__setattr__(self, "reasoning", _from_fields(ReasoningParams, self.reasoning))
        if self.reasoning is not None and not isinstance(self.reasoning, ReasoningParams):
            raise ArgumentError(f"SamplingParams: reasoning must be a ReasoningParams, got {brief(self.reasoning)}")
        processors = _as_tuple("logits_processors", self.logits_processors, "a list of functions")
        object.__setattr__(self, "logits_processors", processors or None)
        if any(not callable(processor) for processor in processors):
            raise ArgumentError(f"SamplingParams: logits_processors must hold functions, got {brief(processors)}")

    def _check_logprob_token_ids(self) -> None:
        listed = _as_tuple("logprob_token_ids", self.logprob_token_ids, "a list of token ids")
        object.__setattr__(self, "logprob_token_ids", listed or None)
        if any(type(t) is not int or not 0 <= t <= MAX_COUNT for t in listed) or len(listed) > MAX_LOGPROB_TOKEN_IDS:
            expected = f"at most {MAX_LOGPROB_TOKEN_IDS} token ids"
            raise ArgumentError(f"SamplingParams: logprob_token_ids must hold {expected}, got {len(listed)}: {brief(listed)}")
        if listed and self.logprobs is None:
            raise ArgumentError("SamplingParams: logprob_token_ids requires logprobs")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def chooses(self) -> bool:
        """Whether more continuations run than are returned, so that none is certain before the end."""
        return (self.best_of or self.n) > self.n

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of drawn tokens are needed: by the caller, or to choose among best_of."""
        return self.logprobs is not None or self.chooses

    @property
    def width(self) -> int:
        """Continuations: n, or best_of where that is more."""
        return max(self.n, self.best_of or 1)

    @property
    def num_distinct(self) -> int:
        """Continuations that run: greedy ones are all equal, unless the caller's own code makes them differ."""
        return 1 if self.greedy and not self.logits_processors else self.width

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)


_RANGES: tuple[tuple[str, float, float, type], ...] = (
    ("n", 1, 1024, int),
    ("temperature", 0, 100, float),
    ("top_k", -1, MAX_COUNT, int),
    ("top_p", 0, 1, float),
    ("min_p", 0, 1, float),
    ("repetition_penalty", 1e-6, 100, float),
    ("presence_penalty", -2, 2, float),
    ("frequency_penalty", -2, 2, float),
    ("min_tokens", 0, MAX_COUNT, int),
)


def _check_range(name: str, value: object, low: float, high: float, kind: type, speaker: str = "SamplingParams") -> None:
    number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (name == "top_p" and value == 0):  # type: ignore[operator]
        article = "an integer" if kind is int else "a number"
        bounds = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
        above = " (above 0)" if name == "top_p" else ""
        raise ArgumentError(f"{speaker}: {name} must be {article} {bounds}{above}, got {brief(value)}")


def _as_tuple(name: str, value: object, expected: str) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, (list, tuple)):
        raise ArgumentError(f"SamplingParams: {name} must be {expected}, got {brief(value)}")
    return tuple(value or ())


def _check_words(name: str, words: tuple[Any, ...]) -> None:
    """Stop strings and bad words: their cost grows with their length, and they come from clients."""
    if any(not isinstance(word, str) or not word for word in words):
        raise ArgumentError(f"SamplingParams: {name} must hold non-empty strings, got {brief(words)}")
    if len(words) > MAX_WORDS:
        raise ArgumentError(f"SamplingParams: {name} must hold at most {MAX_WORDS} strings, got {len(words)}: leave some out")
    if (longest := max(map(len, words), default=0)) > MAX_WORD_LENGTH:
        most = f"strings of at most {MAX_WORD_LENGTH} characters"
        raise ArgumentError(f"SamplingParams: {name} must hold {most}, got one of {longest}: shorten it")
    if (total := sum(map(len, words))) > MAX_WORDS_LENGTH:
        raise ArgumentError(f"SamplingParams: {name} must hold at most {MAX_WORDS_LENGTH} characters in all, got {total}: leave some out")


def _check_token_ids(name: str, token_ids: tuple[Any, ...]) -> None:
    if any(type(t) is not int or not 0 <= t <= MAX_COUNT for t in token_ids):
        raise ArgumentError(f"SamplingParams: {name} must hold token ids, got {brief(token_ids)}")
    if len(token_ids) > MAX_TOKEN_IDS:
        raise ArgumentError(f"SamplingParams: {name} must hold at most {MAX_TOKEN_IDS} token ids, got {len(token_ids)}: leave some out")


def _from_fields(kind: type[T], given: dict[str, Any]) -> T:
    known = {field.name: field for field in fields(kind)}
    if unknown := next((name for name in given if name not in known), None):
        raise ArgumentError(f"{kind.__name__}: unknown field {unknown!r}; known are {', '.join(known)}")
    if missing := next((name for name, field in known.items() if field.default is MISSING and name not in given), None):
        raise ArgumentError(f"{kind.__name__}: missing field {missing!r}")
    return kind(**given)


def _check_bias(biases: object) -> None:
    if biases is not None and not isinstance(biases, dict):
        raise ArgumentError(f"SamplingParams: logit_bias must be a dict of token ids and values, got {brief(biases)}")
    for token, bias in (biases or {}).items():
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if type(token) is not int or not 0 <= token <= MAX_COUNT or not number or not -100 <= bias <= 100:
            got = f"{brief(token)}: {brief(bias)}"
            raise ArgumentError(f"SamplingParams: logit_bias maps token ids to values in [-100, 100], got {got}")


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search as in transformers: `beam_width` beams, of which the best `n` (None: all) are returned.

    A hypothesis scores the sum of its tokens' log-probabilities divided by its length (in tokens, end token included) to the power of
    `length_penalty`. `early_stopping` True ends once there are beam_width hypotheses; False (transformers' default) once no running beam
    at its present length could beat the worst of them; "never" once none could at any length.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    n: int | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_range("beam_width", self.beam_width, 1, 64, int, "BeamSearchParams")
        _check_range("max_tokens", self.max_tokens, 1, MAX_COUNT, int, "BeamSearchParams")
        _check_range("length_penalty", self.length_penalty, -100, 100, float, "BeamSearchParams")
        if self.early_stopping not in (True, False, "never"):
            raise ArgumentError(f'BeamSearchParams: early_stopping must be True, False or "never", got {brief(self.early_stopping)}')
        if self.n is not None:
            _check_range("n", self.n, 1, self.beam_width, int, "BeamSearchParams")
