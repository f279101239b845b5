"""The threads that run CPU kernels: one crew a process, a lane for each physical core.

Launching tinygrad's own lanes from its Python worker costs 67 us a kernel. A crew takes a whole list of kernels at a time; its workers
are Python threads that stay inside one C function (ctypes drops the lock), meet at barriers of a cache line each, spin for about two
milliseconds after the last list, and then sleep in Python until the next.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from tinyvllm.backends.cpu.compile import library
from tinyvllm.config import environment

TEAM, CORES, ALONE = range(3)  # kinds of kernels in a list, as in kernels/cpu/thread_pool.c
MAX_ARGUMENTS = 64  # of a kernel, its team counted
_BYTES = 4096
_PATIENCE = 2000  # microseconds that workers spin after a list: more than the host takes between two steps


class ThreadPool:
    """`lanes` threads, of which the caller of `run` is the first. Lists of several callers run one after the other."""

    def __init__(self, lanes: int):
        self.lanes = lanes
        self._code = ctypes.CDLL(str(library("thread_pool")))
        self._code.pool_post.restype = ctypes.c_uint64
        self._code.pool_work.restype = ctypes.c_long
        self._code.pool_go.restype = None
        self._muster()

    def _muster(self) -> None:
        """Fresh shared memory and no threads yet: they start with the first list."""
        self._memory = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)  # private: a forked child has its own
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._lock = threading.Lock()
        self._bells = [threading.Semaphore(0) for _ in range(self.lanes)]
        self._threads: list[threading.Thread] = []

    def run(self, kernels: np.ndarray, count: int, times: int = 1) -> None:
        """Run a list of `count` kernels (int64 words as thread_pool.c has them) `times` times over, and return when all is done."""
        if count == 0 or times < 1:
            return  # a list without a meeting could be replaced before the workers have seen it
        with self._lock:
            if len(self._threads) < self.lanes - 1:
                self._start()
            self._post(kernels.ctypes.data, count, times)
            self._code.pool_go(ctypes.c_void_p(self.address), ctypes.c_long(self.lanes))

    def _post(self, address: int, count: int, times: int) -> None:
        shared = ctypes.c_void_p(self.address)
        wake = self._code.pool_post(shared, ctypes.c_long(self.lanes), ctypes.c_void_p(address), ctypes.c_long(count), ctypes.c_long(times))
        for lane in range(1, self.lanes) if wake else ():
            if wake >> lane & 1:
                self._bells[lane].release()

    def _start(self) -> None:
        for lane in range(1, self.lanes):
            arguments = (lane, self.address, self._bells[lane])
            thread = threading.Thread(target=self._work, args=arguments, name=f"tinyvllm-lane-{lane}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self, lane: int, address: int, bell: threading.Semaphore) -> None:
        seen, work, lanes = 0, self._code.pool_work, self.lanes
        while True:
            arguments = (lane, lanes, seen, _PATIENCE)
            seen = work(ctypes.c_void_p(address), *(ctypes.c_long(a) for a in arguments))
            if seen < 0:
                return
            bell.acquire()

    def dismiss(self) -> None:
        """End the threads. The next `run` starts new ones."""
        with self._lock:
            threads = self._threads
            if threads:
                self._post(0, 0, -1)
        for thread in threads:
            thread.join()
        self._muster()

    def forked(self) -> None:
        """In a forked child: the threads stayed behind, and the lock may have been held by one of them."""
        self._muster()


@functools.cache
def thread_pool() -> ThreadPool:
    """The crew of this process."""
    one = ThreadPool(num_threads_wanted())
    atexit.register(one.dismiss)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=one.forked)
    return one


def num_threads_wanted() -> int:
    """TINYVLLM_THREADS, or the physical cores that this process may run on."""
    return environment(os.environ).get("TINYVLLM_THREADS") or physical_cores()


def physical_cores() -> int:
    """Cores, two threads of one counted once, as far as the system tells and lets this process use them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, len(cores))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
