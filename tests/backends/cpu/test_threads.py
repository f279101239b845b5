"""The thread pool: lists of every kind of kernel on one, two and three threads, sleep, waking, forks, several callers, a clean end."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tinyvllm.backends.cpu import threads as module
from tinyvllm.backends.cpu.cores import Cores, cores
from tinyvllm.backends.cpu.threads import ALONE, CORES, TEAM, ThreadPool
from tinyvllm.backends.cpu.toolchain import provide_compiler
from tinyvllm.backends.source import kernels_folder
from tinyvllm.config.switches import cache_folder
from tinyvllm.errors import ArgumentError, OutOfMemoryError
from tinyvllm.placement import CoreShare

# One kernel of each kind. All work on x [n] int64; `log` counts its calls and takes the order in which they came.
SOURCE = """
#include <unistd.h>
#include "thread_team.h"

void by_all(int64_t *x, const int64_t *n, const struct thread_team *team) {  // x[i] += 1, then x[i] *= 3 of what another thread added to
  for (int i = next_unit(team); i < *n; i = next_unit(team)) x[i] += 1;
  barrier(team);
  for (int i = next_unit(team); i < *n; i = next_unit(team)) x[*n - 1 - i] *= 3;
}
void by_core(int64_t *x, int64_t core, const int64_t *n) {  // every core its fourth of x: x[i] = 2 x[i] + core
  for (long i = core * *n / 4; i < (core + 1) * *n / 4; i++) x[i] = 2 * x[i] + core;
}
void by_one(int64_t *x, const int64_t *n) {  // x[i] += sum of all
  int64_t sum = 0;
  for (int i = 0; i < *n; i++) sum += x[i];
  for (int i = 0; i < *n; i++) x[i] += sum % 1000;
}
void with_many(int64_t *x, long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l, long m, long n,
               long o, long p, long q, long r) {
  x[0] = a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k + 12 * l + 13 * m + 14 * n + 15 * o + 16 * p
       + 17 * q + 18 * r;
}
void late(int64_t *x, const struct thread_team *team) {  // all but the first thread come 5 ms later
  if (team->thread > 0) usleep(5000);
  barrier(team);
  if (team->thread == 0) x[0] += 1;
}
// x: the core before, whether another thread is on it, whether this one has moved, the core afterwards, whether one is on it, whether this
// one moves where no core is free
void moves(int64_t *x) {
  struct thread_pool pool = {0};
  struct thread_team team = {1, 2, &pool};
  note_core(&team);
  x[0] = pool.places[1].core - 1;
  pool.places[0].core = pool.places[1].core;
  x[1] = shares_core(&team);
  x[2] = move_to_free_core(&team);
  x[3] = pool.places[1].core - 1;
  x[4] = shares_core(&team);
  struct thread_team many = {1, MAX_THREADS, &pool};
  pool.places[0].core = 1;  // the first core, and the next 62
  for (int t = 2; t < MAX_THREADS; t++) pool.places[t].core = t;
  x[5] = move_to_free_core(&many);
}
void num_threads(int64_t *x, const struct thread_team *team) { x[team->thread] = team->threads; }
"""
N = 1000


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("thread_pool") / "kinds.so"
    include = kernels_folder() / "cpu" / "include"
    command = [provide_compiler(cache_folder()), "-x", "c", "-O2", "-shared", "-fPIC", f"-I{include}", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCE.encode(), check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(params=[1, 2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    pool = ThreadPool(request.param)
    yield pool
    pool.dismiss()


class Kinds:
    """Lists for x [n], and what they make of it."""

    def __init__(self, code: ctypes.CDLL, n: int = N):
        self.x, self._n, self._code = np.arange(n, dtype=np.int64), np.array([n], np.int64), code
        self._expected = self.x.copy()

    def words(self, *kinds: int) -> np.ndarray:
        out: list[int] = []
        x, n = self.x.ctypes.data, self._n.ctypes.data
        for kind in kinds:
            name, arguments, place, cores = {
                TEAM: ("by_all", [x, n], 0, 1), CORES: ("by_core", [x, 0, n], 1, 4), ALONE: ("by_one", [x, n], 0, 1)
            }[kind]  # fmt: skip
            address = ctypes.cast(getattr(self._code, name), ctypes.c_void_p).value
            out += [address, kind, len(arguments), place, cores, *arguments]
        return np.array(out, np.int64)

    def expect(self, *kinds: int) -> np.ndarray:
        """x after these, done here in numpy on top of what was expected before. It wraps around as C does."""
        x = self._expected
        for kind in kinds:
            if kind == TEAM:
                x[:] = (x + 1) * 3
            elif kind == CORES:
                x[:] = 2 * x + np.arange(len(x)) * 4 // len(x)
            else:
                x += np.fmod(x.sum(), 1000)
        return x


ALL = (TEAM, CORES, ALONE, ALONE, TEAM, TEAM, ALONE, CORES, CORES, ALONE)


def test_every_kind_in_order(code, pool):
    for kinds in ((TEAM,), (CORES,), (ALONE,), ALL):
        made = Kinds(code)
        pool.run(made.words(*kinds), len(kinds))
        np.testing.assert_array_equal(made.x, made.expect(*kinds), err_msg=str(kinds))


def test_a_list_many_times_over_and_many_lists(code, pool):
    made = Kinds(code, 64)
    words = made.words(*ALL)
    pool.run(words, len(ALL), 200)
    np.testing.assert_array_equal(made.x, made.expect(*ALL * 200))
    for _ in range(200):
        pool.run(words, len(ALL))
    np.testing.assert_array_equal(made.x, made.expect(*ALL * 200))
    pool.run(words[:0], 0)
    pool.run(words, len(ALL))
    np.testing.assert_array_equal(made.x, made.expect(*ALL))


def test_arguments_of_any_number_arrive(code, pool):
    x, values = np.zeros(1, np.int64), list(range(101, 119))
    words = [ctypes.cast(code.with_many, ctypes.c_void_p).value, ALONE, 19, 0, 1, x.ctypes.data, *values]
    pool.run(np.array(words, np.int64), 1)
    assert x[0] == sum(i * value for i, value in enumerate(values, start=1))


def test_all_threads_take_part_and_a_pool_of_one_starts_none(code, pool):
    before = threading.active_count()
    x = np.zeros(4, np.int64)
    pool.run(np.array([ctypes.cast(code.num_threads, ctypes.c_void_p).value, TEAM, 1, 0, 1, x.ctypes.data], np.int64), 1)
    assert x.tolist() == [pool.num_threads] * pool.num_threads + [0] * (4 - pool.num_threads)
    assert threading.active_count() - before == pool.num_threads - 1


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="elsewhere a thread does not know its core")
@pytest.mark.skipif(not 2 <= len(os.sched_getaffinity(0)) < 63, reason="there is no other core, or there are too many")
def test_a_thread_leaves_the_core_that_another_one_needs(code):
    """For a free one of those that it may run on, which are the same afterwards; where none is free it stays."""
    found: list[list[int]] = []

    def run() -> None:
        before, x = os.sched_getaffinity(0), np.zeros(6, np.int64)
        code.moves(ctypes.c_void_p(x.ctypes.data))
        assert os.sched_getaffinity(0) == before
        found.append(x.tolist())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    before, shared, moved, after, shared_after, moved_again = found[0]
    assert shared and moved and not shared_after and not moved_again
    assert before != after and {before, after} <= os.sched_getaffinity(0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads spin in a barrier")
def test_a_thread_that_waits_long_sleeps(code):
    """So that another process has the core meanwhile."""
    pool, x = ThreadPool(2), np.zeros(1, np.int64)
    late = np.array([ctypes.cast(code.late, ctypes.c_void_p).value, TEAM, 1, 0, 1, x.ctypes.data], np.int64)
    pool.run(late, 1)
    used, start = time.thread_time(), time.perf_counter()
    pool.run(late, 1, 20)
    used, passed = time.thread_time() - used, time.perf_counter() - start
    pool.dismiss()
    assert x[0] == 21 and passed > 0.1 and used < 0.3 * passed


def test_a_dismissed_pool_has_no_threads_and_starts_again(code, pool):
    before = threading.active_count()
    for _ in range(3):
        made = Kinds(code)
        pool.run(made.words(*ALL), len(ALL))
        np.testing.assert_array_equal(made.x, made.expect(*ALL))
        pool.dismiss()
        assert threading.active_count() == before
        pool.dismiss()  # there are no threads to end


class Bed(threading.Semaphore):
    """What a worker waits for; `asleep` once it does."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asleep = threading.Event()

    def acquire(self, *arguments, **named):
        self.asleep.set()
        return super().acquire(*arguments, **named)


def test_idle_it_sleeps_and_it_wakes_again(code, pool):
    made = Kinds(code)
    words = made.words(*ALL)
    pool._wakeups = beds = [Bed() for _ in range(pool.num_threads)]
    for _ in range(3):
        pool.run(words, len(ALL))
        assert all(bed.asleep.wait(60) for bed in beds[1:]), "it spins for ever"
        for bed in beds:
            bed.asleep.clear()
    for pause in (0.0, 0.001, 0.002, 0.003, 0.05) * 4:  # about when the workers fall asleep
        pool.run(words, len(ALL))
        time.sleep(pause)
    np.testing.assert_array_equal(made.x, made.expect(*ALL * 23))


def test_two_callers_at_once(code, pool):
    callers = [Kinds(code), Kinds(code)]

    def work(made: Kinds) -> None:
        words = made.words(*ALL)
        for _ in range(100):
            pool.run(words, len(ALL))

    threads = [threading.Thread(target=work, args=(made,)) for made in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in callers:
        np.testing.assert_array_equal(made.x, made.expect(*ALL * 100))


def test_two_pools_do_not_meet(code):
    pools = [ThreadPool(2), ThreadPool(2)]
    for _ in range(20):
        for pool in pools:
            made = Kinds(code)
            pool.run(made.words(*ALL), len(ALL))
            np.testing.assert_array_equal(made.x, made.expect(*ALL))
    for pool in pools:
        pool.dismiss()


# --- in a separate process


def run_apart(body: str, threads: int) -> subprocess.CompletedProcess[str]:
    """Run the program `body` in a process. Its `work()` copies blocks with a real kernel on the thread pool, and checks the copies."""
    code = f"""
import os, sys, threading
import numpy as np
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device
start_device("CPU", cache_folder())
from tinyvllm.backends.cpu.threads import thread_pool
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.launch import run_now

def work():
    for _ in range(50):
        pool = np.arange(8, dtype=np.int64)[:, None].repeat(8, 1)
        pairs = np.array([[0, 7], [1, 6], [2, 5], [3, 4]], np.int32)
        run_now(Kernel("kv_copy", "cpu", "plain", (("BLOCK_BYTES", 64),), 1, 2), pool, pairs, np.array([4], np.int32))
        assert pool[:, 7].tolist() == [0, 1, 2, 3, 3, 2, 1, 0], pool
{body}
"""
    environ = os.environ | {"TINYVLLM_THREADS": str(threads)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=400, cwd=Path(__file__).parents[3]
    )


def test_the_interpreter_ends_right_after_work():
    for ending in ("", "sys.exit(0)", "raise SystemExit"):
        done = run_apart(f"work()\nprint(thread_pool().num_threads, threading.active_count())\n{ending}", 3)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.split()[0] == "3"


def test_a_list_that_is_run_no_times_is_none():
    done = run_apart("work()\nfor _ in range(50):\n    thread_pool().run(np.zeros(5, np.int64), 1, 0)\n    work()", 2)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_thread_in_the_environment_starts_none():
    done = run_apart("before = threading.active_count()\nwork()\nprint(thread_pool().num_threads, threading.active_count() - before)", 1)
    assert (done.returncode, done.stdout) == (0, "1 0\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_its_own_pool():
    """Both work at the same time; the child ends as a program does, with its exit functions."""
    body = """
work()
child = os.fork()
for _ in range(20):
    work()
if child == 0:
    sys.exit(7)
_, status = os.waitpid(child, 0)
work()
print(os.waitstatus_to_exitcode(status))
"""
    done = run_apart(body, 2)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(module, "_share", [CoreShare()])
    monkeypatch.setenv("TINYVLLM_THREADS", "5")
    assert module.num_threads_wanted() == 5
    monkeypatch.delenv("TINYVLLM_THREADS")
    assert module.num_threads_wanted() == cores().threads >= 1
    monkeypatch.setenv("TINYVLLM_THREADS", "0")
    with pytest.raises(ArgumentError, match="TINYVLLM_THREADS must be a number from 1 to 64"):
        module.num_threads_wanted()


def test_the_number_of_threads_in_words(monkeypatch):
    monkeypatch.delenv("TINYVLLM_THREADS", raising=False)
    monkeypatch.setattr(module, "_share", [CoreShare()])
    monkeypatch.setattr(module, "cores", lambda: Cores(16, 8, 8, quota=6.5))
    counts = "8 physical cores, 16 hardware threads, the control group's quota is 6.5 cores"
    assert module.threads_in_words() == f"6 threads ({counts})"
    monkeypatch.setattr(module, "_share", [CoreShare(2)])
    assert module.threads_in_words() == f"3 threads ({counts}, shared by 2 ranks)"
    monkeypatch.setenv("TINYVLLM_THREADS", "5")
    assert module.threads_in_words() == f"5 threads (TINYVLLM_THREADS; {counts})"


def test_threads_that_the_system_refuses_are_started_by_the_next_list(monkeypatch):
    pool, start, refused = ThreadPool(4), threading.Thread.start, []

    def reluctant(thread):
        if thread.name == "tinyvllm-thread-2" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", reluctant)
    with pytest.raises(OutOfMemoryError, match="thread 2 of 4"):
        pool._start()
    pool._start()
    assert [thread.name for thread in pool._threads] == [f"tinyvllm-thread-{n}" for n in (1, 2, 3)]
    pool.dismiss()
