"""What may still be allocated: the machine, control groups of both versions, ulimit -v; and which exceptions mean that memory ran out."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm.errors import KernelError, OutOfMemoryError
from tinyvllm.host_memory import RESERVE, Headroom, headroom, is_out_of_memory, megabytes, require

MIB = 1 << 20


def write_proc(folder: Path, cgroup: str, available: int = 8192) -> Path:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: {available * 1024} kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "statm").write_text("1000 500 100 1 0 300 0\n")
    return proc


def write_group(folder: Path, names: tuple[str, str, str], limit: str, usage: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, cached_name = names
    (folder / limit_name).write_text(limit + "\n")
    (folder / usage_name).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cached_name} {cached}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_without_control_groups_it_is_what_the_machine_has_free(tmp_path):
    proc = write_proc(tmp_path, "0::/\n")
    assert headroom(proc, tmp_path / "none") == Headroom(8192 * MIB, "free memory of this machine")


def test_the_tightest_control_group_counts_and_its_file_pages_are_free(tmp_path):
    proc, groups = write_proc(tmp_path, "0::/outer/inner\n"), tmp_path / "cgroup"
    write_group(groups / "outer" / "inner", V2, "max", 10 * MIB, 0)
    write_group(groups / "outer", V2, str(1024 * MIB), 600 * MIB, 100 * MIB)
    assert headroom(proc, groups) == Headroom(524 * MIB, "the control group's memory.max is 1024 MiB")
    write_group(groups / "outer" / "inner", V2, str(512 * MIB), 500 * MIB, 0)
    assert headroom(proc, groups).bytes == 12 * MIB
    write_group(groups / "outer" / "inner", V2, str(512 * MIB), 600 * MIB, 0)
    assert headroom(proc, groups).bytes == 0, "over its limit, about to be killed"


def test_in_a_container_the_root_group_counts_whatever_the_path_says(tmp_path):
    proc, groups = write_proc(tmp_path, "0::/../../system.slice/docker-1.scope\n"), tmp_path / "cgroup"
    write_group(groups, V2, str(2048 * MIB), 48 * MIB, 0)
    assert headroom(proc, groups).bytes == 2000 * MIB


def test_version_1_of_control_groups(tmp_path):
    proc, groups = write_proc(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a\n"), tmp_path / "cgroup"
    write_group(groups / "memory" / "a", V1, str(256 * MIB), 56 * MIB, 0)
    write_group(groups / "memory", V1, str((1 << 63) - 4096), 0, 0)
    assert headroom(proc, groups) == Headroom(200 * MIB, "the control group's memory.limit_in_bytes is 256 MiB")


def test_the_address_space_that_ulimit_leaves():
    code = (
        "import resource\n"
        "from tinyvllm.host_memory import headroom\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))\n"
        "left = headroom()\n"
        "assert 60 << 20 < left.bytes <= 64 << 20, left\n"
        "assert left.limit.startswith('ulimit -v is '), left\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_required_and_what_there_is_in_one_line(monkeypatch):
    monkeypatch.setattr("tinyvllm.host_memory.headroom", lambda: Headroom(100 * MIB, "ulimit -v is 400 MiB"))
    require(100 * MIB - RESERVE, "the step")
    with pytest.raises(OutOfMemoryError) as raised:
        require(80 * MIB, "the step", "send less")
    assert str(raised.value) == (
        "memory: the step needs 80 MiB, 100 MiB can be allocated (ulimit -v is 400 MiB), of which 32 MiB are kept free; send less"
    )
    assert megabytes(15 << 30) == "15.0 GiB"


def _raised_from(cause: BaseException) -> BaseException:
    error = KernelError("kernels: no")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), OutOfMemoryError("x"), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread"),
        _raised_from(MemoryError()), ExceptionGroup("no device", [ValueError(), OSError(errno.ENOMEM, "no")]),
    ],
)  # fmt: skip
def test_exceptions_that_mean_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [ValueError("memory"), OSError(errno.ENOSPC, "disk"), RuntimeError("no"), _raised_from(KeyError())])
def test_exceptions_that_do_not(error):
    assert not is_out_of_memory(error)


def test_a_chain_that_refers_to_itself_ends():
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


@pytest.mark.parametrize("command", [["generate", "--prompt", "hello"], ["serve"]])
@pytest.mark.parametrize("mebibytes", [200, 420, 650])
def test_too_little_memory_to_start_is_one_line_with_what_is_needed(tmp_path, command, mebibytes):
    limits = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({mebibytes << 20}, {mebibytes << 20}))"
    code = f"{limits}\nimport sys\nfrom tinyvllm.cli import main\nsys.exit(main({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tinyvllm: error: memory: ") and " MiB" in line and f"ulimit -v is {mebibytes} MiB" in line


def run_limited(code: str) -> str:
    """The output of a program with `left(mebibytes)`, which sets what it may still allocate."""
    head = (
        "import resource\n"
        "def left(mebibytes):\n"
        "    size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (size + (mebibytes << 20), resource.RLIM_INFINITY))\n"
    )
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="needs ulimit -v")
def test_native_calls_that_run_at_the_same_time_do_not_get_the_same_memory():
    code = (
        "from tinyvllm.host_memory import native_call\n"
        "left(50)\n"
        "with native_call(20 << 20, 'the first'):\n"
        "    try:\n"
        "        with native_call(20 << 20, 'the second'):\n"
        "            print('both')\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "with native_call(20 << 20, 'the third'):\n"
        "    print('alone')\n"
    )
    refused, third = run_limited(code).splitlines()
    assert refused.startswith("memory: the second needs 20 MiB, ") and "of which 16 MiB are kept free" in refused and third == "alone"


@pytest.mark.skipif(sys.platform != "linux", reason="needs ulimit -v")
def test_a_text_that_cannot_be_tokenized_is_refused_before_the_library_ends_the_process():
    code = (
        "from pathlib import Path\n"
        "from tinyvllm.text.load import load_tokenizer\n"
        "tokenizer = load_tokenizer(Path('tinyvllm/demo/model'))\n"
        "text = 'several words ' * 3_000\n"
        "tokenizer.encode(text[:10])\n"
        "left(2)\n"
        "try:\n"
        "    tokenizer.encode(text)\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    assert "memory: tokenising 42000 characters needs 6 MiB" in run_limited(code)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_threads_reserve_little_address_space_under_a_limit():
    code = (
        "import threading\n"
        "from tinyvllm.host_memory import limit_arenas\n"
        "size = lambda: int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() >> 20\n"
        "left(2048)\n"
        "limit_arenas()\n"
        "before, done, kept = size(), threading.Event(), []\n"
        "threads = [threading.Thread(target=lambda: (kept.append(bytes(1000)), done.wait())) for _ in range(6)]\n"
        "[thread.start() for thread in threads]\n"
        "while len(kept) < 6: pass\n"
        "print(size() - before)\n"
        "done.set()\n"
    )
    assert int(run_limited(code)) < 200, "six stacks of 8 MiB and one arena of 64"
