"""The Mac measurements where there is no Mac: what is read out of others' words, the block, the clock, the parts of the shell, and the
tests on a GPU that is the emulator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinygrad import Context

from benchmarks import gpu, gpu_figures, gpu_ops, mac
from benchmarks.shapes import SHAPES, write_config
from tests.emulator.metal_runtime import Runtime, metal_device
from tests.metal import on_gpu
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import plan as metal_records
from tinyvllm.config.switches import cache_folder
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS
from tinyvllm.runner.device import start_device

ROOT = Path(__file__).parents[2]


# --- others' words


@pytest.mark.parametrize("chip, cores, bandwidth", [("M1", 7, 68), ("M3 Max", 30, 300), ("M3 Max", 40, 400), ("M2 Ultra", 60, 800)])
def test_bandwidth_of_a_chip(chip: str, cores: int, bandwidth: float) -> None:
    assert mac.named_bandwidth(chip, cores) == bandwidth


def test_an_unknown_chip_has_no_bandwidth() -> None:
    assert mac.named_bandwidth("M99", 10) is None and mac.named_bandwidth("M1", 99) is None and mac.named_bandwidth("unknown", 0) is None


def test_cores_of_the_gpu() -> None:
    assert mac.gpu_cores(json.dumps({"SPDisplaysDataType": [{"_name": "a screen"}, {"sppci_cores": "40"}]})) == 40
    assert mac.gpu_cores("") == mac.gpu_cores("{}") == 0


def test_what_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac, "describe", lambda: {"memory_gb": 16})
    assert mac.fits("llama-3.1-8b", "q4_0") and mac.fits("llama-3.1-8b", "q8_0") and not mac.fits("llama-3.1-8b", "bf16")


def test_figures_of_llama_cpp() -> None:
    lines = [{"pp": 128, "pl": 1, "speed_pp": 1.0, "speed_tg": 50.5}, {"pp": 128, "pl": 16, "speed_pp": 2.0, "speed_tg": 200.0}]
    lines += [{"pp": 512, "pl": 1, "speed_pp": 900.0, "speed_tg": 3.0}, {"pp": 512, "pl": 16, "speed_pp": 4.0, "speed_tg": 5.0}]
    said = "main: n_kv_max = 1\n" + "\n".join(map(json.dumps, lines))
    assert mac.batched_bench(said) == {"decode_1": 50.5, "decode_16": 200.0, "prefill": 900.0}
    assert mac.batched_bench("error: no model") == {}


def test_mlx_that_is_not_there_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlx.py").write_text("raise ImportError('there is no mlx')")
    (tmp_path / "mlx_lm.py").write_text("raise ImportError('there is no mlx')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = write_config(SHAPES["llama-3.2-1b"] | gpu.TOY, tmp_path / "model")
    o = gpu.parse_arguments(["decode", "--tiny"], mac.MAC)
    assert gpu_figures.ask(o, "mlx-lm", sys.executable, "benchmarks.mac_peers", str(model)) == {}
    assert "no mlx-lm: there is no mlx" in capsys.readouterr().out


# --- the block


def test_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mac, "describe", lambda: {"chip": "M1 Max", "gpu_cores": 32, "memory_gb": 64, "macos": "14.5"})
    run, checks = tmp_path / "run", tmp_path / "tests"
    lines: list[dict[str, Any]] = [
        {"what": mac.READ, "value": 300.0, "unit": "GB/s", "share": 0.75, "of": "what Apple names"},
        {"what": "product", "value": 150.0, "unit": "GB/s", "share": 0.5, "of": "read", "faster": 1.25},
    ]
    run.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = [("a.py::x", "never ended", ""), ("a.py::x", "passed", ""), ("a.py::y", "failed", "wrong")]
    told += [("b.py::z", "never ended", "cut off")]
    checks.write_text("".join(json.dumps({"test": t, "outcome": o, "why": w}) + "\n" for t, o, w in told))
    mac.main(["report", "--run", str(run), "--checks", str(checks), "--failed", "peers", "roofs: no time left"])
    said = capsys.readouterr().out
    assert said.startswith("### tinyvllm on M1 Max, 32 GPU cores, 64 GB, macOS 14.5")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines()]
    assert ["a.py", "1", "1", "0", "0"] in cells and ["b.py", "0", "0", "0", "1"] in cells
    assert ["product", "150.0", "GB/s", "50.0% of read", "37.5%", "1.25 x"] in cells
    assert "- `a.py::y` failed: wrong" in said and "- `b.py::z` never ended: cut off" in said and "a.py::x" not in said
    assert "Parts that failed: peers; roofs: no time left." in said


def test_the_block_without_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    mac.main(["report"])
    assert "No check has run." in capsys.readouterr().out


# --- the clock and the operands


class CommandBuffers:
    """Of tinygrad's METAL device as much as the clock needs: each work is a command buffer at the time that `spans` gives."""

    def __init__(self, *spans: tuple[float, float]) -> None:
        self.spans, self.mtl_buffers_in_flight = iter(spans), list[Any]()

    def synchronize(self) -> None:
        self.mtl_buffers_in_flight.clear()

    def work(self) -> None:
        start, end = next(self.spans)
        if len(self.mtl_buffers_in_flight) == 2:
            self.mtl_buffers_in_flight.pop(0)  # it is done
        self.mtl_buffers_in_flight.append(SimpleNamespace(GPUStartTime=lambda: start, GPUEndTime=lambda: end))


def test_gaps_between_command_buffers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CommandBuffers((5.0, 7.0), (1.0, 2.0), (6.0, 6.5), (1.5, 3.0))
    monkeypatch.setattr(gpu_ops, "Device", {"METAL": device})
    assert gpu_ops._busy(device.work, 4) == pytest.approx(2.0 + 2.0)
    with pytest.raises(RuntimeError, match="no command buffer"):
        gpu_ops._busy(lambda: None, 1)


@pytest.mark.parametrize("format", ["BF16", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_random_rows_are_small_numbers(format: str) -> None:
    data = gpu_ops.file_bytes(format, 24, 512)
    assert data.nbytes == gpu_ops.bytes_of(format, 24, 512)
    assert 0.005 < unpack(format, data.reshape(-1, FORMATS[format].nbytes)).std() < 0.04


# --- the tests on a GPU


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Metal over the emulator."""
    start_device("CPU", cache_folder())
    monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    with metal_device(races=False) as runtime, Context(DEV="METAL"):
        yield runtime
        on_gpu.broken.clear()


def copied(block: int = 48) -> tuple[Kernel, np.ndarray, np.ndarray, np.ndarray]:
    pool = np.random.default_rng(0).integers(0, 2**16, (3, block // 2), np.uint16)
    return metal_records.kv_copy("apple7", 1, block), pool, np.array([0, 2], np.int32), np.array([1], np.int32)


def test_a_kernel_runs_on_the_gpu(runtime: Runtime) -> None:
    kernel, pool, pairs, count = copied()
    want = pool.copy()
    want[2] = want[0]
    on_gpu.run_on_gpu(kernel, pool, pairs, count)
    np.testing.assert_array_equal(pool, want)


@pytest.mark.parametrize("wrong", ["pool[72] = 7", "pairs[0] = 9"])  # after the pool; into what is read-only
def test_a_wrong_write_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    text = f"""#include <metal_stdlib>
using namespace metal;
kernel void kv_copy(device ushort *pool, device int *pairs, device int *count) {{ pool[0] = 1; {wrong}; }}
"""
    monkeypatch.setattr(on_gpu, "kernel_text", lambda kernel: text)
    _, pool, pairs, count = copied()
    with pytest.raises(AssertionError, match="bytes outside of the writable arguments are changed"):
        on_gpu.run_on_gpu(Kernel("kv_copy", "metal", "apple7", (), 1, 2, grid=(1, 1, 1), block=1), pool, pairs, count)


def test_a_broken_gpu_ends_the_process_after_the_test(runtime: Runtime) -> None:
    on_gpu.pytest_runtest_logfinish("here.py::good")
    runtime.next_failure = "it hangs"
    with pytest.raises(RuntimeError, match="it hangs"):
        on_gpu.run_on_gpu(*copied())
    with pytest.raises(pytest.exit.Exception, match="here.py::bad broke the device: it hangs"):
        on_gpu.pytest_runtest_logfinish("here.py::bad")


# --- the parts


def figures(run: Path, *words: str) -> dict[str, dict[str, Any]]:
    mac.main([*words, "--run", str(run), "--tiny", "--strict"])
    return {line["what"]: line for line in gpu.lines_of(run)}


def test_the_roof_and_kernels_under_it(runtime: Runtime, tmp_path: Path) -> None:
    assert figures(tmp_path / "run", "roofs")[mac.READ]["value"] > 0 and "read" in runtime.launched
    found = figures(tmp_path / "run", "kernels")
    assert len(found) == 1 + 6 * 4 + 2 and {"matvec", "matmul", "matmul16"} <= set(runtime.launched)
    assert {"attention_decode", "attention_prefill"} <= set(runtime.launched)
    assert found["product Q4_K of 16"]["of"] == "read" and found["matmul Q4_K, 20 rows"]["share"] is None


@pytest.mark.long
def test_experts_adapters_and_states(runtime: Runtime, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "experts")
    assert {"norm_route, 3 rows", "experts_down Q4_K, 3 rows", "gated_delta, 1 x 1 and 4 drafts"} <= set(found)
    assert {"choose_experts", "list_experts", "experts_sum", "lora_shrink", "gated_delta", "delta_norm"} <= set(runtime.launched)


def test_decoding_is_timed(runtime: Runtime, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "decode", "--weights", "q8_0")
    one = found["decode llama-3.2-1b q8_0, 1 x 20"]
    assert one["step_us"] > 0 and one["step_bytes"] > 20 * gpu.kv_bytes_per_token("llama-3.2-1b", True)
    assert "prefill llama-3.2-1b q8_0, 40" in found and {"norm_qkv_rope_store", "norm_gate_up_silu"} <= set(runtime.launched)


def test_a_file_in_q4_k_m_is_decoded(runtime: Runtime, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "decode", "--weights", "q4_k_m", "--batches", "1")
    assert found["decode llama-3.2-1b q4_k_m, 1 x 20"]["step_us"] > 0


def test_kernels_that_cannot_be_launched_are_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    good = metal_records.kv_copy("apple7", 1, 48)
    told = {"good": good, "bad": replace(good, defines=()), "large": replace(good, block=2048)}
    monkeypatch.setattr("tests.kernels.metal.samples.samples", lambda: told)
    with pytest.raises(SystemExit, match="2 kernels cannot be launched here"):
        mac.main(["environment", "--tiny"])
    said = capsys.readouterr().out
    assert "kernels compiled: 1 of 3" in said and "bad: does not compile" in said and "large: may have 256 threads" in said


# --- the shell


def bash(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    begin = f"set -uo pipefail; interpreter={sys.executable}; minutes=1; log=log; figures=x.jsonl; . benchmarks/parts.sh; "
    return subprocess.run(["bash", "-c", begin + text, "bash", *words], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_parts_go_on(tmp_path: Path) -> None:
    text = 'part fails 20 bash -c "exit 3"; part never 1 bash -c "sleep 30 & sleep 30"; part good 20 echo done; echo "{}" >"$run"'
    done = bash(f"{text}; advice=again; the_end", str(tmp_path / "folder"))
    assert done.returncode == 2, done.stdout
    for words in (
        "== fails: exit status 3",
        "== never: cut off",
        "done\n== good: ",
        "2 parts failed: fails; never (cut off);",
        "\nagain\n",
    ):
        assert words in done.stdout
    assert (tmp_path / "folder" / "x.jsonl").read_text() == "{}\n" and "== good" in (tmp_path / "folder" / "log").read_text()


def test_a_part_ends_with_the_script_that_is_ended(tmp_path: Path) -> None:
    """Otherwise a kernel that hangs would keep the GPU."""
    begun = tmp_path / "begun"
    begin = f"interpreter={sys.executable}; minutes=1; log=log; figures=x.jsonl; . benchmarks/parts.sh; "
    words = ["bash", "-c", f"{begin} part long 50 bash -c 'touch {begun}; sleep 10; echo survived'"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as script:
        while not begun.exists():
            assert script.poll() is None
            time.sleep(0.01)
        os.killpg(script.pid, signal.SIGTERM)
        assert script.stdout is not None
        assert b"survived" not in script.stdout.read(), "it ends with the last process that has it: the part's own"


def test_no_part_fails() -> None:
    done = bash("part good 20 true; minutes=0; part late 20 true; failed=(); the_end")
    assert done.returncode == 0 and "0 parts failed\n" in done.stdout and "late: no time left" in done.stdout


def test_tests_go_on_in_another_process(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import os\ndef test_a(): pass\ndef test_b(): os._exit(9)\ndef test_c(): assert not 'wrong'\ndef test_d(): pass\n")
    done = bash(f'export TESTS_DONE={tmp_path}/done; bash -c "$tests" "$interpreter" -p tests.gpu.attempts --rootdir {tmp_path} {test}')
    assert done.returncode == 9, done.stdout
    found = {line["test"].split("::")[1]: line for line in gpu.lines_of(tmp_path / "done")}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "test_a": "passed", "test_b": "never ended", "test_c": "failed", "test_d": "passed",
    }  # fmt: skip
    assert "wrong" in found["test_c"]["why"]


def test_limits_of_the_parts_add_up_to_twenty_minutes() -> None:
    """Any machine lists them. First what fails where anything is missing, and a first figure; the tests of correctness before the rest."""
    script = Path(__file__).parents[2] / "benchmarks" / "mac.sh"
    done = subprocess.run([str(script), "--list"], capture_output=True, text=True, timeout=60)
    limits = [(int(line.split()[0]), line.split(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and 0.8 * 1200 < sum(seconds for seconds, _ in limits) <= 1200, done.stdout + done.stderr
    names = [name for _, name in limits]
    assert names[:2] == ["environment", "roofs"] and {"kernels' tests", "the engine's tests", "peers", "ablation"} <= set(names)
    assert names.index("kernels' tests") < names.index("peers") < names.index("ablation")
