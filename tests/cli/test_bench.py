"""`tinyvllm bench`: what its tests count, and its reports."""

from __future__ import annotations

import csv
import io
import itertools
import json
from types import SimpleNamespace

import pytest

from tinyvllm import LLM
from tinyvllm.cli import main
from tinyvllm.config.engine import DEFAULT_MODEL
from tinyvllm.engine.tools import bench
from tinyvllm.engine.tools.bench import Workload, bench_options, roofs, run_tests

ARGUMENTS = ["bench", "-p", "40", "-n", "6", "-d", "0,50", "-b", "1,3", "-r", "2", "--quiet"]
NAMES = ["pp40", "tg6", "pp40 x3", "tg6 x3", "pp40 @ d50", "tg6 @ d50", "pp40 @ d50 x3", "tg6 @ d50 x3"]


def test_each_test_counts_the_tokens_that_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which everything takes a second. Of a context of 50 tokens the cache has 48: three blocks."""
    clock = itertools.count()
    tests = [Workload(40, 0), Workload(0, 6), Workload(40, 0, 50), Workload(40, 0, 50, 3), Workload(0, 6, 50, 3)]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with LLM(DEFAULT_MODEL, device="CPU", **bench_options(tests, 16), speculative_config="off", skip_tokenizer_init=True) as llm:
        speeds = {speed.test.name: speed.rates for speed in run_tests(llm, tests, 2)}
        roof = roofs(llm, tests)
    assert speeds == {
        "pp40": (40, 40), "tg6": (6, 6), "pp40 @ d50": (42, 42), "pp40 @ d50 x3": (126, 126), "tg6 @ d50 x3": (18, 18),
    }  # fmt: skip
    assert (whole := roof[tests[0]]) and (after := roof[tests[2]]) and after < whole, "attention reads the context"
    assert (alone := roof[tests[1]]) and (together := roof[tests[4]]) and alone < together < 3 * alone


@pytest.mark.parametrize("test", [Workload(0, 6), Workload(40, 0), Workload(0, 1, 31, 2)], ids=lambda test: test.name)
def test_a_test_alone_has_the_context_that_it_needs(test: Workload) -> None:
    with LLM(DEFAULT_MODEL, device="CPU", **bench_options([test], 16), speculative_config="off", skip_tokenizer_init=True) as llm:
        (speed,) = run_tests(llm, [test], 1)
    assert speed.mean > 0


def test_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "-o", "json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [one["test"] for one in records] == NAMES
    assert all(one["tok_s"] == pytest.approx(sum(one["rates"]) / 2) and len(one["rates"]) == 2 for one in records)
    assert all(one["share"] == pytest.approx(one["tok_s"] / one["roof_tok_s"]) for one in records)
    for text in (as_rows(bench_report(records, "csv")), as_rows_of_table(bench_report(records, "md"))):
        assert [row["test"] for row in text] == NAMES


def bench_report(records: list[dict[str, object]], name: str) -> str:
    from tinyvllm.cli.bench import FORMATS

    return FORMATS[name](records)


def as_rows(text: str) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(text))]


def as_rows_of_table(text: str) -> list[dict[str, str]]:
    heading, _, *rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [{key.strip(): cell.strip() for key, cell in zip(heading, row, strict=True)} for row in rows]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["-p", "0", "-n", "0"], "expected 1 to 256 tests, got 0"),
        (["-p", "12,x"], "--n-prompt: expected numbers from 0 to 1048576, separated by commas, got '12,x'"),
        (["-b", "0"], "--batch: expected numbers from 1 to 1024"),
        (["-d", "-1"], "--n-depth|argument"),
        (["-r", "0"], "--repetitions: expected 1 to 1000, got 0"),
        (["-o", "sql"], "--output-format: 'sql' is not one of md, json, csv"),
    ],
)
def test_arguments_out_of_range(more: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *more]) == 2
    error = capsys.readouterr().err
    assert any(text in error for text in expected.split("|"))
