"""The comparison's two sides: a contestant in its own process, one is missing, one cannot run a test, one fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.compare import contest as contest_module
from benchmarks.compare.contest import READING, Contestant, contest, start, steps_of_a_round
from benchmarks.shapes import write_folder
from tests.benchmarks.test_shapes import micro

LIMITS = {"threads": 1, "batch": 2, "length": 128, "chunk": 64}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest_module, "read_once", lambda: 0.1)
    monkeypatch.setattr(contest_module, "PAUSE", 0.0)


def test_ours_plays(tmp_path: Path) -> None:
    model = write_folder(micro("tiny160m"), tmp_path / "model")
    one = start("tinyvllm", "play_tinyvllm", sys.executable, model, LIMITS, tmp_path / "log")
    assert one.missing is None, one.missing
    spreads = contest([one], "batch", ("begin", 2, 40), {"tinyvllm": ("steps", 3)}, 1, 2)
    assert set(spreads) == {"tinyvllm", READING} and spreads["tinyvllm"].median > 0
    assert contest([one], "prefill", None, {"tinyvllm": ("prefill", 70)}, 1, 1)["tinyvllm"].rounds >= 1
    assert steps_of_a_round([one], "decode", ("begin", 1, 16), 1e-9, 50) == {"tinyvllm": 2}
    contest([one], "decode", ("begin", 1, 120), {"tinyvllm": ("steps", 30)}, 1, 1)  # beyond the context it was given
    assert "max_model_len" in one.notes["decode"]
    one.close()
    assert one.process is not None and one.process.returncode == 0


def test_a_peer_that_is_not_installed_is_missing(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such peer')")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    one = start("llama.cpp", "play_llama_cpp", str(script), tmp_path / "a.gguf", LIMITS, tmp_path / "log")
    assert one.process is None and one.missing == "no such peer"
    missing = start("llama.cpp", "play_llama_cpp", str(tmp_path / "no-python"), tmp_path / "a.gguf", LIMITS, tmp_path / "log")
    assert missing.missing is not None and "No such file" in missing.missing


def test_a_model_that_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    one = start("tinyvllm", "play_tinyvllm", sys.executable, tmp_path / "bad.gguf", LIMITS, tmp_path / "log")
    assert one.process is None and one.missing is not None and "bad.gguf" in one.missing


def test_a_missing_contestant_is_left_out() -> None:
    assert set(contest([Contestant("x", None, "not here")], "decode", ("begin", 1, 16), {"x": ("steps", 1)}, 1, 1)) == {READING}


def test_ik_llama_times_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its load and warm-up do not count; repacked matrices are taken where they are faster; a batch is beyond its llama-bench."""
    bench = tmp_path / "llama-bench"
    bench.write_text('#!/bin/sh\ncase "$*" in *"-rtr 1"*) ns=2000000000;; *) ns=5000000000;; esac\necho "[{\\"avg_ns\\": $ns}]"\n')
    bench.chmod(0o755)
    monkeypatch.setenv("IK_LLAMA_BENCH", str(bench))
    one = start("ik_llama.cpp", "play_ik_llama", sys.executable, tmp_path / "a.gguf", LIMITS, tmp_path / "log")
    assert one.missing is None, one.missing
    contest_module.tune([one], "prefill", 1, 64)
    assert one.settings == "rtr=1"
    spreads = contest([one], "prefill", None, {"ik_llama.cpp": ("prefill", 64)}, 1, 1)
    assert spreads["ik_llama.cpp"].median == 2.0
    assert steps_of_a_round([one], "batch", ("begin", 2, 16), 1.0, 9) == {} and "one sequence" in one.notes["batch"]
    one.close()
    monkeypatch.delenv("IK_LLAMA_BENCH")
    missing = start("ik_llama.cpp", "play_ik_llama", sys.executable, tmp_path / "a.gguf", LIMITS, tmp_path / "log")
    assert missing.process is None and "IK_LLAMA_BENCH" in str(missing.missing)
