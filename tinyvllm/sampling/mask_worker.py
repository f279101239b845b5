"""Fills the masks of many grammars in a background thread while the device runs the forward pass. No tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import numpy as np

from tinyvllm.sampling.grammar import Grammar, Pool

MAX_THREADS = 4  # a mask takes microseconds: more threads than this wait for each other


class MaskWorker:
    """One thread for the life of the engine. `start`, launch the forward pass, `wait`, send the masks, draw.

    Between `start` and `wait` the grammars belong to the thread. After `wait`, `Grammar.error` has the error of a grammar.
    """

    def __init__(self, threads: int | None = None):
        self._pool = Pool(threads or max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))
        self._jobs: list[tuple[Grammar, int]] = []  # one list for all steps
        self._mask = np.empty((0, 0), dtype=np.int32)
        self._begin, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._busy = self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tinyvllm-masks", daemon=True)
        self._thread.start()

    def start(self, jobs: Iterable[tuple[Grammar, int]], mask: np.ndarray) -> None:
        """Start to fill row r of `mask`, int32 [R, ceil(V/32)] and contiguous, for each (grammar, r)."""
        if self._busy:
            raise RuntimeError("mask worker: the masks of the last step were not waited for")
        self._jobs.clear()
        self._jobs.extend(jobs)
        self._mask = mask
        self._busy = True
        self._begin.release()

    def wait(self) -> None:
        """Until all rows are filled; at once if nothing was started."""
        if not self._busy:
            return
        self._done.acquire()
        self._busy = False
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """End the thread."""
        self.wait()
        self._closing = True
        self._begin.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._begin.acquire()
            if self._closing:
                return
            try:
                self._pool.fill(self._jobs, self._mask)
            except BaseException as error:  # raised by `wait`, in the caller's thread
                self._failure = error
            self._done.release()
