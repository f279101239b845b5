"""The lab with a real engine and a tiny model: exact cells are exact, lossy ones differ, and what is counted is what was verified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyvllm import cli
from tinyvllm.engine.tools.one_off import prompt_logits
from tinyvllm.lab.engine_target import EngineTarget
from tinyvllm.lab.prompts import LabPrompt
from tinyvllm.lab.run import SweepRun, broken_promises
from tinyvllm.lab.sweep import parse_sweep
from tinyvllm.lab.target import Job, Limits

SETTINGS: dict[str, Any] = {
    "drafters": ["ngram", "suffix"],
    "k": [3],
    "policies": ["exact", {"name": "top_k", "k": 40}],
    "batch_sizes": [2],
    "temperatures": [0, 1.0],
    "prompts": ["copy"],
    "num_prompts": 2,
    "max_tokens": 16,
    "repeats": 1,
    "ignore_eos": True,
    "cost_rows": [1, 2, 4],
}
REPEATED = LabPrompt(text="abcabcabcabcabcabcabc")


def sweep_of(model: Path, **changes: Any) -> Any:
    return parse_sweep(SETTINGS | {"engine": {"model": str(model), "device": "CPU", "num_blocks": 200, "max_num_seqs": 4}} | changes)


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Iterator[EngineTarget]:
    target = EngineTarget(sweep_of(tiny_model))
    yield target
    target.close()


def test_a_sweep_of_a_tiny_model(tiny_model: Path, target: EngineTarget) -> None:
    sweep = sweep_of(tiny_model)
    target.check(sweep.cells())
    work = SweepRun(sweep, target, {"copy": [REPEATED, LabPrompt(token_ids=(5, 6, 7) * 6)]})
    failures: list[object] = []
    assert work.run(lambda record: None, lambda *failure: failures.append(failure)) == 0, failures
    records = work.records
    assert len(records) == 2 + 2 * 2 * 2 and not broken_promises(records)
    assert work.curve is not None and work.curve.rows == (1, 2, 4) and min(work.curve.milliseconds) > 0
    exact = [one for one in records if one["method"] != "none" and not one["lossy"]]
    assert exact and all(one["exact"] and one["divergence"]["kl"] == 0 for one in exact)
    lossy = [one for one in records if one["lossy"]]
    assert any(not one["exact"] and one["divergence"]["kl"] > 0 for one in lossy)
    for one in exact + lossy:
        tokens, accepted = 2 * 15, sum(place["accepted"] for place in one["positions"])
        assert one["tokens_per_step"] == pytest.approx(tokens / (tokens - accepted))
        assert one["paired_speedup"]["n"] == 1 and one["divergence"]["perplexity"] > 1
    greedy = [one for one in lossy if one["temperature"] == 0]
    assert all(one["positions"][0]["drafted"] > 0 and len(one["positions"]) == 3 for one in greedy)


def test_a_drafter_learns_nothing_from_another_trial(tiny_model: Path, target: EngineTarget) -> None:
    """Suffix decoding remembers outputs of a tenant: the same trial again is guessed well, another one as if it were the first."""
    (cell,) = sweep_of(tiny_model, drafters=["suffix"], k=[3], policies=["exact"], temperatures=[0]).cells()[1:]
    job, limits = Job(LabPrompt(text="the quick brown fox"), 1), Limits(24, True)

    def accepted(trial: str) -> int:
        return sum(target.run(cell, [job], limits, trial)[1].accepted)

    first = accepted("a")
    assert accepted("a") > first and accepted("b") == first


def test_stopped_speculation_leaves_nothing(tiny_model: Path, target: EngineTarget) -> None:
    """The engine's own loop runs again, no drafter hears of requests, and receipts say so."""
    sweep = sweep_of(tiny_model, policies=["exact"], temperatures=[0], drafters=["ngram"])
    plain, drafted = sweep.cells()
    engine, job, limits = target._loaded(), Job(REPEATED, 1), Limits(8, True)
    target.run(plain, [job], limits, "a")
    own = engine.loop
    target.run(drafted, [job], limits, "a")
    assert engine.loop is not own and engine.speculation is not None and engine.stats.speculation == "ngram"
    counts = target.run(plain, [job], limits, "b")[1]
    assert engine.loop is own and engine.speculation is None and engine.stats.speculation == ""
    assert counts.chains == 0 and counts.turns == 7


def test_logits_are_those_that_drew_the_tokens(target: EngineTarget) -> None:
    prompt, tokens = list(range(40, 180)), list(range(60, 70))
    logits = target.logits(prompt, tokens)
    whole = prompt_logits(target._loaded(), prompt + tokens)
    assert logits.shape[0] == len(tokens) and np.array_equal(logits, whole[len(prompt) - 1 : -1])


def test_a_request_that_fails_costs_its_cell(tiny_model: Path, target: EngineTarget) -> None:
    sweep = sweep_of(tiny_model, policies=["exact"], temperatures=[0], drafters=["none"])
    failures: list[str] = []
    work = SweepRun(sweep, target, {"copy": [LabPrompt(text="x" * 600), REPEATED]})
    assert work.run(lambda record: None, lambda cell, error: failures.append(str(error))) == 1
    assert "600" in failures[0] or "601" in failures[0]
    again = SweepRun(sweep, target, {"copy": [REPEATED]})
    assert again.run(lambda record: None, lambda cell, error: failures.append(str(error))) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafters", "ngrm"], "got 'ngrm', did you mean 'ngram'"),
        (["--k", "40"], "num_speculative_tokens must be an integer from 1 to 32, got 40"),
        (["--drafters", "draft_model"], "method='draft_model' needs a model"),
        (["--batch-sizes", "8", "--max-num-seqs", "4"], "8 is more than max_num_seqs=4"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(["lab", "--prompts", "story", *words, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_the_command_with_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "o.jsonl"
    words = ["--drafters", "ngram", "--k", "auto", "--prompts", "copy", "--num-prompts", "1", "--max-tokens", "24", "--repeats", "1"]
    config = tmp_path / "s.json"
    config.write_text(json.dumps({"cost_rows": [1, 4]}))
    assert cli.main(["lab", str(config), *words, "--device", "CPU", "--max-num-seqs", "4", "--output", str(output), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "| ngram" in out and "NOT EXACT" not in out and len(output.read_text().splitlines()) == 3
