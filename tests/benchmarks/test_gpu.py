"""The parts of the GPU measurements at toy shapes, on the emulated driver: every figure is there, and comes from the kernel it names."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tinygrad import Context

from benchmarks import gpu, gpu_checks, gpu_figures, gpu_needs
from benchmarks.gpu_experts import FORMATS, Mixture
from benchmarks.gpu_ops import tile_weight
from tests.emulator.driver import Driver, cuda_device
from tests.formats import sampled_formats
from tests.gpu import attempts
from tests.planting import forget_code, plant
from tinyvllm.backends import registry, selftest
from tinyvllm.backends.cases.case import TESTED
from tinyvllm.backends.kernel import Kernel
from tinyvllm.config.switches import cache_folder
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout, packed_in
from tinyvllm.quant.kv import KV_FORMATS
from tinyvllm.quant.layouts import unpack_tiles
from tinyvllm.runner.device import start_device
from tinyvllm.storage.cache import CacheFolder
from tinyvllm.storage.folders import require_private


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    start_device("CPU", cache_folder())
    monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    with cuda_device(races=False) as driver, Context(DEV="CUDA"):
        yield driver


def figures(run: Path, *words: str) -> dict[str, dict]:
    gpu.main([*words, "--run", str(run), "--tiny", "--strict"])
    return {line["what"]: line for line in gpu.lines_of(run)}


@pytest.mark.long
def test_roofs_and_what_they_are_for(driver: Driver, tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = figures(run, "roofs")
    assert set(found) == {"copy, our kernel", "read, our kernel", "copy, the driver"}
    assert {"copy", "read"} <= set(driver.launched) and all(line["value"] > 0 for line in found.values())
    found = figures(run, "kernels")
    assert {"attention_decode", "attention_prefill", "matmul"} <= set(driver.launched)
    assert found["attention_decode, 2 x 40, H=4 K=2 D=32"]["of"] == "copy" and found["matmul BF16, 64, sm_80"]["share"] is None


@pytest.mark.long
def test_other_formats_and_caches(driver: Driver, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "kernels", "--formats", "INT4_G128", "NF4", "--caches", "KV_FP8", "KV_INT4")
    assert {f"matmul {format}, 256, sm_90a" for format in ("INT4_G128", "NF4")} <= set(found)
    assert {f"attention_decode, 2 x 40{cache}, H=4 K=2 D=32" for cache in ("", ", KV_FP8", ", KV_INT4")} <= set(found)


@pytest.mark.long
def test_each_kernel_against_tinygrads_code(driver: Driver, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "ablation")
    assert len(found) == 7 + 4 + 1 + 1 and all(line["tinygrad_us"] > 0 and line["us"] > 0 for line in found.values())
    assert {"norm_qkv_rope_store", "norm_gate_up_silu", "norm_head", "quantize_input", "embed", "sample"} <= set(driver.launched)


@pytest.mark.long
def test_experts_adapters_and_states(driver: Driver, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "experts")
    assert {f"{op} {format}, {T} rows" for op in ("experts_gate_up_silu", "experts_down") for format in FORMATS for T in (1, 3)} <= set(
        found
    )
    assert {"norm_route, 3 rows", "lora_bias 64->64, 4 adapters of rank 16, 3 rows"} <= set(found)
    assert {f"gated_delta, {sizes}" for sizes in ("1 x 1", "3 x 1", "1 x 3", "1 x 1 and 4 drafts")} <= set(found)
    stems = {"norm_route", "list_experts", "experts_sum", "lora_shrink", "lora_bias", "gated_delta", "delta_norm"}
    assert stems <= set(driver.launched)
    assert all(line["us"] > 0 for line in found.values())


def test_how_many_experts_rows_have() -> None:
    mixture = Mixture(64, 64, 128, 8)
    assert mixture.used(1) == 8 and 8 < mixture.used(2) < 16 and 127 < mixture.used(512) <= 128


@pytest.mark.parametrize("weights", ["q8_0", pytest.param("q4_k_m", marks=pytest.mark.long)])
def test_decoding_is_timed_with_its_graph(driver: Driver, tmp_path: Path, weights: str) -> None:
    found = figures(tmp_path / "run", "decode", "--weights", weights)
    one = found[f"decode llama-3.2-1b {weights}, 1 x 20"]
    assert one["step_us"] > 0 and one["device_us"] > 0 and one["step_bytes"] > 20 * gpu.kv_bytes_per_token("llama-3.2-1b", True)
    assert {f"idle, llama-3.2-1b {weights}, 1 x 20", f"prefill llama-3.2-1b {weights}, 40"} <= set(found)


@pytest.mark.parametrize("format", ["BF16", "F16", *packed_in(Layout.TILES)])
def test_random_tiles_are_small_numbers(driver: Driver, format: str) -> None:
    weight = tile_weight(format, 24, 512)
    numbers = unpack_tiles(format, weight.tensor.numpy(), 24, 512)
    assert 0.005 < numbers.std() < 0.04 and np.abs(numbers).max() < 0.5


@pytest.mark.parametrize("part, error", [("decode", RuntimeError), ("serve", SystemExit)])
def test_a_failed_step_gives_no_figure(driver: Driver, tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, error: type) -> None:
    """The engine recovers from it and continues; what was timed is then something else."""
    driver.fail_once = "advance"
    with pytest.raises(error, match="steps? of the engine failed"):
        figures(tmp_path / "run", part)
    assert gpu.lines_of(tmp_path / "run") == []
    caplog.clear()  # its tracebacks hold programs of the driver


def test_many_requests(driver: Driver, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "serve")
    assert {what: line["unit"] for what, line in found.items()} == {
        "3 requests, qwen3-0.6b, captures included": "s", "3 requests, qwen3-0.6b, warm": "tok/s",
    }  # fmt: skip


def test_roof_of_serving() -> None:
    """Two sequences: the weights once a step, and each token's keys and values."""
    o = gpu.parse_arguments(["serve", "--tiny"])
    engine = SimpleNamespace(model_bytes_per_token=1000)
    assert gpu.serving_roof(o, [[1, 2]], [3], engine) is None, "nothing was measured"
    o.run = SimpleNamespace(exists=lambda: True, read_text=lambda: '{"what": "copy, the driver", "value": 1e-6}')
    kv = gpu.kv_bytes_per_token("qwen3-0.6b", True)
    seen = (2 + 1) + (2 + 2) + (2 + 3) + (1 + 1)
    assert gpu.serving_roof(o, [[1, 2], [1]], [3, 1], engine) == pytest.approx(4 * 1000 / (3 * 1000 + seen * kv))


def test_table_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    line = {"what": "transformers", "value": 10.0, "unit": "tok/s", "share": 0.5, "of": "copy", "faster": 3.0}
    run.write_text(json.dumps(line) + "\n")
    gpu.main(["table", "--run", str(run)])
    assert "50.0% of copy" in capsys.readouterr().out
    o = gpu.parse_arguments(["decode"])
    monkeypatch.setattr(gpu_figures, "device_broken", lambda: False)
    gpu.attempt(o, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert (o.failed, o.tried) == (1, 1) and "FAILED: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_a_broken_device_is_left_to_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which continues after the measurement that broke it."""
    begun: list[list[str]] = []
    monkeypatch.setattr(gpu_figures, "device_broken", lambda: True)
    monkeypatch.setattr("os.execv", lambda path, words: begun.append(words))
    o = gpu.parse_arguments(["kernels", "--tiny"])
    gpu.attempt(o, lambda: None)
    gpu.attempt(o, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert begun[0][3:] == ["kernels", "--tiny", "--skip", "2", "--failed", "1"]
    o = gpu.parse_arguments(["roofs", "--limit", "0.01"])
    gpu.attempt(o, lambda: time.sleep(1))
    assert begun[1][3:] == ["roofs", "--limit", "0.01", "--skip", "1", "--failed", "1"], "one that never ends"
    o, done = gpu.parse_arguments(begun[0][3:]), []
    for number in range(4):
        gpu.attempt(o, lambda number=number: done.append(number))
    assert done == [2, 3] and o.failed == 1


# --- gpu.sh


SCRIPT = gpu.ROOT / "benchmarks" / "gpu.sh"
# In place of Python: parts of benchmarks.gpu do nothing, but that `roofs` adds a figure and the part $FAIL fails.
STAND_IN = """#!/bin/sh
[ "$1" = -c ] && exec python3 "$@"
[ "$1" = benchmarks/gpu_needs.py ] && { [ "$FAIL" != needs ]; exit; }
[ "$2" = pytest ] && exit 5
[ "$3" = "$FAIL" ] && exit 1
[ "$3" = roofs ] && echo '{"part": "roofs", "what": "copy"}' >> "$5"
exit 0
"""


def run_script(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *words], env=os.environ | environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("letter, minutes", [("A", 7), ("B", 9), ("C", 9), ("D", 9), ("E", 8), ("F", 5)])
def test_limits_of_the_parts_add_up_to_the_time_of_a_call(letter: str, minutes: int) -> None:
    lines = run_script("--list", letter).stdout.splitlines()
    total = sum(int(line.split()[0]) for line in lines)
    assert 0.8 * 60 * minutes < total <= 60 * minutes, lines


def test_a_call_without_its_letter_is_an_error() -> None:
    done = run_script()
    assert done.returncode == 2 and "expected A, B, C, D, E or F" in done.stderr


def test_results_are_in_the_folder_and_roofs_are_measured_once(tmp_path: Path) -> None:
    stand_in, folder = tmp_path / "python", tmp_path / "results"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    done = run_script("A", str(folder), INTERPRETER=str(stand_in))
    assert done.returncode == 0 and "0 parts failed" in done.stdout, done.stdout
    done = run_script("D", str(folder), INTERPRETER=str(stand_in), FAIL="peers")
    assert done.returncode == 1 and "1 parts failed: peers" in done.stdout, done.stdout
    assert "== roofs" not in done.stdout and "== ablation" in done.stdout, "roofs are A's; the parts after a failure run"
    assert "If a part fails" in done.stdout, "where to read on"
    assert sorted(path.name for path in folder.iterdir()) == ["A.jsonl", "A.log", "D.jsonl", "D.log"]
    assert json.loads((folder / "D.jsonl").read_text())["part"] == "roofs"
    assert (folder / "D.log").read_text() == done.stdout, "the log is whole when the script ends"


def test_figures_are_in_the_folder_before_the_next_part(tmp_path: Path) -> None:
    """A machine that is taken away loses what it measures then, and no more."""
    stand_in, folder = tmp_path / "python", tmp_path / "results"
    stand_in.write_text(STAND_IN.replace("exit 0\n", f'[ "$3" = decode ] && cat {folder}/A.jsonl\nexit 0\n'))
    stand_in.chmod(0o755)
    done = run_script("A", str(folder), INTERPRETER=str(stand_in))
    assert '{"part": "roofs", "what": "copy"}' in done.stdout.split("== decode")[1]


def test_nothing_runs_where_something_is_missing(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    done = run_script("A", str(tmp_path / "results"), INTERPRETER=str(stand_in), FAIL="needs")
    assert done.returncode == 2 and "==" not in done.stdout and not (tmp_path / "results").exists()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_needs.complaints("E", dry=True) == []
    monkeypatch.setattr(gpu_needs, "has_driver", lambda: False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("tqdm", "gguf", "hypothesis") else find(name))
    monkeypatch.setattr(gpu_needs, "version", lambda name: "0.12.0")
    packages, driver = gpu_needs.complaints("A", dry=False)
    assert "lacks tinygrad==0.13.0 (here is 0.12.0), tqdm>=4.66, hypothesis;" in packages and "docs/gpu.md" in packages
    assert "no NVIDIA driver" in driver and "--dry needs none" in driver
    assert (
        "gguf" in gpu_needs.complaints("F", dry=True)[0]
        and "gguf" in gpu_needs.complaints("E", dry=True)[0]
        and "hypothesis" not in gpu_needs.complaints("E", dry=True)[0]
    )


def test_an_image_without_gguf_imports_all_but_call_e() -> None:
    imports = "import benchmarks.gpu, benchmarks.gpu_ops, tests.gpu.test_features, tests.gpu.test_products, tests.gpu.test_attention"
    code = f"import sys; sys.modules['gguf'] = None; {imports}"
    done = subprocess.run([sys.executable, "-c", code], cwd=gpu.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_one_case_of_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_EACH", "1")
    items = [SimpleNamespace(nodeid=name) for name in ("f.py::a[1]", "f.py::a[2]", "f.py::b", "g.py::a[1]", "g.py::a[2]")]
    attempts.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["f.py::a[1]", "f.py::b", "g.py::a[1]"]


# --- environment


def test_environment_counts_and_complains(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.cuda import samples

    good = Kernel.cuda("copy", "sm_80", 1, 1, (1, 1, 1), 512, WORDS=64, BLOCKS=1)
    bad = Kernel.cuda("copy", "sm_80", 1, 1, (1, 1, 1), 512)
    monkeypatch.setattr(samples, "samples", lambda gpu, arch: {"good": good, "bad": bad, "good of another size": bad})
    with pytest.raises(SystemExit, match="1 kernels do not compile"):
        gpu.main(["environment", "--tiny", "--run", str(tmp_path / "run")])
    assert gpu.lines_of(tmp_path / "run")[0]["value"] == 1, "of each source the first"


def test_the_self_test_names_a_wrong_kernel(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = [need for need in gpu_checks._needs(Placement("CUDA"), dry=True) if need[0] in ("advance", "kv_copy")]
    assert len(needs) == 2
    monkeypatch.setattr(gpu_checks, "_needs", lambda placement, dry: needs)
    cache = CacheFolder(require_private(tmp_path / "cache"))
    monkeypatch.setattr(selftest, "open_cache", lambda: cache)
    monkeypatch.setenv("TINYVLLM_SELFTEST", "off")
    try:
        assert figures(tmp_path / "run", "selftest")["kernels as recorded"]["value"] == 2
        cache.path.joinpath("selftest.json").unlink()
        plant(monkeypatch, {"kv_copy"})
        with pytest.raises(SystemExit, match="1 measurements of selftest failed"):
            figures(tmp_path / "run", "selftest")
        assert "wrong: sm_80 kv_copy: " in capsys.readouterr().out
    finally:
        monkeypatch.undo()
        forget_code()
        registry.forget_replaced()


def test_every_op_is_in_the_self_test_with_every_format_and_cache() -> None:
    needs = list(gpu_checks._needs(Placement("CUDA"), dry=False))
    assert {stem for stem, _ in needs} == TESTED & registry.BACKENDS["CUDA"].stems
    products = {facts.format for stem, facts in needs if stem == "matmul"}
    assert products == {*sampled_formats(Layout.TILES)}
    assert all(
        {facts.cache_format for other, facts in needs if other == stem} > {*KV_FORMATS} for stem in ("attention_decode", "kv_append")
    )
    assert any("+" in facts.format for _, facts in needs)
