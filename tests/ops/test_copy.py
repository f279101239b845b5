"""Copies of blocks: kernel and reference, in place, and no more pairs than count."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.inputs import VARIANTS, int32, numbers, realized
from tinyvllm.bridge import download
from tinyvllm.ops.copy import copy_blocks


@pytest.mark.parametrize("variant", [*VARIANTS, "ref"])
def test_pairs_that_count_are_copied_in_place(variant, monkeypatch):
    monkeypatch.setenv("TINYVLLM_KERNELS", f"kv_copy={variant}")
    before = numbers(6, 2, 2, 8, 16)
    pool = realized(before)
    buffer = pool.uop.buffer
    pairs = realized(np.array([[1, 4], [3, 0], [2, 5]], np.int32))
    copy_blocks(pool, pairs, int32(2)).realize()
    expected = before.copy()
    expected[4], expected[0] = before[1], before[3]
    np.testing.assert_array_equal(download(pool), expected)
    assert pool.uop.buffer is buffer
