"""`tinyvllm lab` from a description to table and pictures, with the fake model: scripted acceptance and a virtual clock."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tinyvllm import cli
from tinyvllm.errors import TinyvllmError
from tinyvllm.lab.fake import FakeTarget
from tinyvllm.lab.prompts import prompts_of
from tinyvllm.lab.report import HEADINGS, rows_of
from tinyvllm.lab.run import SweepRun, broken_promises
from tinyvllm.lab.sweep import Sweep, parse_sweep

Record = dict[str, Any]
ROOT = Path(__file__).parents[2]
FAKE = {"acceptance": {"good": [0.9, 0.8, 0.7], "bad": [0.2]}, "step_ms": {"1": 10, "8": 12, "32": 36}, "draft_ms": 0.5}
SWEEP = {
    "drafters": ["good", "bad"],
    "k": [1, 3],
    "policies": ["exact", "typical", "longest_prefix"],
    "batch_sizes": [1, 4],
    "temperatures": [0, 0.7],
    "prompts": ["story"],
    "num_prompts": 4,
    "max_tokens": 24,
    "repeats": 2,
    "fake": FAKE,
}


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(SWEEP | changes))
    return str(path)


def measured(target_type: type[FakeTarget] = FakeTarget, **changes: Any) -> list[Record]:
    sweep = parse_sweep(SWEEP | changes)
    return run_of(sweep, target_type)[0].records


def run_of(sweep: Sweep, target_type: type[FakeTarget] = FakeTarget) -> tuple[SweepRun, list[Record], list[str]]:
    assert sweep.fake is not None
    work = SweepRun(sweep, target_type(sweep.fake), prompts_of(sweep, Path()))
    reported: list[Record] = []
    failures: list[str] = []
    work.run(reported.append, lambda cell, error: failures.append(f"{cell}: {error}"))
    return work, reported, failures


def test_a_sweep_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, table, plots = tmp_path / "o.jsonl", tmp_path / "t.md", tmp_path / "plots"
    few = written(tmp_path, num_prompts=2, max_tokens=10)
    words = ["lab", few, "--output", str(output), "--table", str(table), "--plots", str(plots)]
    assert cli.main([*words, "--quiet"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and out == table.read_text() and {line.count("|") for line in lines} == {len(HEADINGS) + 1}
    assert len(lines) == 2 + 4 + 2 * 2 * 3 * 2 * 2 and "NOT EXACT" not in out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert records[0]["kind"] == "costs" and len(records) == 1 + len(lines) - 2
    names = {path.name for path in plots.iterdir()}
    assert names == {"acceptance.svg", "speed.svg", "predicted.svg", "break_even.svg"}
    for name in names:
        texts = [e.text for e in ElementTree.fromstring((plots / name).read_text()).iter("{http://www.w3.org/2000/svg}text")]
        assert any("good" in str(text) for text in texts), name
        assert "nan" not in (plots / name).read_text()


def test_it_needs_no_tinygrad(tmp_path: Path) -> None:
    code = "import sys; from tinyvllm import cli; code = cli.main(sys.argv[1:]); sys.exit(code or 9 * ('tinygrad' in sys.modules))"
    few = written(tmp_path, drafters=["good"], k=[1], batch_sizes=[1], temperatures=[0])
    assert subprocess.run([sys.executable, "-c", code, "lab", few, "--quiet"], cwd=ROOT, capture_output=True, timeout=60).returncode == 0


def test_exact_policies_change_no_token_and_lossy_ones_are_measured_as_lossy() -> None:
    records = measured(batch_sizes=[4], repeats=1)
    exact = [one for one in records if not one["lossy"] and one["method"] != "none"]
    lossy = [one for one in records if one["lossy"]]
    assert all(one["exact"] and one["divergence"]["difference"] == one["divergence"]["kl"] == 0 for one in exact)
    greedy = [one for one in records if one["policy"].startswith("longest") and one["temperature"] == 0]
    assert greedy and all(one in exact for one in greedy)
    typical = [one for one in lossy if one["policy"].startswith("typical")]
    assert all(not one["exact"] and one["divergence"]["difference"] > 0 and one["divergence"]["kl"] > 0 for one in typical)
    for one in records:
        assert one["divergence"]["perplexity"] > 1
        baseline = next(b for b in records if b["method"] == "none" and b["temperature"] == one["temperature"])
        assert one["divergence"]["reference_perplexity"] == pytest.approx(baseline["divergence"]["perplexity"])
    assert not broken_promises(records)


def test_measured_acceptance_is_the_scripted_one() -> None:
    """Of the drafts whose predecessors were accepted: .9, .8, .7, within four standard errors. Lossy policies accept more."""
    few = {"drafters": ["good"], "k": [3], "batch_sizes": [4], "temperatures": [0], "quality": False, "paired": False, "warmup": 0}
    records = measured(**few, num_prompts=40, max_tokens=60, policies=["exact", "confidence:tau=0.1"])
    exact, lossy = (one for one in records if one["method"] == "good")
    reached = exact["positions"][0]["drafted"]
    for rate, place in zip((0.9, 0.8, 0.7), exact["positions"]):
        assert abs(place["accepted"] / reached - rate) < 4 * math.sqrt(rate * (1 - rate) / reached) + 0.01  # the last chains are shorter
        reached = place["accepted"]
    assert lossy["acceptance"] > exact["acceptance"] and lossy["tokens_per_step"] > exact["tokens_per_step"]
    tokens = sum(place["accepted"] for place in exact["positions"])
    assert exact["tokens_per_step"] == pytest.approx(1 + tokens / exact["positions"][0]["drafted"], abs=0.05)


def test_predicted_speed_ups_are_near_the_measured_ones() -> None:
    """The virtual clock follows the curve, so one sequence is predicted within a few percent; batches end unevenly."""
    few = {"max_tokens": 64, "repeats": 1, "warmup": 0, "quality": False, "temperatures": [0.7], "policies": ["exact", "typical"]}
    work = run_of(parse_sweep(SWEEP | few))[0]
    rows = [row for row in rows_of(work.records, work.curve) if not row.is_baseline]
    for row in rows:
        assert row.speedup is not None and row.predicted is not None
        tolerance = 0.05 if row.record["batch_size"] == 1 else 0.25
        assert row.predicted == pytest.approx(row.speedup, rel=tolerance), row.record
    best = max(rows, key=lambda row: row.speedup or 0)
    assert best.record["drafter"] == "good" and best.record["k"] == 3 and best.record["batch_size"] == 1


class Broken(FakeTarget):
    """Changes a token of every third answer where there are drafts; cells of K 3 fail."""

    def run(self, cell: Any, jobs: Any, limits: Any, trial: str) -> Any:
        if cell.k == 3:
            raise TinyvllmError("no memory\nfor that")
        answers, counts = super().run(cell, jobs, limits, trial)
        if not cell.is_baseline:
            answers = [type(a)(a.prompt_ids, (a.tokens[0] ^ 1, *a.tokens[1:]), a.first_token, a.finished) for a in answers]
        return answers, counts


def test_a_broken_promise_and_a_failed_cell_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyvllm.lab.fake.FakeTarget", Broken)
    few = written(tmp_path, drafters=["good"], policies=["exact", "typical"], batch_sizes=[1], temperatures=[0])
    output = tmp_path / "o.jsonl"
    assert cli.main(["lab", few, "--output", str(output), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out.count("NOT EXACT") == 1 and err.count("a defect") == 1 and "T 0, story: no memory for that\n" in err and err.count("\n") == 3
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one["error"] for one in records[1:]].count("no memory for that") == 2
    monkeypatch.undo()
    assert cli.main(["lab", few, "--output", str(output), "--quiet"]) == 1  # the cells that failed are measured, the broken one is known
    assert len(output.read_text().splitlines()) == len(records) + 2


def test_a_second_run_measures_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "o.jsonl"
    few = {"drafters": ["good"], "num_prompts": 2, "max_tokens": 8}
    words = ["lab", written(tmp_path, k=[1], **few), "--no-paired", "--output", str(output), "--quiet"]
    assert cli.main(words) == 0
    table, whole = capsys.readouterr().out, output.read_bytes()
    lines = whole.splitlines(keepends=True)
    ran: list[str] = []
    run = FakeTarget.run
    monkeypatch.setattr(FakeTarget, "run", lambda self, cell, *rest: ran.append(str(cell)) or run(self, cell, *rest))
    assert cli.main(words) == 0 and capsys.readouterr().out == table and not ran and output.read_bytes() == whole
    output.write_bytes(b"".join(lines[:-2]) + lines[-2][:100])  # killed while it wrote the last but one
    assert cli.main(words) == 0 and capsys.readouterr().out == table
    assert output.read_bytes() == whole and len(set(ran)) == 2
    ran.clear()
    more = ["lab", written(tmp_path, k=[1, 2], **few), *words[2:]]
    assert cli.main(more) == 0 and len(set(ran)) == 12 and "k=2" in ran[0]
    output.write_bytes(whole[:50] + b"\n" + whole)
    assert cli.main(words) == 1 and "not a line of answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k", "none"], "k (or auto) must be integers from 1 to 64, got 'none'"),
        (["--policies", "exact;typicel"], "did you mean 'typical'"),
        (["--plot-format", "gif"], "--plot-format: expected one of svg, png, pdf, got 'gif'"),
        (["--output", "x.txt"], "--output must end in .jsonl"),
        (["--drafters", "god"], "acceptance of the drafter 'god' is missing, did you mean 'good'"),
        (["--drafters", "good,eagle3:heads"], "the drafter 'eagle3:heads' has a model, which only an engine runs; leave fake out"),
        (["--drafters", "eagle3:"], "drafters: expected METHOD or METHOD:MODEL, such as eagle3:heads, got 'eagle3:'"),
        (["--plots", "/dev/null/x"], "--plots /dev/null/x"),
        (["--repeats", "900", "--max-tokens", "60000"], "are kept; lower one of them"),
        (["--temperatures", "warm"], "temperatures must be numbers"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(["lab", written(tmp_path), *words, "--quiet"]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_plan_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "exact;confidence:tau=0.3", "--k", "2,auto", "--temperatures", "0", "--batch-sizes", "1,2", "--drafters", "good")
    assert cli.main(["lab", written(tmp_path), *words, "--plan"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 + 8 + 1 and out[-1] == "10 cells, each 2 repeats"
    assert out[0] == "no drafts, batch 1, T 0, story" and out[-2] == "good k=auto confidence(tau=0.3), lossy, batch 2, T 0, story"


def test_pictures_by_matplotlib_say_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    few = written(tmp_path, drafters=["good"], k=[1], batch_sizes=[1], temperatures=[0], policies=["exact"])
    assert cli.main(["lab", few, "--plots", str(tmp_path / "p"), "--plot-format", "png", "--quiet"]) == 2
    assert "pip install 'tinyvllm[lab]', or use svg" in capsys.readouterr().err


def test_pictures_by_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few = written(tmp_path, drafters=["good"], k=[1, 2], policies=["exact"], temperatures=[0])
    assert cli.main(["lab", few, "--plots", str(tmp_path / "p"), "--plot-format", "png", "--quiet"]) == 0
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "p").iterdir())
