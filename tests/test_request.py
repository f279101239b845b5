"""SamplingParams refuses, in one line that names the field, what cannot be meant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tinyvllm import SamplingParams
from tinyvllm.errors import ArgumentError
from tinyvllm.request import BeamSearchParams, RequestOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", np.zeros((3, 3))),
        ("top_k", 1.5),
        ("top_p", 0),
        ("max_tokens", 0),
        ("max_tokens", "16"),
        ("seed", 2**64),
        ("logprobs", 21),
        ("ignore_eos", 1),
        ("ignore_eos", "no"),
        ("ignore_eos", None),
        ("include_stop_str_in_output", 0),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 1),
        ("skip_special_tokens", [True]),
        ("logit_bias", [1]),
        ("logit_bias", []),
        ("logit_bias", 0),
        ("logit_bias", "x"),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: True}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: None}),
        ("stop", 7),
        ("stop", 0),
        ("stop", False),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", {"a": 1}),
        ("stop", b"a"),
        ("stop_token_ids", 5),
        ("stop_token_ids", 0),
        ("stop_token_ids", "12"),
        ("stop_token_ids", {1: 2}),
        ("stop_token_ids", [1, -1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", np.zeros((30, 30))),
        ("temperature", math.inf),
        ("presence_penalty", math.nan),
        ("min_p", -math.inf),
        ("logit_bias", {5: math.inf}),
        ("logit_bias", {10**400: 1.0}),
        ("stop_token_ids", [10**400]),
        ("allowed_token_ids", [10**5000]),
        ("allowed_token_ids", [1] * (2**20 + 1)),
        ("max_tokens", 10**400),
        ("max_tokens", 10**5000),
        ("min_tokens", 10**400),
        ("top_k", 10**400),
        ("n", 10**400),
        ("seed", 10**400),
        ("thinking_token_budget", 10**400),
        ("best_of", 10**5000),
        ("prompt_logprobs", 10**400),
        ("stop", "x" * 1025),
        ("stop", ["x" * 1024] * 17),
        ("stop", ["x"] * 513),
        ("bad_words", ["x" * 1025]),
        ("bad_words", ["x" * 1000] * 17),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else type(value).__name__,
)
def test_values_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"SamplingParams: {field} ") and "\n" not in message and len(message) < 250


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 10**400),
        ("priority", -(10**5000)),
        ("deadline_ms", 10**400),
        ("deadline_ms", math.inf),
        ("ttft_deadline_ms", math.nan),
        ("ttft_deadline_ms", 10**5000),
        ("key", "x" * 4097),
        ("cache_salt", "x" * 4097),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else type(value).__name__,
)
def test_options_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{field} must be ") as caught:
        RequestOptions(**{field: value})
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("field", ["beam_width", "max_tokens", "length_penalty", "n"])
def test_beams_beyond_every_limit(field: str) -> None:
    with pytest.raises(ArgumentError, match=f"^BeamSearchParams: {field} must be "):
        BeamSearchParams(**{"beam_width": 2, field: 10**400})


def test_the_longest_stop_strings() -> None:
    assert len(SamplingParams(stop=["x" * 1023 + chr(65 + i) for i in range(16)]).stop) == 16


def test_a_shortest_answer_beyond_the_longest() -> None:
    with pytest.raises(ArgumentError, match="min_tokens=5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_what_may_be_said_in_several_ways() -> None:
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == SamplingParams(stop=("ab",)).stop == ("ab",)
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == SamplingParams(stop_token_ids=(3, 4)).stop_token_ids == (3, 4)
    assert SamplingParams(logit_bias={}).logit_bias == {} and SamplingParams(logit_bias={3: -100, 4: 0.5}).logit_bias == {3: -100, 4: 0.5}
