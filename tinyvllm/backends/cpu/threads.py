"""The threads that run CPU kernels: one pool per process, one thread per fast core.

Launching tinygrad's own threads from its Python worker costs 67 us per kernel. The pool takes a whole list of kernels at a time. Its
workers are Python threads that stay inside one C function (ctypes releases the interpreter lock). They meet at barriers of one cache
line each, spin for about two milliseconds after the last list, and then sleep in Python until the next list.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import threading
import time

import numpy as np

from tinyvllm.backends.cpu.binding import bind, bound
from tinyvllm.backends.cpu.compile import function_code
from tinyvllm.backends.cpu.cores import Cores, cores
from tinyvllm.bridge import code_address, load_program
from tinyvllm.config.switches import environment
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.placement import CoreShare

TEAM, CORES, ALONE = range(3)  # kinds of kernels in a list, as in kernels/cpu/thread_pool.c
MAX_ARGUMENTS = 64  # of a kernel, including its team
_WORK, _POST, _GO, _CLOCK = range(4)  # functions, as in kernels/cpu/thread_pool.c
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_void_p, *[ctypes.c_long] * 4)  # drops the GIL
_BYTES = 4096
TEAM_BYTES = 1024  # room for struct thread_pool of thread_team.h, which a team shares
_PATIENCE = 2000  # microseconds that workers spin after a list: more than the host takes between two steps


class ThreadPool:
    """`num_threads` threads; the caller of `run` is the first. Lists of several callers run one after the other."""

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        self._program = load_program("CPU", "thread_pool", function_code("thread_pool"))  # it holds the code
        self._call = _SIGNATURE(code_address(self._program))
        self._reset()

    def _reset(self) -> None:
        """Allocate new shared memory. There are no threads yet: they start with the first list."""
        self._memory = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)  # private: a forked child has its own
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._lock = threading.Lock()
        self._wakeups = [threading.Semaphore(0) for _ in range(self.num_threads)]
        self._threads: list[threading.Thread] = []

    def run(self, kernels: np.ndarray, count: int, times: int = 1, marks: np.ndarray | None = None) -> None:
        """Run a list of `count` kernels (int64 words as thread_pool.c has them) `times` times, and return when all of it is done.

        `marks` int64 [count + 1] gets the clock's ticks before the first kernel of the last time, and after each.
        """
        if count == 0 or times < 1:
            return  # a list without a barrier could be replaced before the workers read it
        with self._lock:
            if len(self._threads) < self.num_threads - 1:
                self._start()
            self._post(kernels.ctypes.data, count, times)
            self._call(_GO, self.address, self.num_threads, 0 if marks is None else marks.ctypes.data, 0, 0)

    def clock(self) -> tuple[int, float]:
        """The ticks that `marks` have, and the seconds of time.perf_counter, now."""
        return self._call(_CLOCK, 0, 0, 0, 0, 0), time.perf_counter()

    def _post(self, address: int, count: int, times: int) -> None:
        wake = self._call(_POST, self.address, self.num_threads, address, count, times)
        for number in range(1, self.num_threads) if wake else ():
            if wake >> number & 1:
                self._wakeups[number].release()

    def _start(self) -> None:
        """Start the threads that are missing; OutOfMemoryError if the system does not give them. The next list tries again."""
        for number in range(len(self._threads) + 1, self.num_threads):
            arguments = (number, self.address, self._wakeups[number])
            thread = threading.Thread(target=self._work, args=arguments, name=f"tinyvllm-thread-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OutOfMemoryError(
                    f"threads: the system does not start thread {number} of {self.num_threads} ({error}); free memory, raise ulimit -u, "
                    "or lower TINYVLLM_THREADS"
                ) from error
            self._threads.append(thread)

    def _work(self, number: int, address: int, wakeup: threading.Semaphore) -> None:
        last_list, call, num_threads = 0, self._call, self.num_threads
        while True:
            last_list = call(_WORK, address, number, num_threads, last_list, _PATIENCE)
            if last_list < 0:
                return
            wakeup.acquire()

    def dismiss(self) -> None:
        """End the threads. The next `run` starts new ones."""
        with self._lock:
            threads = self._threads
            if threads:
                self._post(0, 0, -1)
        for thread in threads:
            thread.join()
        self._reset()

    def forked(self) -> None:
        """Reset the pool in a forked child: its threads exist only in the parent, and one of them may have held the lock."""
        self._reset()


@functools.cache
def thread_pool() -> ThreadPool:
    """The thread pool of this process."""
    pool = ThreadPool(num_threads_wanted())
    atexit.register(pool.dismiss)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=pool.forked)
    return pool


def num_threads_wanted() -> int:
    """TINYVLLM_THREADS, or what the cores of this process allow (cores.py), divided among the processes that share them."""
    return environment(os.environ).get("TINYVLLM_THREADS") or max(1, _cores().threads // _share[-1].count)


def threads_in_words() -> str:
    """How many threads the kernels have, and why: "2 threads (4 physical cores, the control group's quota is 2.5 cores)"."""
    named, binding, ranks = environment(os.environ).get("TINYVLLM_THREADS"), bound(), _share[-1].count
    parts = [str(_cores()), *([f"shared by {ranks} ranks"] if ranks > 1 and not named else [])]
    if binding:
        parts.append(f"bound to memory node{'s' * (len(binding.nodes) > 1)} {' and '.join(map(str, binding.nodes))}")
    count = num_threads_wanted()
    return f"{count} thread{'s' * (count > 1)} ({'TINYVLLM_THREADS; ' if named else ''}{', '.join(parts)})"


def _cores() -> Cores:
    """Those of all processes that share them: a bound one has only some."""
    binding = bound()
    return cores() if binding is None else cores(allowed=binding.before)


_share = [CoreShare()]


def share_cores(share: CoreShare) -> None:
    """Take this process's part of the cores, and bind the calling thread, which runs its kernels. Nothing may run."""
    bind(share)
    if share != _share[-1]:
        _share.append(share)
        thread_pool.cache_clear()
