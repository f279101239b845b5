"""Each check of the doctor on a machine of files and functions: what is fine, each warning and each error, with what to do."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_host_memory import V1, V2, write_group, write_proc
from tinyvllm.backends import selftest
from tinyvllm.backends.cases import case_of
from tinyvllm.backends.cpu.cores import Cores, quota
from tinyvllm.backends.cuda.plan import GPU
from tinyvllm.cli import main
from tinyvllm.doctor import devices, kernels, system
from tinyvllm.doctor.examination import CHECKS, examine
from tinyvllm.doctor.machine import Finding, Machine, Status
from tinyvllm.errors import ArgumentError, KernelError, ToolchainError
from tinyvllm.placement import Placement
from tinyvllm.runner import device as runner_device
from tinyvllm.runner import roof

MIB = 1 << 20
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def unavailable(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with which nothing is wrong."""
    proc = write_proc(tmp_path, "0::/a\n")
    for path, text in (("sys/vm/overcommit_memory", "0\n"),):
        (proc / path).parent.mkdir(parents=True)
        (proc / path).write_text(text)
    pages = tmp_path / "sys" / "kernel" / "mm" / "transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always [madvise] never\n")
    cache = tmp_path / "cache"
    return Machine(
        proc=proc, sysfs=tmp_path / "sys", environ={"TINYVLLM_CACHE": str(cache)}, system="linux", macos="", python=(3, 12, 1),
        version_of=lambda name: system.TINYGRAD, limit=lambda which: UNLIMITED, load=unavailable,
        cores=lambda proc, sysfs: Cores(4, 4, 4, quota(proc, sysfs / "fs" / "cgroup")),
        choose=lambda device: "CPU" if device == "auto" else device, free_bytes=lambda folder: 100 << 30,
    )  # fmt: skip


def found(check: Any, machine: Machine, **changes: Any) -> list[Finding]:
    return [*check(dataclasses.replace(machine, **changes))]


def one(check: Any, machine: Machine, status: Status, **changes: Any) -> Finding:
    """The only finding that is not ok, or the only one at all; what is not ok says what to do."""
    findings = found(check, machine, **changes)
    (finding,) = [each for each in findings if each.status is not Status.OK] or findings
    assert finding.status is status and bool(finding.advice) == (status is not Status.OK), finding
    return finding


def test_the_pinned_version_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"tinygrad=={system.TINYGRAD}" in project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, system.OLDEST_PYTHON))


def test_python(machine):
    assert one(system.check_python, machine, Status.OK).text == "3.12.1"
    assert "3.10.9 is older than 3.11" in one(system.check_python, machine, Status.ERROR, python=(3, 10, 9)).text


def test_tinygrad(machine):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    one(system.check_tinygrad, machine, Status.OK)
    other = one(system.check_tinygrad, machine, Status.ERROR, version_of=lambda name: "0.14.0")
    assert "0.14.0, expected" in other.text and other.advice == f"pip install tinygrad=={system.TINYGRAD}"
    assert "not installed" in one(system.check_tinygrad, machine, Status.ERROR, version_of=missing).text


def test_cores(machine):
    assert one(system.check_cores, machine, Status.OK).text == "4 physical cores; 4 threads run CPU kernels"
    threads = machine.environ | {"TINYVLLM_THREADS": "6"}
    assert "TINYVLLM_THREADS=4" in one(system.check_cores, machine, Status.WARNING, environ=threads).advice


def test_a_quota_of_cores(machine):
    (machine.cgroups / "a").mkdir(parents=True)
    (machine.cgroups / "a" / "cpu.max").write_text("250000 100000\n")
    assert one(system.check_cores, machine, Status.OK).text.endswith("the control group's quota is 2.5 cores; 2 threads run CPU kernels")
    more = machine.environ | {"TINYVLLM_THREADS": "3"}
    finding = one(system.check_cores, machine, Status.WARNING, environ=more)
    assert "quota is 2.5 cores; 3 threads" in finding.text and "TINYVLLM_THREADS=2" in finding.advice
    (machine.cgroups / "a" / "cpu.max").write_text("50000 100000\n")
    assert one(system.check_cores, machine, Status.WARNING).advice == "raise the quota"


def test_memory(machine, tmp_path):
    assert "8192 MiB can be allocated" in one(system.check_memory, machine, Status.OK).text
    write_group(machine.cgroups / "a", V2, str(120 * MIB), 10 * MIB, 0)
    assert "110 MiB can be allocated (the control group's memory.max is 120 MiB)" in one(system.check_memory, machine, Status.ERROR).text
    (machine.proc / "self" / "cgroup").write_text("4:memory:/a\n")
    write_group(machine.cgroups / "memory" / "a", V1, str(1000 * MIB), 0, 0)
    assert "1000 MiB" in one(system.check_memory, machine, Status.OK).text


def test_memory_that_ulimit_limits(machine, monkeypatch):
    monkeypatch.setattr("tinyvllm.host_memory.resource.getrlimit", lambda which: (2048 * MIB, 2048 * MIB))
    finding = one(system.check_memory, machine, Status.WARNING)
    assert "ulimit -v is 2048 MiB" in finding.text and finding.advice == "ulimit -v unlimited"


def test_strict_overcommitment(machine):
    (machine.proc / "sys" / "vm" / "overcommit_memory").write_text("2\n")
    finding = one(system.check_memory, machine, Status.WARNING)
    assert finding.name == "overcommitment" and "vm.overcommit_memory=0" in finding.advice


def test_open_files(machine):
    assert one(system.check_files, machine, Status.OK).text == "unlimited"
    assert one(system.check_files, machine, Status.OK, limit=lambda which: (4096, 4096)).text == "ulimit -n is 4096"
    assert "or more" in one(system.check_files, machine, Status.WARNING, limit=lambda which: (256, 65536)).advice
    advice = one(system.check_files, machine, Status.WARNING, limit=lambda which: (256, 512)).advice
    assert advice == "ulimit -n 1024 or more, as root: it is above the hard limit of 512"


def test_huge_pages(machine):
    place = machine.sysfs / "kernel" / "mm" / "transparent_hugepage" / "enabled"
    assert one(system.check_huge_pages, machine, Status.OK).text == "madvise"
    place.write_text("always madvise [never]\n")
    finding = one(system.check_huge_pages, machine, Status.WARNING)
    assert "never: weights are read in pages of 4 KiB" in finding.text and "echo madvise > " in finding.advice
    place.write_text("nonsense")
    assert "unknown" in one(system.check_huge_pages, machine, Status.WARNING).text
    place.unlink()
    assert "this kernel has none" in one(system.check_huge_pages, machine, Status.WARNING).text
    assert found(system.check_huge_pages, machine, system="darwin") == []


def test_the_cache_folder(machine, tmp_path):
    assert "102400 MiB" in one(system.check_cache_folder, machine, Status.OK, free_bytes=lambda folder: 100 << 30).text.replace(
        "100.0 GiB", "102400 MiB"
    )
    assert "not kept" in one(system.check_cache_folder, machine, Status.WARNING, free_bytes=lambda folder: 1 << 30).text
    assert "do not fit" in one(system.check_cache_folder, machine, Status.ERROR, free_bytes=lambda folder: 1 << 20).text
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    os.chmod(open_to_all, 0o777)
    finding = one(system.check_cache_folder, machine, Status.WARNING, environ={"TINYVLLM_CACHE": str(open_to_all)})
    assert "every user can write to it" in finding.text and "TINYVLLM_CACHE" in finding.advice


def test_the_compiler(machine, monkeypatch, tmp_path):
    def script(text: str) -> list[str]:
        path = tmp_path / "cc"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        return [str(path)]

    monkeypatch.setattr(devices, "compiler_command", lambda: script("echo clang version 19.1"))
    assert "clang version 19.1" in one(devices.check_compiler, machine, Status.OK).text
    monkeypatch.setattr(devices, "compiler_command", lambda: script("exit 3"))
    assert "ended with code 3" in one(devices.check_compiler, machine, Status.ERROR).text
    monkeypatch.setattr(devices, "compiler_command", lambda: [str(tmp_path / "none")])
    assert "does not run" in one(devices.check_compiler, machine, Status.ERROR).text

    def none() -> list[str]:
        raise ToolchainError("no C compiler")

    monkeypatch.setattr(devices, "compiler_command", none)
    assert "ziglang" in one(devices.check_compiler, machine, Status.ERROR).advice


def test_cuda(machine, monkeypatch):
    assert found(devices.check_cuda, machine) == [], "a machine without a GPU lacks nothing"
    wanted = one(devices.check_cuda, machine, Status.ERROR, device="CUDA:1")
    assert "--device CUDA asks for one" in wanted.text and wanted.advice.endswith("or use --device CPU")  # nothing else is used instead
    version = machine.proc / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: 580.65\nGCC\n")
    spare = one(devices.check_cuda, machine, Status.WARNING)
    assert "the kernel has a driver" in spare.text and spare.advice.endswith("the CPU is used without it")
    monkeypatch.setattr("tinyvllm.backends.cuda.nvrtc.version", lambda: "nvrtc 13.0")
    texts = [each.text for each in found(devices.check_cuda, machine, load=lambda name: object())]
    assert texts == ["NVRM version: 580.65", "nvrtc 13.0"]

    def missing() -> str:
        raise KernelError("no NVRTC")

    monkeypatch.setattr("tinyvllm.backends.cuda.nvrtc.version", missing)
    one(devices.check_cuda, machine, Status.WARNING, load=lambda name: object())
    finding = one(devices.check_cuda, machine, Status.ERROR, load=lambda name: object(), choose=lambda device: "CUDA")
    assert finding.name == "NVRTC" and "tinyvllm[cuda]" in finding.advice


def test_metal(machine):
    assert found(devices.check_metal, machine) == []
    assert one(devices.check_metal, machine, Status.OK, system="darwin", macos="15.2").text == "macOS 15.2"
    assert "12.7 is older than 13" in one(devices.check_metal, machine, Status.ERROR, system="darwin", macos="12.7").text
    one(devices.check_metal, machine, Status.ERROR, system="darwin", macos="")


@pytest.mark.parametrize(
    ("variants", "status", "text"),
    [
        ({"avx512": None, "plain": None}, Status.OK, "kernels: avx512"),
        (
            {"amx": "the system does not grant tiles: a sandbox", "avx512": None},
            Status.OK,
            "kernels: avx512 (not amx: the system does not grant tiles: a sandbox)",
        ),
        ({"avx512": "no AVX512", "plain": None}, Status.WARNING, "no vectors"),
        ({"sm_80": "the GPU is sm_70"}, Status.WARNING, "many times slower: sm_80: the GPU is sm_70"),
        ({}, Status.WARNING, "there are none for this device"),
    ],
)
def test_the_device(machine, monkeypatch, variants, status, text):
    from tinyvllm.backends import registry

    monkeypatch.setattr(runner_device, "start_device", lambda choice, cache: "CPU")
    monkeypatch.setattr(registry, "variants", lambda placement, stem=None: variants)
    assert text in one(devices.check_device, machine, status).text


def test_a_device_that_cannot_be_opened(machine, monkeypatch):
    def refuse(choice: str, cache: Path) -> str:
        raise ArgumentError(f"device {choice} cannot be opened here")

    monkeypatch.setattr(runner_device, "start_device", refuse)
    assert "device CUDA cannot be opened" in one(devices.check_device, machine, Status.ERROR, device="CUDA").text
    for check in (kernels.check_speed, kernels.check_kernels):
        assert one(check, machine, Status.ERROR, device="CUDA").text == "not checked: the device cannot be opened"


def test_speed(machine, monkeypatch):
    rates = {"BF16": roof.ProductRate((1e9,) * len(roof.ROWS))}
    monkeypatch.setattr(runner_device, "start_device", lambda choice, cache: "CPU")
    monkeypatch.setattr(roof, "measured_roof", lambda device, formats, nbytes: roof.Roof(4e10, 1e-6, rates))
    assert one(kernels.check_speed, machine, Status.OK).text == "memory is read at 40.0 GB/s, bfloat16 multiplied at 512 GFLOP/s"

    def fail(device: str, formats: list[str], nbytes: int) -> None:
        raise ToolchainError("no C compiler")

    monkeypatch.setattr(roof, "measured_roof", fail)
    assert "no C compiler" in one(kernels.check_speed, machine, Status.ERROR).text


@pytest.mark.parametrize(
    ("report", "status", "text"),
    [
        (selftest.Report(tested=3), Status.OK, "3 tested now"),
        (selftest.Report("off"), Status.WARNING, "the self-test is off"),
        (
            selftest.Report(tested=1, replaced={"avx512 matmul": "the result differs"}),
            Status.WARNING,
            "wrong are avx512 matmul (the",
        ),
        (selftest.Report(untested="no C compiler"), Status.ERROR, "not tested: no C compiler"),
        (
            selftest.Report(replaced={"avx512 matmul": "the result differs"}, untested="no room"),
            Status.ERROR,
            "not tested: no room: wrong are avx512 matmul (the",
        ),
    ],
)
def test_the_self_test(machine, monkeypatch, report, status, text):
    monkeypatch.setattr(runner_device, "start_device", lambda choice, cache: "CPU")
    monkeypatch.setattr(selftest, "needs_by_format", lambda placement: {"BF16": []})
    monkeypatch.setattr(selftest, "test_kernels", lambda placement, needs: report)
    assert text in one(kernels.check_kernels, machine, status).text


def test_the_self_test_ends_in_time_and_says_what_is_left(machine, monkeypatch):
    done: list[str] = []
    now = SimpleNamespace(seconds=0.0)

    def test(placement: Placement, needs: Any) -> selftest.Report:
        now.seconds += kernels.LIMIT * 0.3
        done.extend(needs())
        return selftest.Report(tested=1)

    monkeypatch.setattr(runner_device, "start_device", lambda choice, cache: "CPU")
    monkeypatch.setattr(selftest, "needs_by_format", lambda placement: {name: [name] for name in "ABCD"})
    monkeypatch.setattr(selftest, "test_kernels", test)
    machine = dataclasses.replace(machine, began=-0.2 * kernels.LIMIT)
    (finding,) = kernels.check_kernels(machine, lambda: now.seconds)  # from 0.2 of the limit: the third would end at 1.1
    assert done == ["A", "B"] and "2 tested now" in finding.text and "for time not tested: C, D" in finding.text
    (finding,) = kernels.check_kernels(dataclasses.replace(machine, every_format=True), lambda: now.seconds)
    assert done[2:] == ["A", "B", "C", "D"] and "for time" not in finding.text


@pytest.mark.parametrize("device", ["CPU", "CUDA", "METAL"])
def test_every_op_and_format_of_a_device_has_a_case_with_an_answer(device, monkeypatch):
    """What a limit of the kernels refuses would not be tested, and nothing would say so."""
    monkeypatch.setattr("tinyvllm.backends.cuda.limits.gpu_of", lambda placement: GPU(108, 166_912, 167_936))
    placement, answers = Placement(device), selftest._answers()
    every = [need for needs in selftest.needs_by_format(placement).values() for need in needs]
    cases = [case_of(*need) for need in every]
    assert None not in cases and len(cases) > 100
    assert all(any(name.startswith(f"{case.answer}/") for name in answers) for case in cases)
    backend = selftest.registry.backend_for(placement)
    assert {stem for stem, _ in every} == backend.stems
    refused = {(stem, facts.cache_format) for stem, facts in every if backend.unsupported(stem, facts) is not None}
    assert refused == ({("attention_decode", "F32"), ("attention_prefill", "F32")} if device == "CUDA" else set())


def test_a_check_that_fails_itself_is_an_error_and_the_others_continue(machine):
    def broken(machine: Machine) -> Any:
        raise ImportError("libfoo.so: no such file\nmore")

    findings = [*examine(machine, {"first": broken, "Python": system.check_python})]
    assert [each.status for each in findings] == [Status.ERROR, Status.OK]
    assert findings[0].text == "the check failed: ImportError: libfoo.so: no such file"


def test_the_command(machine, monkeypatch, capsys):
    fine = {name: CHECKS[name] for name in ("Python", "open files", "cores")}
    monkeypatch.setattr("tinyvllm.doctor.examination.CHECKS", fine)
    monkeypatch.setattr("tinyvllm.doctor.machine.Machine", lambda device, every: dataclasses.replace(machine, device=device))
    assert main(["doctor"]) == 0
    assert "ok      Python: 3.12.1" in capsys.readouterr().out
    old = dataclasses.replace(machine, python=(3, 9, 0), limit=lambda which: (100, 100))
    monkeypatch.setattr("tinyvllm.doctor.machine.Machine", lambda device, every: old)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "error   Python: 3.9.0" in text and "-> install Python 3.11" in text and "1 ok, 1 warning, 1 error" in text
    assert main(["doctor", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["ok"], record["warning"], record["error"]) == (1, 1, 1)
    assert [one["status"] for one in record["findings"]] == ["error", "warning", "ok"]


def test_the_checks_before_the_device_load_no_tinygrad():
    code = (
        "import sys; from tinyvllm.doctor.examination import CHECKS; from tinyvllm.doctor.machine import Machine\n"
        "for name in ('Python', 'tinygrad', 'C compiler', 'memory', 'open files', 'huge pages', 'cache folder'):\n"
        "    assert list(CHECKS[name](Machine())), name\n"
        "sys.exit('tinygrad' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
