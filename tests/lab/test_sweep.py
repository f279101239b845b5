"""Descriptions of sweeps: the cells that follow from one, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinyvllm.errors import ArgumentError, TinyvllmError
from tinyvllm.lab.prompts import SETS, LabPrompt, digest, prompts_of, read_prompts
from tinyvllm.lab.settings import read_settings
from tinyvllm.lab.sweep import PLAIN, DrafterSpec, parse_sweep


def test_cells_are_each_combination_once_and_their_baselines() -> None:
    axes = {"k": [1, "auto"], "policies": ["exact", "longest_prefix"], "temperatures": [0, 0.5], "batch_sizes": [1, 4], "prompts": "story"}
    sweep = parse_sweep({"drafters": ["ngram"], **axes})
    cells = sweep.cells()
    baselines = [cell for cell in cells if cell.is_baseline]
    assert len(cells) == len(set(cells)) == 4 + 2 * 2 * 2 * 2 and cells[:4] == baselines
    assert {cell.baseline for cell in cells} == set(baselines)
    assert {(cell.policy.name, cell.temperature) for cell in cells if cell.is_lossy} == {("longest_prefix", 0.5)}
    assert [cell.axes()["k"] for cell in cells[4:6]] == [1, 1] and cells[-1].k is None and cells[-1].axes()["k"] == "auto"
    assert cells == parse_sweep({"drafters": ["none", "ngram"], **axes}).cells()


def test_drafters_become_speculative_configs() -> None:
    small = {"method": "draft_model", "model": "m", "label": "small"}
    sweep = parse_sweep({"drafters": ["none", "ngram", small, "eagle3:some/heads/"]})
    expected = (DrafterSpec("ngram", "ngram"), DrafterSpec("small", "draft_model", (("model", "m"),)))
    assert sweep.drafters == (PLAIN, *expected, DrafterSpec("eagle3:heads", "eagle3", (("model", "some/heads/"),)))
    configs = [drafter.config(k) for drafter, k in zip(sweep.drafters, (0, 3, None, None))]
    assert configs[:3] == [None, {"method": "ngram", "num_speculative_tokens": 3}, {"method": "draft_model", "model": "m"}]
    assert configs[3] == {"method": "eagle3", "model": "some/heads/"}


def test_a_key_depends_on_what_a_figure_depends_on() -> None:
    sweep = parse_sweep({"prompts": "story"})
    cell = sweep.cells()[1]
    assert sweep.key_of(cell, {}) == parse_sweep({"prompts": ["story", "copy"], "k": [4, 5]}).key_of(cell, {})
    others = [parse_sweep({"seed": 1}), parse_sweep({"max_tokens": 4}), parse_sweep({"repeats": 4})]
    assert len({one.key_of(cell, about) for one in (sweep, *others) for about in ({}, {"model": "m"})}) == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": ["none"]}, "unknown key 'drafter', did you mean 'drafters'"),
        ({"k": [0]}, "k (or auto) must be integers from 1 to 64, got 0"),
        ({"k": []}, "k must be a list of 1 to 256 entries"),
        ({"k": ["Auto"]}, "k (or auto) must be integers"),
        ({"k": [True]}, "quote them"),
        ({"batch_sizes": [2000]}, "batch_sizes must be integers from 1 to 1024"),
        ({"temperatures": [float("nan")]}, "temperatures must be numbers"),
        ({"drafters": [False]}, "YAML reads no, off, yes and on as booleans"),
        ({"drafters": [{"model": "m"}]}, "drafters must be names"),
        ({"drafters": [{"method": "ngram", "num_speculative_tokens": 3}]}, "num_speculative_tokens is the axis k"),
        ({"drafters": [{"method": "ngram", "x": [1]}]}, "drafters: x must be a text, a number or a boolean"),
        ({"drafters": ["ngram", {"method": "suffix", "label": "ngram"}]}, "drafters: 'ngram' is there twice"),
        ({"policies": ["greedy"]}, "policy: expected one of exact"),
        ({"policies": [{"name": "typical", "eps": 1}]}, "policy typical: unknown parameter 'eps'"),
        ({"prompts": ["storys"]}, "prompts must be copy, code, chat, story"),
        ({"prompts": [{"fil": "x"}]}, "unknown key 'fil', did you mean 'file'"),
        ({"max_tokens": 1}, "max_tokens must be an integer from 2"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"model": "a", "engine": {"model": "b"}}, "model is there twice"),
        ({"engine": {"speculative_config": {}}}, "speculative_config is what drafters and k are for"),
        ({"engine": [1]}, "engine must be a mapping of names"),
        ({"costs": {"1": 0}}, "costs must be rows to milliseconds"),
        ({"fake": {"acceptance": {"a": [2]}}}, "acceptance: a must be a list of 1 to 64 probabilities"),
        ({"fake": {"acceptence": {}}}, "unknown key 'acceptence', did you mean 'acceptance'"),
        ({"k": list(range(1, 65)), "batch_sizes": list(range(1, 201))}, "cells, and at most 10000 are measured"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as failure:
        parse_sweep(values)
    assert message in str(failure.value) and "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "", "must end in .yaml, .yml or .json"),
        ("a.json", "[1]", "must be a mapping, got [1]"),
        ("a.json", '{"k": 1, "k": 2}', "the key 'k' is there twice"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.yaml", "k: 1\nk: 2\n", "the key 'k' is there twice"),
        ("a.yaml", "k: [1\n", "is not YAML"),
        ("a.yaml", "k: !!python/object/apply:os.getcwd []\n", "is not YAML"),
        ("a.yaml", "[" * 400, "is not YAML"),
        ("a.yaml", "k: \xff", "must be a mapping"),
        ("a.yaml", "x" * (256 << 10) + "x", "at most 262144 are read"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    if message == "must be a mapping":
        message = "is not YAML"  # the byte is not UTF-8
    with pytest.raises(TinyvllmError) as failure:
        read_settings(str(path))
    assert message in str(failure.value), failure.value


def test_yaml_and_json_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("k: [1, auto]\nengine: {device: CPU}\npolicies: [{name: top_k, k: 2}]\ncosts: {1: 2.5}\n")
    values = {"k": [1, "auto"], "engine": {"device": "CPU"}, "policies": [{"name": "top_k", "k": 2}], "costs": {"1": 2.5}}
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert parse_sweep(read_settings(str(tmp_path / "a.yaml"))) == parse_sweep(read_settings(str(tmp_path / "a.json")))


# --- prompts


def test_prompt_sets_of_the_bundled_world(tmp_path: Path) -> None:
    sweep = parse_sweep({"num_prompts": 6})
    sets = prompts_of(sweep, tmp_path)
    assert list(sets) == list(SETS) and all(len(set(each)) == 6 for each in sets.values())
    assert sets == prompts_of(sweep, tmp_path) and digest(sets) == digest(prompts_of(sweep, tmp_path))
    assert digest(sets) != digest(prompts_of(parse_sweep({"num_prompts": 6, "seed": 1}), tmp_path))
    assert all(one.messages and one.messages[-1][0] == "user" for one in sets["chat"])
    assert all(one.text and one.text.count("\n") >= 5 for one in sets["code"])
    assert all(line[0] + line[-1] == "{}" for one in sets["code"] for line in (one.text or "").splitlines()[:-1])
    for prompt in sets["copy"]:
        assert prompt.messages is not None
        *_, (role, answer), (_, ask) = prompt.messages
        name = answer.split('"')[3] if answer.startswith("{") else answer
        assert role == "assistant" and name in ask


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"prompt_token_ids": [1, 2]}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    expected = [LabPrompt(text="a"), LabPrompt(messages=(("user", "b"),)), LabPrompt(token_ids=(1, 2))]
    assert read_prompts(str(path)) == expected
    assert prompts_of(parse_sweep({"prompts": [{"file": "mine.jsonl"}]}), tmp_path) == {"mine": expected}
    assert [one.engine_prompt() for one in expected] == ["a", {"messages": lines[1]["messages"]}, {"prompt_token_ids": [1, 2]}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 1 to 10000 prompts, got 0"),
        ("{}", ":1: expected exactly one of prompt, messages, prompt_token_ids, got none"),
        ('{"prompt": "a"}\n{"promt": "a"}', ":2: unknown key 'promt', did you mean 'prompt'"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "got prompt, prompt_token_ids"),
        ('{"prompt": ""}', "prompt must be a text"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list of objects"),
        ('{"prompt_token_ids": [-1]}', "must be a list of token ids"),
        ("[1]", "expected an object"),
        ("nonsense", "not JSON"),
    ],
)
def test_prompt_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(TinyvllmError) as failure:
        read_prompts(str(path))
    assert message in str(failure.value), failure.value
