"""Meetings of ranks: one that waits long sleeps until the other comes, and none waits for a rank that has ended."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tinyvllm.backends.cpu.toolchain import provide_compiler
from tinyvllm.backends.source import kernels_folder
from tinyvllm.config.switches import cache_folder
from tinyvllm.distributed.memory import HEADER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks spin in a meeting")

# A team of one thread meets `times` times; each rank but the first comes `late` microseconds after it was called.
SOURCE = """
#include <unistd.h>
#include "meeting.h"

long met(void *shared, long times, long late) {
  struct thread_pool pool = {0};
  struct thread_team team = {0, 1, &pool};
  for (long i = 0; i < times; i++) {
    if (RANK > 0 && late) usleep(late);
    meet(shared, turn_of(shared), &team);
  }
  return turn_of(shared);
}
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("meeting")
    return [_compiled(folder / f"rank{rank}.so", rank) for rank in range(2)]


def _compiled(path: Path, rank: int) -> ctypes.CDLL:
    flags = ("-x", "c", "-O2", "-shared", "-fPIC", f"-I{kernels_folder() / 'cpu' / 'include'}", "-DWORLD=2", f"-DRANK={rank}")
    subprocess.run([provide_compiler(cache_folder()), *flags, "-", "-o", str(path)], input=SOURCE.encode(), check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def shared() -> np.ndarray:
    memory = np.zeros(HEADER + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + HEADER]


def _both(ranks: list[ctypes.CDLL], shared: np.ndarray, times: int, late: int) -> tuple[list[int], float, float]:
    """What each returned, and the first one's processor time and time."""
    counts = [0, 0]
    other = threading.Thread(target=lambda: counts.__setitem__(1, ranks[1].met(ctypes.c_void_p(shared.ctypes.data), times, late)))
    used, start = time.thread_time(), time.perf_counter()
    other.start()
    counts[0] = ranks[0].met(ctypes.c_void_p(shared.ctypes.data), times, late)
    used, passed = time.thread_time() - used, time.perf_counter() - start
    other.join()
    return counts, used, passed


def test_they_meet(ranks, shared):
    counts, _, _ = _both(ranks, shared, 20_000, 0)
    assert counts == [20_000, 20_000]


def test_a_rank_that_waits_long_sleeps(ranks, shared):
    """So that another process has the core meanwhile, and it is woken."""
    counts, used, passed = _both(ranks, shared, 20, 5000)
    assert counts == [20, 20] and passed > 0.1 and used < 0.3 * passed


def test_a_rank_that_sleeps_sees_that_the_other_has_ended(ranks, shared):
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (ranks[0].met(ctypes.c_void_p(shared.ctypes.data), 1, 0), done.set()))
    waiting.start()
    assert not done.wait(0.1)
    shared[:4].view(np.int32)[0] = 1
    assert done.wait(30), "it waits for ever"
    waiting.join()
