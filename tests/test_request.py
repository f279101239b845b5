"""SamplingParams refuses, in one line that names the field, what cannot be meant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tinyvllm import SamplingParams
from tinyvllm.errors import ArgumentError


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
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_values_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"SamplingParams: {field} ") and "\n" not in message and len(message) < 250


def test_a_shortest_answer_beyond_the_longest() -> None:
    with pytest.raises(ArgumentError, match="min_tokens=5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_what_may_be_said_in_several_ways() -> None:
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == SamplingParams(stop=("ab",)).stop == ("ab",)
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == SamplingParams(stop_token_ids=(3, 4)).stop_token_ids == (3, 4)
    assert SamplingParams(logit_bias={}).logit_bias == {} and SamplingParams(logit_bias={3: -100, 4: 0.5}).logit_bias == {3: -100, 4: 0.5}
