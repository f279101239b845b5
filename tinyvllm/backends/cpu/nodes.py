"""Memory of a machine with several memory nodes: weights are spread over the nodes of the cores that read them.

Units of work go to free threads, so no thread reads the same rows in every step, and no node is the right one for a row. Pages taken in
turn from all nodes let each step read from all of them at once; the pages of one loader would all be on its own node.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tinyvllm.backends.cpu.binding import bound
from tinyvllm.backends.cpu.cores import MAX_NODES, memory_nodes

log = logging.getLogger("tinyvllm")

_DEFAULT, _INTERLEAVE = 0, 3  # policies: the node of the core that touches a page first; all nodes in turn
_SET, _GET = range(2)  # set_mempolicy, get_mempolicy
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}


@contextlib.contextmanager
def over_memory_nodes(sysfs: Path = Path("/sys")) -> Iterator[None]:
    """Within it, this thread and the threads it starts take new pages in turn from the memory nodes of this process's cores, or of all
    processes that map the same weights (binding.py).

    Pages of files that the thread reads first count, pages that are in memory stay. Nothing happens on one node, on a system that has
    no such policies, and where the process already has one (numactl).
    """
    binding = bound()
    nodes = binding.weights if binding else [*memory_nodes(sysfs, os.sched_getaffinity(0))] if sys.platform == "linux" else ()
    if len(nodes) < 2 or not _spread(nodes):
        yield
        return
    try:
        yield
    finally:
        _call(_SET, _DEFAULT, None, 0)


def _spread(nodes: Sequence[int]) -> bool:
    policy, mask = ctypes.c_int(-1), (ctypes.c_uint64 * (MAX_NODES // 64))()
    error = _call(_GET, ctypes.byref(policy), None, 0, None, 0)
    if error == 0 and policy.value != _DEFAULT:
        return False
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    error = error or _call(_SET, _INTERLEAVE, mask, MAX_NODES + 1)  # Linux reads one bit less than it is told
    if error:
        log.warning(
            "memory: weights stay on the memory node of the thread that loads them, one of %d: %s; in a container, allow set_mempolicy",
            len(nodes), os.strerror(error),
        )  # fmt: skip
    return error == 0


def _call(which: int, *arguments: Any) -> int:
    """The error number of a system call, 0 for none."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    failed = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(numbers[which]), *words)
    return ctypes.get_errno() if failed else 0
