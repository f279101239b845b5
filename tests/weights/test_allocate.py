"""Memory for weights: large ones are in huge pages as far as whole ones go, and take no more memory than they have bytes."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

from tinyvllm.weights.mapping import HUGE_PAGE, allocate

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("nbytes", [0, 1, 5000, HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE // 2])
def test_memory_is_zero_and_of_the_size(nbytes):
    memory = allocate(nbytes)
    assert memory.shape == (nbytes,) and memory.flags.writeable and not memory.any()
    assert memory.ctypes.data % mmap.PAGESIZE == 0 and (memory.base is None or memory.base.nbytes == nbytes)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        assert memory.ctypes.data % HUGE_PAGE == 0


def in_memory() -> tuple[int, int]:
    """Anonymous bytes of this process that are in memory, and those of them in huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    sizes = dict(re.findall(r"(?m)^(Anonymous|AnonHugePages): +(\d+) kB", text))
    return 1024 * int(sizes["Anonymous"]), 1024 * int(sizes["AnonHugePages"])


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="this system has no huge pages")
def test_whole_huge_pages_are_used_and_no_more():
    count, before = 4, in_memory()
    held = [allocate(7 * HUGE_PAGE // 2) for _ in range(count)]
    for memory in held:
        memory.fill(1)
    resident, huge = (after - first for after, first in zip(in_memory(), before, strict=True))
    if huge == 0:
        pytest.skip("the system has no huge page free")
    assert huge <= 3 * count * HUGE_PAGE and resident < sum(m.nbytes for m in held) + HUGE_PAGE // 4, "the rest of the last one is lost"
