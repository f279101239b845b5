"""The lab with a real engine and a tiny model: exact cells are exact, lossy ones differ, and what is counted is what was verified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinyvllm.demo
from tests.speculate.heads import medusa_tensors, write_heads
from tinyvllm import cli
from tinyvllm.engine.tools.one_off import prompt_logits
from tinyvllm.lab.engine_target import EngineTarget
from tinyvllm.lab.prompts import LabPrompt
from tinyvllm.lab.run import SweepRun, broken_promises
from tinyvllm.lab.sweep import parse_sweep
from tinyvllm.lab.target import Job, Limits
from tinyvllm.speculate.cost_curve import StepCosts

SETTINGS: dict[str, Any] = {
    "drafters": ["ngram", "suffix"],
    "k": [2],
    "policies": ["exact", {"name": "top_k", "k": 40}],
    "batch_sizes": [2],
    "temperatures": [0, 1.0],
    "prompts": ["copy"],
    "num_prompts": 2,
    "max_tokens": 32,
    "repeats": 1,
    "ignore_eos": True,
    "cost_rows": [2, 4],
}
DEMO = Path(tinyvllm.demo.__file__).parent
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
    assert work.curve is not None and work.curve.rows == (2, 4) and min(work.curve.milliseconds) > 0
    exact = [one for one in records if one["method"] != "none" and not one["lossy"]]
    assert exact and all(one["exact"] and one["divergence"]["kl"] == 0 for one in exact)
    lossy = [one for one in records if one["lossy"]]
    assert any(not one["exact"] and one["divergence"]["kl"] > 0 for one in lossy)
    for one in exact + lossy:
        tokens, accepted = 2 * (SETTINGS["max_tokens"] - 1), sum(place["accepted"] for place in one["positions"])
        assert one["tokens_per_step"] == pytest.approx(tokens / (tokens - accepted))
        assert one["paired_speedup"]["n"] == 1 and one["divergence"]["perplexity"] > 1
    greedy = [one for one in lossy if one["temperature"] == 0]
    assert all(one["positions"][0]["drafted"] > 0 and len(one["positions"]) == 2 for one in greedy)


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
    engine, job, limits = target.loaded(), Job(REPEATED, 1), Limits(8, True)
    target.run(plain, [job], limits, "a")
    own = engine.loop
    target.run(drafted, [job], limits, "a")
    assert engine.loop is not own and engine.speculation is not None and engine.stats.speculation == "ngram"
    counts = target.run(plain, [job], limits, "b")[1]
    assert engine.loop is own and engine.speculation is None and engine.stats.speculation == ""
    assert counts.chains == 0 and counts.turns == 7


def test_logits_are_those_that_drew_the_tokens(target: EngineTarget) -> None:
    prompt, tokens = list(range(40, 180)), list(range(60, 64))
    logits = target.logits(prompt, tokens)
    whole = prompt_logits(target.loaded(), prompt + tokens)
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
        (["--drafters", "draft_model"], "method='draft_model' needs a model: write draft_model:PATH"),
        (["--drafters", "eagle3:/no/heads"], "drafter eagle3:heads: no such file or folder: '/no/heads'"),
        (["--drafters", "medusa_lite:x"], "model='x' contradicts method='medusa_lite', which has no model"),
        (["--batch-sizes", "8", "--max-num-seqs", "4"], "8 is more than max_num_seqs=4"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(["lab", "--prompts", "story", *words, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_heads_and_a_draft_model_change_no_token(tiny_model: Path, target: EngineTarget, tmp_path: Path) -> None:
    """Each is loaded for its cell; heads for another K again. Medusa's are random, and the draft model is the target itself."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    medusa = write_heads(tmp_path / "m", config, medusa_tensors(2, 1))
    names = [f"medusa:{medusa}", "medusa_lite", "eagle_lite", f"draft_model:{tiny_model}"]
    sweep = sweep_of(
        tiny_model, drafters=names, policies=["exact"], temperatures=[0], batch_sizes=[1], max_tokens=8, warmup=0, paired=False
    )
    work, failures = SweepRun(sweep, target, {"copy": [REPEATED]}), list[object]()
    assert work.run(lambda record: None, lambda *failure: failures.append(failure)) == 0, failures
    cells = work.records[1:]
    assert [one["drafter"].partition(":")[0] for one in cells] == ["medusa", "medusa_lite", "eagle_lite", "draft_model"]
    assert all(one["exact"] and one["positions"][0]["drafted"] and one["draft_ms"] > 0 for one in cells)
    assert cells[-1]["acceptance"] == 1  # what guesses its own tokens


def test_heads_guess_as_many_tokens_as_the_cell_says(tiny_model: Path, target: EngineTarget) -> None:
    cells = sweep_of(tiny_model, drafters=["medusa_lite"], policies=["exact"], temperatures=[0], batch_sizes=[1], k=[1, 2]).cells()
    for cell in cells[1:]:
        assert len(target.run(cell, [Job(REPEATED, 1)], Limits(6, True), "a")[1].drafted) == cell.k


def test_drafters_that_take_turns_capture_once(tiny_model: Path) -> None:
    """Heads for two numbers of guesses, in turn: the benchmark's timed turns capture nothing."""
    sweep = sweep_of(tiny_model, drafters=["medusa_lite"], policies=["exact"], temperatures=[0], batch_sizes=[1], k=[1, 2])
    target = EngineTarget(sweep, open_drafters=2)
    try:
        counts = []
        for _ in range(2):
            for cell in sweep.cells()[1:]:
                target.run(cell, [Job(REPEATED, 1)], Limits(6, True), "a")
            counts.append(target.loaded().runner.capture_work().count)
        assert counts[0] == counts[1]
    finally:
        target.close()


def test_changed_heads_are_another_measurement(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    sweep = sweep_of(tiny_model, drafters=["ngram", f"medusa:{tmp_path}"], policies=["exact"], temperatures=[0])

    def keys() -> list[str]:
        return [*SweepRun(sweep, EngineTarget(sweep), {"copy": [REPEATED]})._keys.values()]

    before = keys()
    assert keys() == before
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert [old == new for old, new in zip(before, keys(), strict=True)] == [True, True, False]


def test_the_command_with_the_bundled_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, config = tmp_path / "o.jsonl", tmp_path / "s.json"
    config.write_text(json.dumps({"costs": {"1": 1, "4": 2}, "warmup": 0, "paired": False, "quality": False, "repeats": 1}))
    words = ["--drafters", f"ngram,eagle3:{DEMO / 'heads'},draft_model:{DEMO / 'draft'}", "--k", "2", "--prompts", "copy"]
    words += ["--num-prompts", "1", "--max-tokens", "6", "--device", "CPU", "--max-num-seqs", "4", "--output", str(output), "--quiet"]
    assert cli.main(["lab", str(config), *words]) == 0
    out, lines = capsys.readouterr().out, [json.loads(line) for line in output.read_text().splitlines()]
    assert "| eagle3:heads" in out and "NOT EXACT" not in out
    assert [one["drafter"] for one in lines] == ["none", "ngram", "eagle3:heads", "draft_model:draft"]
    assert all(one["exact"] for one in lines[1:]) and all(one["acceptance"] for one in lines[2:])


def test_alternating_with_heads_captures_nothing_again(tiny_model: Path, target: EngineTarget) -> None:
    """A paired sweep runs each repeat without drafts, too: its steps, without hidden states, are captured once."""
    plain, drafted = sweep_of(tiny_model, drafters=["medusa_lite"], policies=["exact"], temperatures=[0], batch_sizes=[1], k=[1]).cells()
    jobs, limits, runner = [Job(REPEATED, 1)], Limits(6, True), target.loaded().runner
    counts = []
    for trial in ("a", "b", "c"):
        for cell in (plain, drafted):
            target.run(cell, jobs, limits, trial)
        counts.append(runner.capture_work().count)
    assert counts[1] == counts[2]


def test_a_cell_drafts_from_the_answers_of_the_turn_before(target: EngineTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned between two turns, as while a server is idle: each turn has speculation of its own. Drafts cost nothing here."""
    monkeypatch.setattr(StepCosts, "knows", lambda self, sequences: True)
    monkeypatch.setattr(StepCosts, "seconds", lambda self, sequences, drafts: 1.0)
    sweep = sweep_of(Path("unused"), drafters=["suffix"], k=["auto"], policies=["exact"], temperatures=[0])
    (cell,) = [cell for cell in sweep.cells() if not cell.is_baseline]
    jobs = [Job(LabPrompt(token_ids=tuple(range(first, first + 12))), 0) for first in (3, 40)]
    turns = [target.run(cell, jobs, Limits(16, True), "one user") for _ in range(4)]
    assert turns[0][0][0].tokens == turns[-1][0][0].tokens
    assert sum(turns[-1][1].accepted) > sum(turns[0][1].accepted)
