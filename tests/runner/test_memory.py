"""Sizing of the pool, and the two measurements for it."""

import pytest

from tinyvllm.errors import ArgumentError, OutOfMemoryError
from tinyvllm.host_memory import RUN_MEMORY, Headroom
from tinyvllm.runner import memory


def test_kv_memory_is_what_was_asked_for():
    assert memory.pool_blocks("CPU", 1000, 16, 10**9, kv_memory=12_345) == 12
    with pytest.raises(ArgumentError, match="1000"):
        memory.pool_blocks("CPU", 1000, 16, 10**9, kv_memory=999)


def test_no_more_than_could_be_used_and_no_more_than_there_is(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1_000_000)
    assert memory.pool_blocks("CPU", 1000, 16, wanted_tokens=100, kv_memory=None) == 7
    assert memory.pool_blocks("CPU", 1000, 16, wanted_tokens=10**9, kv_memory=None) == 496
    with pytest.raises(OutOfMemoryError):
        memory.pool_blocks("CPU", 600_000, 16, wanted_tokens=100, kv_memory=None)


def test_starts_agree_on_the_blocks_that_free_memory_holds(monkeypatch):
    """Steps on disk are for one number of blocks."""
    for free, blocks in ((1_000_000, 496), (1_010_000, 496), (31_000, 15)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        assert memory.pool_blocks("CPU", 1000, 16, wanted_tokens=10**9, kv_memory=None) == blocks


def test_a_drafter_shares_what_the_cache_may_take(monkeypatch):
    drafter = memory.DrafterMemory(weights=100_000, block=250, own=5_000)
    assert memory.pool_blocks("CPU", 1000, 16, 10**9, 12_345, drafter) == (12_345 - 5_000) // 1250
    assert memory.pool_blocks("CPU", 1000, 16, 10**9, 6_250, drafter) == 1
    message = "1000 bytes of the model, 250 of the drafter and 5000 for its guesses; give at least 6250"
    with pytest.raises(ArgumentError, match=message):
        memory.pool_blocks("CPU", 1000, 16, 10**9, 6_249, drafter)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1_000_000)
    assert memory.pool_blocks("CPU", 1000, 16, 10**9, None, drafter) == 352 < (450_000 - 5_000) // 1250
    memory.check_room("CPU", 600_000, drafter.total(1180))
    with pytest.raises(OutOfMemoryError, match="needs 1 MiB and the drafter 1 MiB, 1 MiB can be allocated"):
        memory.check_room("CPU", 600_001, drafter.total(1180))
    with pytest.raises(OutOfMemoryError, match=r"needs 1 MiB \(the drafter 1 MiB of it, of which weights 1 MiB\)"):
        memory.pool_blocks("CPU", 450_000, 16, 10**9, None, drafter)


def test_free_memory_is_a_plausible_number():
    assert 1 << 26 < memory.free_memory("CPU") < 1 << 48


def test_read_bandwidth_is_a_plausible_number():
    assert 1e8 < memory.read_bandwidth("CPU", 0.02) < 1e12


def test_a_cache_larger_than_memory_is_refused_in_its_own_words(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 30)
    memory.check_room("CPU", 1 << 30)
    with pytest.raises(OutOfMemoryError, match="KV cache needs 2048 MiB, 1024 MiB can be allocated .*--num-blocks"):
        memory.check_room("CPU", 2 << 30)


def test_weights_that_do_not_fit_are_named_with_what_there_is(monkeypatch):
    monkeypatch.setattr(memory, "headroom", lambda: Headroom(1 << 30, "free memory of this machine"))
    memory.check_weights("CPU", (1 << 30) - RUN_MEMORY)
    with pytest.raises(
        OutOfMemoryError, match=r"weights need 12.0 GiB and running the model 64 MiB, 1024 MiB can be allocated \(free memory of"
    ):
        memory.check_weights("CPU", 12 << 30)


def test_the_pool_follows_the_limits_of_the_process(monkeypatch):
    monkeypatch.setattr(memory, "headroom", lambda: Headroom(1_000_000, "ulimit -v is 9 MiB"))
    assert memory.free_memory("CPU") == 1_000_000
    assert memory.pool_blocks("CPU", 1000, 16, wanted_tokens=10**9, kv_memory=None) == 496
    with pytest.raises(OutOfMemoryError, match="ulimit -v is 9 MiB"):
        memory.check_room("CPU", 2_000_000)
