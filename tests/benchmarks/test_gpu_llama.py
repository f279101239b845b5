"""llama.cpp's side of the GPU measurements: what is read of llama-bench, at toy shapes with a program in its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_llama
from tests.benchmarks.test_gpu import driver, figures
from tests.emulator.driver import Driver

assert driver  # a fixture

BENCH = """#!{python}
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
prompt, steps = int(words["-p"]), int(words["-n"])
assert open(words["-m"], "rb").read(4) == b"GGUF" and words["-ngl"] == "99" and words["-o"] == "jsonl"
print("a line that is no JSON")
print(json.dumps(dict(gpu_info="a GPU", n_prompt=prompt, n_gen=steps, avg_ts=200.0 if steps else 3000.0)))
"""


def test_rates_are_those_of_decodes_and_of_prompts() -> None:
    lines = [
        {"gpu_info": "a GPU", "n_prompt": 0, "n_gen": 256, "avg_ts": 700.5},
        {"gpu_info": "a GPU", "n_prompt": 512, "n_gen": 0, "avg_ts": 9e4},
    ]
    assert gpu_llama.rates_of("\n".join(map(json.dumps, lines))) == {"decode": 700.5, "prompt": 9e4}
    lines[0]["gpu_info"] = ""
    with pytest.raises(SystemExit, match="llama-bench found no GPU"):
        gpu_llama.rates_of(json.dumps(lines[0]))


@pytest.mark.long
def test_both_sides_are_measured_on_one_file(driver: Driver, tmp_path: Path) -> None:  # noqa: F811
    bench = tmp_path / "llama-bench"
    bench.write_text(BENCH.format(python=sys.executable))
    bench.chmod(0o700)
    found = figures(tmp_path / "run", "llama", "--llama-bench", str(bench))
    for weights in ("bf16", "q8_0", "q4_k_m"):
        ours = found[f"decode llama-3.2-1b {weights} file, 1 x 20"]["value"]
        theirs = found[f"llama.cpp decode llama-3.2-1b {weights}"]
        assert theirs["value"] == 200 and theirs["faster"] == pytest.approx(ours / 200, rel=1e-2, abs=1e-3)
        assert found[f"llama.cpp prompt llama-3.2-1b {weights}"]["value"] == 3000


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    bench = tmp_path / "llama-bench"
    bench.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    bench.chmod(0o700)
    options = type("Options", (), {"llama_bench": str(bench), "patience": 20.0})()
    with pytest.raises(SystemExit, match="status 3: no such model"):
        gpu_llama._run(options, tmp_path / "model.gguf")
