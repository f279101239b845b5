"""Every figure of README.md and docs/figures.md comes from a record of benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import BLOCKS, PAGES, ROOT, compared, filled, newest, records


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_what_the_records_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert filled(text) == text, f"{page} is out of date: run python -m benchmarks.figures --write"


def test_picture_is_what_the_record_says() -> None:
    assert (ROOT / figures.QUALITY_PICTURE).read_text() == figures.quality_picture(), "run python -m benchmarks.figures --write"


def test_a_changed_figure_is_found(tmp_path: Path) -> None:
    text = "<!-- figures readme -->\n| one sequence, bf16 | 999 |\n<!-- end -->\n"
    assert "999" not in filled(text)


def test_every_block_is_on_a_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert all(f"<!-- figures {name} -->" in text for name in BLOCKS)


def test_records_of_changed_code_or_an_unnamed_processor_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    lines = [{"n": 1, "commit": "a", "isa": "avx2"}, {"n": 2, "commit": "a-dirty", "isa": "avx2"}, {"n": 3, "commit": "b"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["n"] for line in records("x")] == [1]


def test_forced_kernels_have_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    own = {"commit": "a", "isa": "avx2 avx512f", "cores": 2, "cpu": "X", "shape": "tinyllama-1.1b", "format": "BF16", "test": "decode",
           "tok_s": {"tinyvllm": {"rate": 30.0}}, "read_GBps": 40}  # fmt: skip
    forced = {**own, "forced": "all=avx2", "tok_s": {"tinyvllm": {"rate": 20.0}}}
    (tmp_path / "compare.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (own, forced)))
    both = filled("<!-- figures engines -->\n<!-- end -->\n")
    first, second = both.index("an X (AVX2, AVX-512):"), both.index("an X (AVX2, AVX-512), with `TINYVLLM_KERNELS=all=avx2`:")
    assert first < both.index("30.0") < second < both.index("20.0")
    assert "20.0" not in filled("<!-- figures readme -->\n<!-- end -->\n")


def test_generations_of_one_model_name_are_told_apart() -> None:
    line = {"isa": "avx2 avx_vnni avx512f", "cores": 2, "cpu": "AMD EPYC"}
    assert figures.processor(line) == "2 cores of an AMD EPYC, Zen 5 (AVX2, AVX-512)"
    assert figures.processor({**line, "isa": "avx2 avx512f", "core": "Zen 4"}) == "2 cores of an AMD EPYC, Zen 4 (AVX2, AVX-512)"
    assert figures.processor({**line, "isa": "avx2 avx512f"}) == "2 cores of an AMD EPYC (AVX2, AVX-512)"


def test_the_newest_record_of_a_row_counts() -> None:
    def line(rate: float) -> dict[str, object]:
        return {"shape": "tinyllama-1.1b", "format": "BF16", "test": "decode", "commit": "a",
                "tok_s": {"tinyvllm": {"rate": rate}, "llama.cpp": {"rate": 10.0}}}  # fmt: skip

    text = compared([line(5.0), line(20.0)], roofs=False)
    assert "20.0" in text and "2.00" in text and "5.0 " not in text
    assert newest([line(5.0)], test="prefill") is None


def test_goals_of_quality_are_those_whose_rows_were_measured() -> None:
    def row(weights: str, kl: float, kv_cache: str = "auto", reference: bool = False) -> dict[str, object]:
        figures = {"kl": {"value": kl}, "perplexity_ratio": {"value": 1 + kl}}
        return {"weights": weights, "kv_cache": kv_cache, "reference": reference, **figures}

    rows = [row("own", 0.0, reference=True), row("q4_0", 0.004), row("q4_k_m", 0.001), row("own", 0.0005, "int8"), row("q8_0", 1.0, "int4")]
    lines = [[cell.strip() for cell in line.split("|")[1:4]] for line in figures.quality_goals(rows).splitlines()[2:]]
    assert lines == [
        ["KL mean of q4_k_m by that of q4_0", "at most 0.5", "0.25"],
        ["perplexity with KV cache int8, change", "at most 0.1%", "+0.050%"],
    ]


def test_a_peer_that_an_older_run_alone_has_keeps_its_row() -> None:
    def line(commit: str, *peers: str) -> figures.Line:
        known = {"shape": "tinyllama-1.1b", "format": "BF16", "test": "decode"}
        return {**known, "commit": commit, "tok_s": {name: {"rate": 9.0} for name in ("tinyvllm", *peers)}}

    lines = [line("a", "llama.cpp"), line("b", "llama.cpp", "ik_llama.cpp"), line("c", "transformers"), line("d", "transformers")]
    assert [one["commit"] for one in figures.runs(lines, "tinyllama-1.1b", "BF16", "decode")] == ["d", "b"]


def test_prompts_of_another_length_have_rows_of_their_own() -> None:
    def line(rate: float, prompt: int) -> figures.Line:
        known = {"shape": "tinyllama-1.1b", "format": "BF16", "test": "prefill", "commit": "a"}
        return {**known, "prompt": prompt, "tok_s": {"tinyvllm": {"rate": rate}}}

    rows = compared([line(300.0, 512), line(200.0, 1536)], roofs=False).splitlines()[2:]
    assert [[cell.strip() for cell in row.split("|")[1:3]] for row in rows] == [
        ["prompt of 512 tokens, bf16", "300"],
        ["prompt of 1,536 tokens, bf16", "200"],
    ]


def test_the_readme_has_the_last_processor_that_was_measured_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    own = {"commit": "a", "isa": "avx2", "cores": 2, "shape": "tinyllama-1.1b", "tok_s": {"tinyvllm": {"rate": 30.0}}}
    whole = [{**own, "cpu": cpu, "format": format, "test": test} for cpu in ("W", "X") for format, test in sorted(figures.WHOLE)]
    (tmp_path / "compare.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*whole, {**whole[0], "cpu": "Y"}]))
    assert "2 cores of an X (AVX2):" in filled("<!-- figures readme -->\n<!-- end -->\n")


def test_the_readme_has_the_processor_with_the_most_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    own = {"commit": "a", "isa": "avx2", "cores": 2, "shape": "tinyllama-1.1b"}
    rates = {"W": ("tinyvllm", "llama.cpp", "ik_llama.cpp"), "X": ("tinyvllm", "llama.cpp")}
    lines = [
        {**own, "cpu": cpu, "format": format, "test": test, "tok_s": {name: {"rate": 30.0} for name in names}}
        for cpu, names in rates.items()
        for format, test in sorted(figures.WHOLE)
    ]
    (tmp_path / "compare.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "2 cores of an W (AVX2):" in filled("<!-- figures readme -->\n<!-- end -->\n")
