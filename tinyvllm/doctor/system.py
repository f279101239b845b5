"""Checks of Python, packages, cores, memory, huge pages and the cache folder."""

from __future__ import annotations

import importlib.metadata
import resource
from collections.abc import Iterator
from pathlib import Path

from tinyvllm.config.switches import cache_folder, environment
from tinyvllm.doctor.machine import Finding, Machine, Status
from tinyvllm.host_memory import RUN_MEMORY, START_MEMORY, headroom, megabytes
from tinyvllm.storage.folders import Refusal, require_private

TINYGRAD = "0.13.0"  # the version that this project is made for: docs/decisions/0001-tinygrad-is-pinned.md
OLDEST_PYTHON = (3, 11)
MIN_FILES = 1024  # open files: a server has one for each connection
MIN_DISK, COMFORTABLE_DISK = 256 << 20, 4 << 30  # free bytes: of compiled kernels; of packed weights, too


def check_python(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    if machine.python[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Finding("Python", Status.ERROR, f"{version} is older than {oldest}", f"install Python {oldest} or later")
    else:
        yield Finding("Python", Status.OK, version)


def check_tinygrad(machine: Machine) -> Iterator[Finding]:
    advice = f"pip install tinygrad=={TINYGRAD}"
    try:
        version = machine.version_of("tinygrad")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("tinygrad", Status.ERROR, "it is not installed", advice)
        return
    if version != TINYGRAD:
        yield Finding("tinygrad", Status.ERROR, f"{version}, expected {TINYGRAD}: its internals differ from version to version", advice)
    else:
        yield Finding("tinygrad", Status.OK, version)


def check_cores(machine: Machine) -> Iterator[Finding]:
    cores = machine.cores(machine.proc, machine.sysfs)
    threads = environment(machine.environ).get("TINYVLLM_THREADS") or cores.threads
    text = f"{cores}; {threads} threads run CPU kernels"
    if cores.quota is not None and cores.quota < threads:
        advice = f"set TINYVLLM_THREADS={cores.threads}, or raise the quota" if threads > cores.threads else "raise the quota"
        yield Finding("cores", Status.WARNING, f"{text}: threads that are stopped let all others wait", advice)
    elif threads > cores.physical:
        yield Finding("cores", Status.WARNING, f"{text}: they wait for each other", f"set TINYVLLM_THREADS={cores.threads} or unset it")
    else:
        yield Finding("cores", Status.OK, text)


def check_memory(machine: Machine) -> Iterator[Finding]:
    left = headroom(machine.proc, machine.cgroups)
    least = START_MEMORY + RUN_MEMORY
    if left.bytes < least:
        advice = "free memory, or raise the limit"
        yield Finding("memory", Status.ERROR, f"{left}; an engine takes {megabytes(least)} and its model", advice)
    elif left.address_space:
        yield Finding("memory", Status.WARNING, f"{left}, which counts address space that is not used, too", "ulimit -v unlimited")
    else:
        yield Finding("memory", Status.OK, str(left))
    if (machine.text(machine.proc / "sys" / "vm" / "overcommit_memory") or "").strip() == "2":
        text = "vm.overcommit_memory is 2: memory counts as used when it is reserved, as the KV cache is at the start"
        yield Finding("overcommitment", Status.WARNING, text, "sysctl vm.overcommit_memory=0, or give --kv-memory")


def check_files(machine: Machine) -> Iterator[Finding]:
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        text = f"ulimit -n is {soft}: a server needs a file for each connection, and one for each file of weights"
        free = hard == resource.RLIM_INFINITY or hard >= MIN_FILES
        advice = f"ulimit -n {MIN_FILES} or more" + ("" if free else f", as root: it is above the hard limit of {hard}")
        yield Finding("open files", Status.WARNING, text, advice)
    else:
        yield Finding("open files", Status.OK, "unlimited" if soft == resource.RLIM_INFINITY else f"ulimit -n is {soft}")


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    if machine.system != "linux":
        return
    text = machine.text(machine.sysfs / "kernel" / "mm" / "transparent_hugepage" / "enabled")
    mode = None if text is None else text.partition("[")[2].partition("]")[0]
    slower = "weights are read in pages of 4 KiB, which costs a seventh of the bandwidth"
    if mode in ("always", "madvise"):
        yield Finding("huge pages", Status.OK, mode)
    elif mode is None:
        yield Finding("huge pages", Status.WARNING, f"this kernel has none: {slower}", "use a kernel with transparent huge pages")
    else:
        place = machine.sysfs / "kernel" / "mm" / "transparent_hugepage" / "enabled"
        yield Finding("huge pages", Status.WARNING, f"{mode or 'unknown'}: {slower}", f"echo madvise > {place}, as root")


def check_cache_folder(machine: Machine) -> Iterator[Finding]:
    folder = cache_folder(machine.environ)
    try:
        path = require_private(folder)
    except Refusal as reason:
        text = f"{folder} is not used: {reason}; every start compiles its kernels again"
        yield Finding("cache folder", Status.WARNING, text, "mend that, or set TINYVLLM_CACHE to another folder")
        return
    yield _disk(path, machine.free_bytes(path))


def _disk(path: Path, free: int) -> Finding:
    text, advice = f"{path}, {megabytes(free)} free", "free space, or set TINYVLLM_CACHE to another folder"
    if free < MIN_DISK:
        return Finding("cache folder", Status.ERROR, f"{text}: compiled kernels do not fit", advice)
    if free < COMFORTABLE_DISK:
        return Finding("cache folder", Status.WARNING, f"{text}: weights that were packed are not kept for the next start", advice)
    return Finding("cache folder", Status.OK, text)
