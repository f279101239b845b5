"""Which memory nodes each of the processes of an engine runs on.

A rank reads its own part of the weights in every step. Bound to a memory node, its threads find in that node's memory what they wrote
first: packed weights, its part of the KV cache, sums. Where the system moved them to another node, each step would read through the
link between the sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tinyvllm.backends.cpu.cores import memory_nodes
from tinyvllm.config.switches import environment
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import CoreShare

log = logging.getLogger("tinyvllm")

Nodes = Mapping[int, Sequence[int]]  # processors by memory node


@dataclass(frozen=True)
class Binding:
    """A thread that is bound.

    thread   its number in the system
    before   the processors that it had, and has again in the end
    nodes    the memory nodes that it is bound to
    weights  the memory nodes of all processes that map the same pages of weights
    """

    thread: int
    before: frozenset[int]
    nodes: tuple[int, ...]
    weights: tuple[int, ...]


_bound: list[Binding] = []  # one, or none


def bind(share: CoreShare, sysfs: Path = Path("/sys")) -> None:
    """Bind the calling thread, and with it the threads that it starts, to this process's memory nodes. A thread that was bound before is
    released. Nothing else happens where there is one node, one process, a GPU that computes, or TINYVLLM_BIND=0.
    """
    release()
    if sys.platform != "linux" or not share.same_weights or environment(os.environ).get("TINYVLLM_BIND") is False:
        return
    before = frozenset(os.sched_getaffinity(0))
    nodes = memory_nodes(sysfs, sorted(before))
    if len(nodes) < 2:
        return
    if isinstance(divided := divide(nodes, share.count), str):
        log.warning("cores: processes are not bound to memory nodes: %s", divided)
        return
    own, weights = divided[share.index], sorted({node for index in share.same_weights for node in divided[index]})
    try:
        os.sched_setaffinity(0, {cpu for node in own for cpu in nodes[node]})
    except OSError as error:
        text = "cores: processes are not bound to memory nodes: %s; in a container, allow sched_setaffinity"
        log.warning(text, error.strerror)
        return
    _bound.append(Binding(threading.get_native_id(), before, own, tuple(weights)))


def divide(nodes: Nodes, count: int) -> list[tuple[int, ...]] | str:
    """The memory nodes of each of `count` processes, neighbours together; or why they cannot be divided so that all have as many cores."""
    sizes, numbers = sorted({len(cpus) for cpus in nodes.values()}), sorted(nodes)
    if len(sizes) > 1:
        return f"the nodes have from {sizes[0]} to {sizes[-1]} processors"
    if count % len(numbers) and len(numbers) % count:
        return f"{count} processes on {len(numbers)} nodes"
    starts = [index * len(numbers) // count for index in range(count + 1)]
    return [tuple(numbers[start : max(start + 1, end)]) for start, end in zip(starts, starts[1:], strict=False)]


def release() -> None:
    """Let the thread that was bound run where it ran before. Threads that it has started stay."""
    while _bound:
        binding = _bound.pop()
        if not any(thread.native_id == binding.thread for thread in threading.enumerate()):
            continue  # it has ended, and the system may have given its number to a thread of another process
        with contextlib.suppress(OSError):
            os.sched_setaffinity(binding.thread, binding.before)


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Within it, threads and processes that the bound thread starts are not bound."""
    binding = bound()
    if binding is None or binding.thread != threading.get_native_id():
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, binding.before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def bound() -> Binding | None:
    """The thread of this process that is bound."""
    return _bound[-1] if _bound else None
