"""`tinyvllm quality`: its rows, their order by quality, what it writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tinyvllm import cli
from tinyvllm.cli import quality as command
from tinyvllm.cli.quality_plot import HEIGHT, plot
from tinyvllm.cli.quality_report import best, best_line, table
from tinyvllm.config.engine import DEFAULT_MODEL, QUANTIZATIONS

QUICK = ("--device", "CPU", "--quiet", "--no-decode", "--context", "128", "--windows", "2")


def row(name: str, weight_bytes: int, kl: float, kv_cache: str = "auto", kv_bytes: int = 100, reference: bool = False) -> dict[str, Any]:
    one = {"value": 1.0, "error": 0.1}
    figures: dict[str, Any] = dict.fromkeys(("perplexity", "perplexity_ratio", "same_top", "mean_dp", "rms_dp"), one) | {"kl_max": 1.0}
    figures |= {"kl": {"value": kl, "error": 0.0}, "kl_percentiles": {"50": kl, "90": kl, "99": kl}}
    head = {"weights": name, "kv_cache": kv_cache, "reference": reference, "formats": ("Q8_0",)}
    return head | {"weight_bytes": weight_bytes, "kv_bytes_per_token": kv_bytes, "decode_tok_s": 10.0} | figures


def test_worse_formats_are_further_from_the_reference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The bundled model and its held-out text, by default. A model that is the reference has no divergence at all."""
    lines, picture = tmp_path / "rows.jsonl", tmp_path / "plot.svg"
    model, files = str(DEFAULT_MODEL), ("--output", str(lines), "--plot", str(picture))
    words = (model, "--against", model, "--formats", "q8_0,q5_0,q4_0", *files)
    assert cli.main(["quality", *words, *QUICK]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one["weights"] for one in rows] == ["the bundled model", "the bundled model", "q8_0", "q5_0", "q4_0"]
    reference, same, *packed = rows
    assert reference["reference"] and same["kl"] == {"value": 0.0, "error": 0.0} and same["same_top"]["value"] == 1
    assert same["perplexity"] == reference["perplexity"] and same["kl_max"] == 0 and same["tokens"] == 2 * 63
    assert [one["formats"] for one in packed] == [["Q8_0"], ["Q5_0"], ["Q4_0"]]
    q8, q5, q4 = (one["kl"]["value"] for one in packed)
    assert 0 < 4 * q8 < q5 and 2 * q5 < q4
    assert packed[0]["weight_bytes"] > packed[1]["weight_bytes"] > packed[2]["weight_bytes"]
    out = capsys.readouterr().out
    assert "2 of " in out and "126 tokens scored" in out and out.rstrip().endswith("the bundled model, q8_0, q5_0, q4_0")
    assert "| the bundled model (reference) |" in out and {len(line.split("|")) for line in out.splitlines() if "|" in line} == {17}
    texts = [element.text for element in ElementTree.fromstring(picture.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert {"q8_0", "q5_0", "q4_0"} <= set(texts) and "the bundled model" not in texts  # a logarithm of no divergence


def test_by_default_every_format_and_every_type_of_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "KV_CACHE_DTYPES", ("auto", "int9"))
    monkeypatch.setattr(command, "resolve", lambda **options: None)

    def rows(*words: str) -> list[tuple[str, str]]:
        return [(one.weights, one.kv_cache) for one in command._rows(command_options(*words))[1]]

    assert rows() == [*((format, "auto") for format in QUANTIZATIONS), ("the bundled model", "int9")]
    assert rows("--kv-cache-dtypes", "auto,int9") == [("the bundled model", "int9")]
    assert rows("--kv-cache-dtypes", "auto", "--reference-dtype", "float32") == [("the bundled model", "auto")]
    assert rows("--formats", "q8_0,q4_0,q8_0") == [("q8_0", "auto"), ("q4_0", "auto")]
    assert rows("--formats", "q8_0,q4_0", "--imatrix", "f") == [("q8_0", "auto"), ("q4_0", "auto"), ("q4_0, imatrix", "auto")]
    pairs = rows("x/a.gguf", "b", "--against", "c", "--text", "t", "--kv-cache-dtypes", "all")
    assert pairs == [("a.gguf", "auto"), ("a.gguf", "int9"), ("b", "auto"), ("b", "int9")]


def command_options(*words: str) -> Any:
    from tinyvllm.cli.arguments import parse

    return parse(["quality", *words])[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--formats", "q9_0"], "--formats: expected all, or some of q8_0"),
        (["--formats", "q8_0", "--kv-cache-dtypes", "in8"], "--kv-cache-dtypes: expected all, or some of auto"),
        (["--kv-cache-dtypes", "auto"], "nothing to compare with the reference"),
        (["a.gguf"], "--against is missing"),
        (["--formats", "q8_0", "--imatrix", "f.dat"], "--imatrix f.dat changes no row"),
        (["--context", "4"], "--context must be at least 8, got 4"),
        (["--windows", "0"], "--windows must be at least 1, got 0"),
        (["--scratch", "much"], "--scratch must be a size"),
        (["--against", str(Path(__file__).parent), "--formats", "q8_0"], "--text is missing"),
        (["--text", "/no/such.txt"], "--text /no/such.txt: No such file"),
        (["--output", "/no/such/folder/rows.jsonl"], "cannot write /no/such/folder/rows.jsonl"),
        (["--reference-dtype", "int3"], "dtype"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(["quality", *words]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1, err


def test_texts_from_outside_are_bounded_and_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MAX_TEXT", 64 << 10)
    bad = tmp_path / "bad.txt"
    for data, message in ((b"x" * (64 << 10) + b"y", "longer than 0 MiB"), (b"ab\xff", "not UTF-8 text: byte 2 is 0xff")):
        bad.write_bytes(data)
        assert cli.main(["quality", "--text", str(bad)]) in (1, 2) and message in capsys.readouterr().err


def test_a_window_beyond_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", "--formats", "q8_0", "--context", "2000", "--device", "CPU", "--quiet"]) == 2
    assert "error: --context 2000: max_model_len=2000 is beyond the 1024 tokens" in capsys.readouterr().err


def test_a_model_that_cannot_be_compared_costs_one_row(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its error is named, the others are measured, and the exit code says it."""
    text = tmp_path / "text.txt"
    text.write_text("a little fox " * 40)
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    words = ("--against", str(tiny_model), "--text", str(text), "--output", "-", *QUICK)
    assert cli.main(["quality", str(other), str(DEFAULT_MODEL), str(tiny_model), *words]) == 1
    out, err = capsys.readouterr()
    assert "quality: other: --context 128: max_model_len=128 is beyond the 16 tokens" in err
    assert "quality: the bundled model: it has logits for 3072 tokens, the reference for 264" in err
    assert [json.loads(line)["kl"]["value"] for line in out.splitlines()] == [0.0, 0.0]


def test_an_interrupted_run_leaves_the_rows_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "rows.jsonl"

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinyvllm.engine.tools.quality.model_scores", interrupt)
    assert cli.main(["quality", "--formats", "q8_0", "--output", str(lines), *QUICK]) == 130
    (row,) = map(json.loads, lines.read_text().splitlines())
    assert row["reference"] and [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_rows_that_are_best_for_their_size() -> None:
    rows = [row("bf16", 100, 0.0, reference=True), row("a", 50, 0.1), row("b", 60, 0.2), row("c", 40, 0.3), row("d", 40, 0.4),
            row("bf16", 100, 0.05, "int4", 25)]  # fmt: skip
    assert [one["weights"] for one in best(rows)] == ["a", "c", "bf16"]
    assert best_line(rows).endswith(": bf16 with KV int4, a, c")


def test_names_of_files_do_not_break_table_or_picture() -> None:
    rows = [row("bf16", 100, 0.0, reference=True), row("a|b\n<c>&", 50, 0.1), row("x", 50, 0.1, "int4", 25)]
    assert (
        "| a\\|b <c>& " in table(rows)
        and "tok/s |" in table(rows)
        and "-0.00" not in table([row("x", 1, 0.1) | {"mean_dp": {"value": -1e-9, "error": 0.0}}])
    )
    svg = ElementTree.fromstring(plot(rows))
    assert svg.get("height") == str(2 * HEIGHT)  # a panel for weights, one for the types of cache
    assert ElementTree.fromstring(plot(rows[:1])) is not None
