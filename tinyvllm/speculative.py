"""`speculative_config`: how drafts are guessed, in vLLM's spelling. Checked before anything is loaded; knows no drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.lazy_dataclass import dataclass

HEADS = ("medusa", "eagle", "eagle3", "mtp", "medusa_lite", "eagle_lite")  # read the target's hidden states
KV_HEADS = ("eagle", "eagle3", "mtp")  # of HEADS: keep keys and values of their own by the numbers of the target's blocks
METHODS = ("ngram", "suffix", "draft_model", *HEADS)
LOOKUPS = ("ngram", "suffix", "medusa_lite", "eagle_lite")  # need no model
OWN_HEADS = ("mtp",)  # in the target's own checkpoint; "model" may still name another
VLLM_NAMES = dict.fromkeys(("qwen3_next_mtp", "qwen3_5_mtp", "mimo_mtp"), "mtp")  # vLLM's older names of methods, in model cards
CONTROLLERS = ("adaptive", "window", "fixed")
OFF = ("off", "none", "")
MAX_DRAFTS = 32  # of a sequence in a step
STATE_DRAFTS = 16  # the same of a model with recurrent states, unless K is given: each state keeps their inputs
MAX_LOOKUP = 32  # tokens; each length of n-grams between the bounds costs an entry a token
MAX_TEXT = 10_000  # characters of JSON
# Keys of vLLM that ask for what is the case anyway.
_INERT = {
    "draft_tensor_parallel_size": (1,),
    "parallel_drafting": (False,),
    "use_local_argmax_reduction": (False,),
}


def max_lookup_drafts(num_sequences: int) -> int:
    """The most drafts of a step in which an adaptive controller checks tokens that were looked up: each has a row of logits."""
    return max(2 * MAX_DRAFTS, num_sequences)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(
            f"speculative_config: {name} must be one of {', '.join(choices)}, got {value!r:.60}{nearest(str(value), choices)}"
        )


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are guessed and accepted. Always valid: an invalid value is an ArgumentError that names the field.

    method                   one of METHODS; by its model's files where only `model` is given, as vLLM does
    model                    folder or name of the draft model or of the heads; none for "ngram", "suffix" and, if need be, "mtp"
    revision                 branch, tag or commit of a hub name
    quantization             of the draft model or of the heads' matrices, packed at load; None keeps what the checkpoint has
    num_speculative_tokens   K, the most drafts of a sequence in a step; None lets the method choose
    prompt_lookup_max, prompt_lookup_min  lengths of the n-grams that "ngram" looks up
    controller               "adaptive" (as many drafts as pay), "window" (more or fewer by recent acceptance) or "fixed" (always K).
                             None is "fixed" where K is given, as in vLLM, else "adaptive"
    policy                   when a draft is accepted: "exact", or a lossy policy of tinyvllm/speculate/policies.py by name
    """

    method: str
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    controller: str | None = None
    policy: str = "exact"

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        for name in ("model", "revision", "quantization", "policy"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise ArgumentError(f"speculative_config: {name} must be a non-empty text, got {value!r:.60}")
        for name, most in (("num_speculative_tokens", MAX_DRAFTS), ("prompt_lookup_max", MAX_LOOKUP), ("prompt_lookup_min", MAX_LOOKUP)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise ArgumentError(f"speculative_config: {name} must be an integer from 1 to {most}, got {value!r:.60}")
        if self.controller is not None:
            _check_choice("controller", self.controller, CONTROLLERS)
        self._check_combinations()

    def _check_combinations(self) -> None:
        method = self.method
        for name in ("model", "revision", "quantization"):
            if method in LOOKUPS and getattr(self, name) is not None:
                raise ArgumentError(
                    f"speculative_config: {name}={getattr(self, name)!r:.60} contradicts method={method!r}, which has no model"
                )
        if method not in LOOKUPS + OWN_HEADS and self.model is None:
            raise ArgumentError(f"speculative_config: method={method!r} needs a model: give its folder or name as model")
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if method != "ngram" and getattr(self, name) is not None:
                raise ArgumentError(f"speculative_config: {name} is for method='ngram', got method={method!r}")
        if None not in (self.prompt_lookup_min, self.prompt_lookup_max) and (self.prompt_lookup_min or 0) > (self.prompt_lookup_max or 0):
            raise ArgumentError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} is above prompt_lookup_max={self.prompt_lookup_max}"
            )
        if self.controller in ("fixed", "window") and self.num_speculative_tokens is None:
            raise ArgumentError(f"speculative_config: controller={self.controller!r} needs num_speculative_tokens")

    @property
    def max_drafts(self) -> int:
        """K, chosen: the most drafts of a sequence in a step that any drafter is asked for."""
        return self.num_speculative_tokens or MAX_DRAFTS

    @property
    def state_drafts(self) -> int:
        """The most drafts of a sequence in a step of a model with recurrent states."""
        return self.num_speculative_tokens or STATE_DRAFTS

    def max_step_drafts(self, num_sequences: int) -> int:
        """The most drafts of a step of that many sequences."""
        most = num_sequences * self.max_drafts
        return min(most, max_lookup_drafts(num_sequences)) if self.method in LOOKUPS and self.controls == "adaptive" else most

    @property
    def controls(self) -> str:
        """The controller, chosen."""
        return self.controller or ("adaptive" if self.num_speculative_tokens is None else "fixed")


AUTO = SpeculativeConfig("suffix")  # the default


def parse(value: object) -> SpeculativeConfig | None:
    """The configuration of a dict, of JSON text, of a method's name, of "auto" or of "off" (None). ArgumentError for anything else."""
    if isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        value = _from_text(value)
        if value is None or isinstance(value, SpeculativeConfig):
            return value
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f'speculative_config must be a dict or JSON text such as {{"method": "ngram"}}, a method, auto or off, got {value!r:.60}'
        )
    return _from_fields(value)


def _from_text(text: str) -> object:
    word = text.strip().lower()
    if word in OFF:
        return None
    if word == "auto":
        return AUTO
    if not word.startswith("{"):
        word = VLLM_NAMES.get(word, word)
        _check_choice("method", word, METHODS)
        return SpeculativeConfig(word)
    if len(text) > MAX_TEXT:
        raise ArgumentError(f"speculative_config must have at most {MAX_TEXT} characters, got {len(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"speculative_config is not JSON: {error}; got {text!r:.60}") from error


def _from_fields(given: Mapping[Any, Any]) -> SpeculativeConfig:
    known = [field.name for field in fields(SpeculativeConfig)]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in _INERT and (value is None or value in _INERT[name]):
            continue
        if name not in known:
            raise ArgumentError(
                f"speculative_config: unknown key {str(name)!r:.60}{nearest(str(name), known)}; known are {', '.join(known)}"
            )
        if value is not None:
            values[name] = value
    if "method" not in values:
        raise ArgumentError(f"speculative_config: method is missing; give one of {', '.join(METHODS)}")
    if isinstance(values["method"], str):
        values["method"] = VLLM_NAMES.get(values["method"], values["method"])
    return SpeculativeConfig(**values)
