"""BlockPool: what it gives, what it refuses, and its reference counts after a million operations against a model of them."""

import random

import numpy as np
import pytest

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.errors import ArgumentError, OutOfMemoryError


def test_allocates_each_block_once_in_order():
    pool = BlockPool(5, 16)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.num_free == 0
    assert [pool.reference_count(block) for block in range(5)] == [1] * 5


def test_nothing_asked_nothing_taken():
    pool = BlockPool(3, 16)
    assert pool.allocate(0) == []
    assert pool.num_free == 3


def test_all_or_nothing():
    pool = BlockPool(4, 16)
    pool.allocate(2)
    with pytest.raises(OutOfMemoryError, match="3 blocks wanted, 2 of 4 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(2) == [2, 3]


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(3, 16)
    table = pool.allocate(3)
    pool.share(table[:2])
    pool.release(table)
    assert pool.num_free == 1
    assert [pool.reference_count(block) for block in table] == [1, 1, 0]
    pool.release(table[:1])
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == [0, 2]


def test_a_block_twice_in_one_call_counts_twice():
    pool = BlockPool(2, 16)
    pool.allocate(1)
    pool.share([0, 0])
    assert pool.reference_count(0) == 3
    pool.release([0, 0, 0])
    assert pool.num_free == 2


def test_double_free_and_sharing_what_is_free_are_assertions():
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="block 0 released while it is free"):
        pool.release(table)
    with pytest.raises(AssertionError, match="block 0 shared while it is free"):
        pool.share(table)
    assert pool.num_free == 2


def test_a_negative_block_is_not_the_last_one():
    pool = BlockPool(2, 16)
    pool.allocate(2)
    for call in (lambda: pool.release([-1]), lambda: pool.share([-1]), lambda: pool.reference_count(-1), lambda: pool.allocate(-1)):
        with pytest.raises(AssertionError):
            call()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(tokens: int, blocks: int):
    assert BlockPool(1, 16).blocks_for(tokens) == blocks


@pytest.mark.parametrize(("blocks", "size", "name"), [(0, 16, "num_blocks"), (-1, 16, "num_blocks"), (4, 0, "block_size")])
def test_refuses_sizes_that_cannot_be_meant(blocks: int, size: int, name: str):
    with pytest.raises(ArgumentError, match=name):
        BlockPool(blocks, size)


def test_reference_counts_after_a_million_operations() -> None:
    """Tables are taken, shared in part, given back in part, at random; the model is the list of tables that are held."""
    pool, rng = BlockPool(199, 16), random.Random(7)
    held: list[list[int]] = []
    refused = 0

    def check() -> None:
        expected = np.bincount(np.array([block for table in held for block in table], dtype=np.int64), minlength=pool.num_blocks)
        assert [pool.reference_count(block) for block in range(pool.num_blocks)] == expected.tolist()
        assert pool.num_free == np.count_nonzero(expected == 0)

    for operation in range(1_000_000):
        dice = int(rng.random() * 10)
        if dice < 4 or not held:
            wanted, free = int(rng.random() * 9), pool.num_free
            if wanted > free:
                refused += 1
                with pytest.raises(OutOfMemoryError):
                    pool.allocate(wanted)
                held, gone = held[4:], held[:4]
                for table in gone:
                    pool.release(table)
            else:
                table = pool.allocate(wanted)
                assert len(table) == len(set(table)) == wanted and pool.num_free == free - wanted
                held.append(table)
        else:
            table = held[which := int(rng.random() * len(held))]
            if dice < 6:
                held.append(table[: int(rng.random() * 9)])
                pool.share(held[-1])
            elif dice < 8:
                pool.release(table[3:])
                del table[3:]
            else:
                held[which] = held[-1]
                held.pop()
                pool.release(table)
        if operation % 2000 == 0:
            check()
    check()
    assert refused > 100  # the pool was scarce
    for table in held:
        pool.release(table)
    assert sorted(pool.allocate(pool.num_blocks)) == list(range(pool.num_blocks))


def test_cached_blocks_are_free_and_the_last_to_be_given_away():
    pool = BlockPool(4, 16)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for block in pool.allocate(2):
        pool.keep(block)
    pool.release([0, 1])
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.allocate(2) == [2, 3] and not evicted
    assert pool.allocate(1) == [1] and evicted == [1]  # of a table the last goes first
    assert (pool.num_free, pool.num_cached) == (1, 1)
    with pytest.raises(OutOfMemoryError, match="2 blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert evicted == [1]


def test_the_least_recently_used_is_evicted_first():
    pool = BlockPool(4, 16)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for block in pool.allocate(4):
        pool.keep(block)
    pool.release([0, 1])
    pool.release([2])
    pool.release([3])
    pool.pin([1])  # found again
    assert pool.reference_count(1) == 1 and pool.num_free == 3
    pool.release([1])
    assert list(pool.cached_blocks()) == [1, 3, 2, 0]
    pool.allocate(4)
    assert evicted == [0, 2, 3, 1]


def test_a_forgotten_block_is_one_like_others():
    pool = BlockPool(2, 16)
    pool.on_evict = lambda block: pytest.fail(f"{block} evicted")
    for block in pool.allocate(2):
        pool.keep(block)
    pool.release([1])
    pool.forget(0)
    pool.forget(1)
    assert (pool.num_cached, pool.num_free) == (0, 1)
    assert pool.allocate(1) == [1]
    pool.release([0, 1])
    assert sorted(pool.allocate(2)) == [0, 1]


def test_an_adopted_block_is_the_next_to_go():
    pool = BlockPool(3, 16)
    pool.keep(pool.allocate(1)[0])
    pool.release([0])
    assert [pool.adopt(), pool.adopt(), pool.adopt()] == [1, 2, None]
    assert list(pool.cached_blocks()) == [0, 1, 2]
    assert pool.num_free == 3 and pool.allocate(1) == [2]


def test_what_cannot_be_pinned_kept_or_forgotten():
    pool = BlockPool(2, 16)
    for call, message in ((lambda: pool.pin([0]), "pinned while it is free"), (lambda: pool.keep(0), "kept while it is free"),
                          (lambda: pool.forget(0), "forgotten while it is not cached")):  # fmt: skip
        with pytest.raises(AssertionError, match=message):
            call()
    pool.allocate(1)
    pool.keep(0)
    with pytest.raises(AssertionError, match="kept before"):
        pool.keep(0)
    pool.release([0])
    with pytest.raises(AssertionError, match="shared while it is free"):
        pool.share([0])
