"""The parts of the GPU measurements at toy shapes, on the emulated driver: every figure is there, and comes from the kernel it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tinygrad import Context

from benchmarks import gpu
from tests.emulator.driver import Driver, cuda_device
from tinyvllm.config import cache_folder
from tinyvllm.runner.device import start_device


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


def test_roofs_and_what_they_are_for(driver: Driver, tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = figures(run, "roofs")
    assert set(found) == {"copy, our kernel", "read, our kernel", "copy, the driver"}
    assert {"copy", "read"} <= set(driver.launched) and all(line["value"] > 0 for line in found.values())
    found = figures(run, "kernels")
    assert {"attention_decode", "attention_prefill", "matmul"} <= set(driver.launched)
    assert found["attention_decode, 2 x 40, H=4 K=2 D=32"]["of"] == "copy" and found["matmul BF16, 64"]["share"] is None


def test_each_kernel_against_tinygrads_code(driver: Driver, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "ablation")
    assert len(found) == 6 + 4 + 1 and all(line["tinygrad_us"] > 0 and line["us"] > 0 for line in found.values())
    assert {"norm_qkv_rope_store", "norm_gate_up_silu", "norm_head", "prepare"} <= set(driver.launched)


def test_decoding_is_timed_with_its_graph(driver: Driver, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "decode", "--weights", "q8_0")
    one = found["decode llama-3.2-1b q8_0, 1 x 20"]
    assert one["step_us"] > 0 and one["device_us"] > 0 and one["step_bytes"] > 20 * gpu.kv_bytes_per_token("llama-3.2-1b", True)
    assert {"idle, llama-3.2-1b q8_0, 1 x 20", "prefill llama-3.2-1b q8_0, 40"} <= set(found)


def test_many_requests(driver: Driver, tmp_path: Path) -> None:
    found = figures(tmp_path / "run", "serve")
    assert set(found) == {"3 requests, qwen3-0.6b, captures included", "3 requests, qwen3-0.6b, warm"}


def test_roof_of_serving() -> None:
    """Two sequences: the weights once a step, and each token's keys and values."""
    o = gpu.parse_arguments(["serve", "--tiny"])
    engine = SimpleNamespace(model_bytes_per_token=1000)
    assert gpu.serving_roof(o, [[1, 2]], [3], engine) is None, "nothing was measured"
    o.run = SimpleNamespace(exists=lambda: True, read_text=lambda: '{"what": "copy, the driver", "value": 1e-6}')
    kv = gpu.kv_bytes_per_token("qwen3-0.6b", True)
    seen = (2 + 1) + (2 + 2) + (2 + 3) + (1 + 1)
    assert gpu.serving_roof(o, [[1, 2], [1]], [3, 1], engine) == pytest.approx(4 * 1000 / (3 * 1000 + seen * kv))


def test_table_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    line = {"what": "transformers", "value": 10.0, "unit": "tok/s", "share": 0.5, "of": "copy", "faster": 3.0}
    run.write_text(json.dumps(line) + "\n")
    gpu.main(["table", "--run", str(run)])
    assert "50.0% of copy" in capsys.readouterr().out
    o = gpu.parse_arguments(["decode"])
    gpu.attempt(o, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert o.failures == ["ZeroDivisionError: division by zero"]
