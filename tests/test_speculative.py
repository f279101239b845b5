"""speculative_config: vLLM's dict, JSON text, a method's name; errors name the key and the nearest."""

from __future__ import annotations

import json

import pytest

from tinyvllm import speculative
from tinyvllm.config.engine import resolve
from tinyvllm.errors import ArgumentError
from tinyvllm.speculative import SpeculativeConfig, parse


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("off", None),
        ("auto", speculative.AUTO),
        ("ngram", SpeculativeConfig("ngram")),
        ({"method": "ngram", "num_speculative_tokens": 4}, SpeculativeConfig("ngram", num_speculative_tokens=4)),
        ('{"method": "suffix", "model": null, "draft_tensor_parallel_size": 1}', SpeculativeConfig("suffix")),
        ({"method": "eagle3", "model": "heads"}, SpeculativeConfig("eagle3", "heads")),
        ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, SpeculativeConfig("mtp", num_speculative_tokens=2)),
        ("qwen3_5_mtp", SpeculativeConfig("mtp")),
    ],
)
def test_spellings(tmp_path, value, expected):
    assert parse(value) == expected == resolve(tmp_path, environ={}, speculative_config=value).speculative_config


def test_on_by_default_and_as_recorded(tmp_path):
    from dataclasses import asdict

    assert resolve(tmp_path, environ={}).speculative_config is speculative.AUTO
    config = SpeculativeConfig("ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    assert parse(json.loads(json.dumps(asdict(config)))) == config


def test_drafts_of_a_step_are_bounded():
    """Each has a row of logits, and a capture of its number of rows; what the warm-up captures is what an adaptive controller checks."""
    assert [speculative.AUTO.max_step_drafts(n) for n in (1, 2, 64, 256)] == [32, 64, 64, 256]
    assert SpeculativeConfig("ngram", num_speculative_tokens=4).max_step_drafts(64) == 256


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"method": "ngramm"}, ["method", "ngramm", "did you mean 'ngram'"]),
        ({"method": "ngram", "num_spec_tokens": 3}, ["num_spec_tokens", "did you mean 'num_speculative_tokens'"]),
        ({"num_speculative_tokens": 3}, ["method is missing"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["num_speculative_tokens", "from 1 to 32", "0"]),
        ({"method": "ngram", "num_speculative_tokens": True}, ["num_speculative_tokens", "True"]),
        ({"method": "suffix", "model": "x"}, ["model='x'", "contradicts"]),
        ({"method": "draft_model"}, ["needs a model"]),
        ({"method": "suffix", "prompt_lookup_max": 3}, ["prompt_lookup_max", "ngram"]),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, ["prompt_lookup_min=3", "prompt_lookup_max=2"]),
        ({"method": "ngram", "controller": "fixed"}, ["controller='fixed'", "num_speculative_tokens"]),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size"]),
        ("{not json", ["not JSON"]),
        ("{" + " " * 20_000, ["at most 10000 characters"]),
        ("[" * 3, ["method", "[[["]),
        (["ngram"], ["dict or JSON text"]),
        (3, ["dict or JSON text", "3"]),
    ],
)
def test_errors_name_what_is_wrong(value, words):
    with pytest.raises(ArgumentError) as raised:
        parse(value)
    assert all(word in str(raised.value) for word in ["speculative_config", *words]) and len(str(raised.value)) < 400
