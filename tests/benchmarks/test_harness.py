"""How rounds become figures, and which figures are kept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Round, record, spread, table, take_turns
from benchmarks.plot import bars, newest, ratios


def test_disturbed_rounds_are_left_out_where_enough_were_quiet() -> None:
    quiet = [Round(s, 0.0) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    s = spread([*quiet, Round(90.0, 1.5), Round(80.0, 0.4)])
    assert (s.median, s.low, s.high, s.quiet, s.rounds, s.disturbed) == (3.0, 2.0, 4.0, 5, 7, False)
    assert s.figures(6)["rate"] == 2.0 and s.figures(6)["low"] == 1.5
    assert s.divided(2).median == 1.5
    mixed = spread([Round(1.0, 0.0), Round(2.0, 0.0), Round(9.0, 1.0)])
    assert mixed.median == 2.0 and mixed.disturbed


def test_functions_take_turns_and_may_time_themselves() -> None:
    order = []
    timed = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b") or 5.0}, 2, patience=1)
    assert order == ["a", "b", "a", "b"]
    assert [r.seconds for r in timed["b"]] == [5.0, 5.0] and all(r.seconds < 1 for r in timed["a"])


def test_disturbed_figures_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(harness, "commit", lambda: "abc1234")
    record("x", {"n": 1}, [spread([Round(1.0, 1.7)] * 3)])
    assert not (tmp_path / "results").exists() and "up to 1.7 processors" in capsys.readouterr().out
    record("x", {"n": 2}, [spread([Round(1.0, 0.0)] * 3)])
    line = json.loads((tmp_path / "results" / "x.jsonl").read_text())
    assert line["n"] == 2 and line["cores"] and line["commit"]


def test_table() -> None:
    assert table(["a", "b"], [["x", 1.234], ["yy", None]]) == "| a  |    b |\n|----|-----:|\n| x  | 1.23 |\n| yy |      |"


def test_plot_takes_the_newest_line_of_each_test(tmp_path: Path) -> None:
    def line(rate: float, test: str) -> str:
        figures = {"rate": rate, "low": rate, "high": rate * 1.5}
        other = {"rate": 10.0, "low": 9.0, "high": 11.0}
        return json.dumps({"shape": "s", "format": "BF16", "test": test, "threads": 2, "roof_tok_s": None,
                           "tok_s": {"tinyvllm": figures, "llama.cpp": other}})  # fmt: skip

    path = tmp_path / "compare.jsonl"
    path.write_text("\n".join([line(5.0, "decode"), line(7.0, "prefill"), line(20.0, "decode")]) + "\n")
    lines = newest(path)
    assert [entry["test"] for entry in lines] == ["decode", "prefill"]
    assert ratios(lines).splitlines()[2].split("|")[-2].strip() == "2.00"
    assert "tinyvllm" in bars(lines[0]) and "20.0" in bars(lines[0])


def test_figures_of_uncommitted_code_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(harness, "commit", lambda: "abc1234-dirty")
    record("x", {"n": 1})
    assert not (tmp_path / "results").exists() and "commit them first" in capsys.readouterr().out


def test_results_do_not_make_a_commit_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are appended while a benchmark runs: the next figure belongs to the same commit."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    code, result = tmp_path / "benchmarks" / "harness.py", tmp_path / "benchmarks" / "results" / "x.jsonl"
    code.touch()
    result.touch()
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    monkeypatch.setattr(harness, "__file__", str(code))
    result.write_text("a figure")
    assert harness.commit() and not harness.commit().endswith("-dirty")
    code.write_text("changed")
    assert harness.commit().endswith("-dirty")


@pytest.mark.parametrize(
    ("vendor", "family", "model", "expected"),
    [
        ("AuthenticAMD", 25, 1, "Zen 3"),
        ("AuthenticAMD", 25, 17, "Zen 4"),
        ("AuthenticAMD", 25, 0x61, "Zen 4"),
        ("AuthenticAMD", 23, 0x31, "Zen 2"),
        ("AuthenticAMD", 26, 2, "Zen 5"),
        ("GenuineIntel", 6, 143, "Sapphire Rapids"),
        ("GenuineIntel", 6, 207, "Emerald Rapids"),
        ("GenuineIntel", 6, 85, "family 6 model 85"),
    ],
)
def test_core_is_told_from_family_and_model(vendor: str, family: int, model: int, expected: str) -> None:
    first = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: X\n"
    told = harness.cpuinfo(f"{first}\nprocessor\t: 1\nmodel\t\t: 99\n")
    assert (harness.core(told), told["model name"], harness.core({})) == (expected, "X", "")
