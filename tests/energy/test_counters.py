"""Counters of energy, on a powercap tree in a folder and on a stand-in for NVIDIA's libraries."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyvllm.backends.cpu.toolchain import compiler_command
from tinyvllm.energy import nvml, opening
from tinyvllm.energy.counters import Counters
from tinyvllm.energy.opening import MAC_REASON, open_counters
from tinyvllm.energy.rapl import open_packages

RANGE = 262_143_328_850


def zone(root: Path, folder: str, name: str, microjoules: object = 1_000_000, limit: object = RANGE) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", limit)):
        (path / file).write_text(f"{value}\n")
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two processors with their parts, the whole board, and the second view of the first processor."""
    zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 500_000)
    zone(tmp_path, "intel-rapl:0:0", "core")
    zone(tmp_path, "intel-rapl:0:1", "dram")
    zone(tmp_path, "intel-rapl:1", "package-1")
    zone(tmp_path, "intel-rapl:2", "psys")
    zone(tmp_path, "intel-rapl-mmio:0", "package-0")
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def count(tree: Path, folder: str, microjoules: object) -> None:
    (tree / folder / "energy_uj").write_text(f"{microjoules}\n")


def test_all_packages_and_their_memory_are_added_once(tree: Path) -> None:
    counters = open_counters("CPU", tree)
    assert [counter.name for counter in counters.open] == ["cpu package-0", "cpu dram-0", "cpu package-1"] and not counters.not_measured
    count(tree, "intel-rapl:0", 1_500_000)  # it wrapped around
    count(tree, "intel-rapl:0:1", 1_250_000)
    count(tree, "intel-rapl:1", 4_000_000)
    assert counters.read() == pytest.approx({"cpu package-0": 2.0, "cpu dram-0": 0.25, "cpu package-1": 3.0})
    assert counters.read() == {"cpu package-0": 0, "cpu dram-0": 0, "cpu package-1": 0}
    counters.close()


def test_a_counter_that_may_not_be_read_is_the_end_of_the_host(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run as root where a mode means nothing, so the refusal is that of os.open."""
    allowed, opened = os.open, []

    def refuse(path: Any, *rest: Any) -> int:
        if str(path).endswith("intel-rapl:1/energy_uj"):
            raise PermissionError(13, "Permission denied")
        opened.append(allowed(path, *rest))
        return opened[-1]

    monkeypatch.setattr("tinyvllm.energy.rapl.os.open", refuse)
    counters, reasons = open_packages(tree)
    assert not counters and "intel-rapl:1/energy_uj is not permitted" in reasons["cpu"] and "chmod" in reasons["cpu"]
    for file in opened:
        with pytest.raises(OSError):
            os.fstat(file)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        assert "there are no RAPL packages" in open_counters("CPU", root).not_measured["cpu"]


@pytest.mark.parametrize("text", ["", "-5", "12.5", "9" * 40, "x" * 5000, RANGE + 1])
def test_a_counter_that_says_nonsense_is_not_read_again(tree: Path, text: object) -> None:
    counters = open_counters("CPU", tree)
    count(tree, "intel-rapl:1", text)
    assert set(counters.read()) == {"cpu package-0", "cpu dram-0"}
    assert "intel-rapl:1/energy_uj is" in counters.not_measured["cpu package-1"]
    assert len(counters.not_measured["cpu package-1"]) < 300
    counters.close()
    assert not open_packages(tree)[0]


@pytest.mark.parametrize("limit", ["0", "many"])
def test_a_range_that_says_nonsense(tmp_path: Path, limit: str) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", limit=limit)
    assert "max_energy_range_uj is" in open_packages(tmp_path)[1]["cpu"]


def test_a_hostile_tree_is_read_within_bounds(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "p" * 10_000)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "intel-rapl:1").mkdir()
    os.mkfifo(tmp_path / "intel-rapl:1" / "name")  # to read it would wait for ever
    assert "cpu" in open_counters("CPU", tmp_path).not_measured


def test_macs_say_why(tree: Path) -> None:
    assert open_counters("METAL", tree, platform="darwin") == Counters([], {"cpu": MAC_REASON, "gpu": MAC_REASON})


# ---- NVML


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nvml") / "libfake.so"
    source = Path(__file__).parent / "fake_nvml.c"
    subprocess.run([*compiler_command(), "-shared", "-fPIC", "-O1", "-o", path, source], check=True, timeout=120)
    return str(path)


@pytest.fixture
def fake(library: str) -> Iterator[ctypes.CDLL]:
    """The library's variables, as they were before."""
    fake = ctypes.CDLL(library)
    yield fake
    for name in ("status", "old_driver"):
        variable(fake, name).value = 0
    (ctypes.c_ulonglong * 2).in_dll(fake, "millijoules")[:] = [1000, 5000]
    assert variable(fake, "open_count").value == 0, "a library is left open"


def variable(fake: ctypes.CDLL, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(fake, name)


def test_the_gpu_is_the_one_that_cuda_means(library: str, fake: ctypes.CDLL) -> None:
    (counter,), reasons = nvml.open_gpus(0, library, driver=library)
    assert counter.name == "gpu 0" and not reasons
    (ctypes.c_ulonglong * 2).in_dll(fake, "millijoules")[1] = 5000 + 12_345
    assert counter.joules() == pytest.approx(12.345) and counter.joules() == 0
    counter.close()


def test_two_gpus_and_no_address_of_cuda(library: str, fake: ctypes.CDLL) -> None:
    variable(fake, "old_driver").value = 1
    assert "NVML has 2 GPUs; expected 1" in nvml.open_gpus(0, library, driver=library)[1]["gpu"]


def test_a_gpu_that_does_not_count(library: str, fake: ctypes.CDLL) -> None:
    variable(fake, "status").value = 3
    assert "status 3 (Not Supported)" in nvml.open_gpus(0, library, driver=library)[1]["gpu"]


def test_a_counter_that_goes_back(library: str, fake: ctypes.CDLL) -> None:
    gpus, _ = nvml.open_gpus(0, library, driver=library)
    counters = Counters([*gpus])
    (ctypes.c_ulonglong * 2).in_dll(fake, "millijoules")[1] = 0
    assert counters.read() == {} and "went back" in counters.not_measured["gpu 0"]


def test_ranks_on_gpus_have_the_counters_of_all(library: str, fake: ctypes.CDLL, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "open_gpus", lambda number, path: nvml.open_gpus(number, path, driver=library))
    counters = open_counters("CUDA", tree, nvml=library, gpus=2)
    assert [counter.name for counter in counters.open[-2:]] == ["gpu 0", "gpu 1"] and "gpu" not in counters.not_measured
    counters.close()


def test_no_driver(tree: Path) -> None:
    counters = open_counters("CUDA:1", tree, nvml="libno-such-nvml.so")
    assert "NVML cannot be loaded" in counters.not_measured["gpu"] and len(counters.open) == 3
    counters.close()
    assert "HIP" in open_counters("HIP", tree).not_measured["gpu"]
