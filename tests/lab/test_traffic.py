"""Recorded traffic with another drafter: what it accepts is what the engine would, and the clock follows the cost curve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyvllm import SamplingParams, cli
from tinyvllm.config.engine import resolve
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.tools.record import Recorder
from tinyvllm.engine.tools.recording import read_run
from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.sweep import DrafterSpec
from tinyvllm.lab.traffic import Simulation, costs_of, traffic_of

COSTS = StepCosts.of([(1, 10.0), (101, 20.0)])
NGRAM = DrafterSpec("ngram", "ngram", (("prompt_lookup_max", 2),))


def written(path: Path, requests: list[tuple[float, list[int], list[list[int]]]], steps: list[dict[str, Any]] = []) -> Path:  # noqa: B006
    """A recording of (time, prompt, outputs), by hand."""
    events: list[dict[str, Any]] = [{"format": 2, "config": {"max_num_seqs": 2}}]
    for i, (t, prompt, outputs) in enumerate(requests):
        events.append({"add": f"r{i}", "step": 0, "t": t, "prompt": prompt, "params": {}, "options": {}})
        events.append({"end": f"r{i}", "step": 9, "tokens": outputs, "reasons": ["length"] * len(outputs), "chain": ""})
    path.write_text("".join(json.dumps(event) + "\n" for event in [*events, *steps]))
    return path


def simulated(path: Path, spec: DrafterSpec | None = None, k: int | None = 4) -> Any:
    traffic = traffic_of(read_run(str(path)))
    clock: Callable[[], float] = lambda: 0.0  # noqa: E731
    return (Simulation(traffic, COSTS, clock=clock) if spec is None else Simulation(traffic, COSTS, spec, k, clock)).run()


def test_a_text_that_repeats_is_guessed_from_its_own_prompt(tmp_path: Path) -> None:
    """Prompt 1 2 3 4 5 1, output 2 3 4 5 1 2 3: after the first token all is in the prompt. 10.5 ms prefill, then six tokens."""
    path = written(tmp_path / "r.jsonl", [(5.0, [1, 2, 3, 4, 5, 1], [[2, 3, 4, 5, 1, 2, 3]])])
    plain, drafted = simulated(path), simulated(path, NGRAM)
    assert plain.tokens == drafted.tokens == 7 and plain.counts.turns == plain.counts.steps == 6
    assert plain.busy == plain.latencies[0] == pytest.approx(10.5 + 6 * 10)
    # four drafts and the token after them, then what is left is one token, which needs no draft
    assert drafted.counts.steps == 2 and drafted.counts.drafted == drafted.counts.accepted == [1, 1, 1, 1]
    assert drafted.busy == pytest.approx(10.5 + 10.4 + 10) and drafted.tokens_per_step == 3


def test_batches_arrivals_and_wrong_drafts(tmp_path: Path) -> None:
    """Two of three sequences run at a time; the third arrives first and has two continuations. Nothing changes an output."""
    requests = [(1.0, [1, 2, 1, 2], [[9, 8, 7]]), (1.0, [3, 3, 3], [[3, 3, 4, 4]]), (0.0, [5], [[6], [6, 5, 6]])]
    path = written(tmp_path / "r.jsonl", requests)
    plain, drafted = simulated(path), simulated(path, NGRAM, 2)
    assert plain.tokens == drafted.tokens == 3 + 4 + 4 and len(plain.latencies) == 4
    assert sum(drafted.counts.drafted) > sum(drafted.counts.accepted) > 0
    assert drafted.counts.steps <= plain.counts.steps


def test_a_cost_curve_of_the_recorded_times(tmp_path: Path) -> None:
    """Medians of the times between steps of decodes; a step with a chunk, and one of which a time is missing, are no samples."""
    times = [0, 10, 20, 33, 43, 55, 67, 79, 100]
    runs = [[0, 0, 6, 1]] * 4 + [[0, 0, 6, 1, 1, 0, 6, 1]] * 4 + [[0, 0, 0, 6]]
    steps = [{"step": i, "run": run, "t": t / 1000} for i, (run, t) in enumerate(zip(runs, times), 1)]
    curve = costs_of(read_run(str(written(tmp_path / "r.jsonl", [(0, [1], [[2]])], steps))))
    assert curve is not None and curve.rows == (1, 2) and curve.milliseconds == pytest.approx((10, 12))
    assert costs_of(read_run(str(written(tmp_path / "s.jsonl", [(0, [1], [[2]])], steps[:4])))) is None


def test_it_predicts_what_the_engine_then_does(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Traffic recorded without drafts; the same requests with a drafter in the engine accept the predicted drafts."""
    from tinyvllm.speculate.controller import FixedController
    from tinyvllm.speculate.ngram import NgramDrafter

    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    counted: list[tuple[int, int]] = []
    events: list[dict[str, Any]] = []
    engine = Engine(resolve(tiny_model, num_blocks=64, max_num_seqs=2), observers=[Recorder(events.append)])

    def answer() -> None:
        for number, prompt in enumerate(([5, 6, 7] * 6, list(range(60, 90)))):
            engine.add(str(number), prompt, params)
        while engine.has_work():
            engine.step()

    answer()
    record = tmp_path / "run.jsonl"
    record.write_text("".join(json.dumps(event) + "\n" for event in events))
    engine.stats.drafts_checked = lambda request, drafts, accepted: counted.append((drafts, accepted))  # type: ignore[method-assign]
    engine.speculate(NgramDrafter(2, 2), FixedController(3))
    answer()
    engine.close()
    outcome = simulated(record, DrafterSpec("ngram", "ngram", (("prompt_lookup_max", 2),)), 3)
    assert sum(outcome.counts.drafted) == sum(drafts for drafts, _ in counted) > 0
    assert sum(outcome.counts.accepted) == sum(accepted for _, accepted in counted)
    sweep = tmp_path / "s.json"
    sweep.write_text(json.dumps({"costs": {"1": 10, "8": 11}}))
    words = ["lab", str(sweep), "--traffic", str(record), "--drafters", "ngram,suffix", "--k", "3,auto", "--quiet"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 1 + 4 and [line.split("|")[1].strip() for line in lines[2:]] == ["none", "ngram", "ngram", "suffix", "suffix"]


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = written(tmp_path / "r.jsonl", [(0.0, [1], [[2, 3]])])
    empty = written(tmp_path / "e.jsonl", [(0.0, [1], [[]])])
    cut = tmp_path / "c.jsonl"
    cut.write_text(whole.read_text().replace('"t": 0.0, ', ""))
    refused = (
        ([str(whole)], "give one as `costs` in SWEEP"),
        ([str(empty)], "no request in it has ended with output"),
        ([str(cut)], "lacks a field: KeyError('t')"),
        ([str(tmp_path / "none.jsonl")], "cannot read"),
        *(
            ([str(whole), "--drafters", name], f"the drafter {name!r} runs a model, and a recording has tokens alone; give ngram or suffix")
            for name in ("mtp", "eagle3:heads", "medusa_lite", "eagle_lite")
        ),
    )
    for words, message in refused:
        assert cli.main(["lab", "--traffic", *words, "--quiet"]) in (1, 2)
        assert message in capsys.readouterr().err, message
