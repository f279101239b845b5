"""Copies of recurrent states: which is found, and which makes room."""

from __future__ import annotations

from tinyvllm.cache.snapshots import StateSnapshots

A, B, C, D = (bytes([n]) * 16 for n in range(4))


def made(snapshots: StateSnapshots, *hashes: bytes) -> list[int]:
    slots = []
    for one in hashes:
        assert (slot := snapshots.take()) is not None
        snapshots.publish(one, slot)
        slots.append(slot)
    return slots


def test_the_longest_prefix_with_a_copy_is_found():
    snapshots = StateSnapshots(3)
    made(snapshots, A, C)
    assert [snapshots.longest(prefix) for prefix in ([A, B, C, D], [A, B], [B], [D, C], [])] == [3, 1, 0, 2, 0]


def test_the_one_used_longest_ago_makes_room():
    snapshots = StateSnapshots(2)
    first, second = made(snapshots, A, B)
    snapshots.release(snapshots.read(A))
    assert made(snapshots, C) == [second] and A in snapshots and B not in snapshots and len(snapshots) == 2
    assert made(snapshots, D) == [first]


def test_a_copy_that_a_step_reads_stays():
    snapshots = StateSnapshots(1)
    (slot,) = made(snapshots, A)
    assert snapshots.read(A) == slot and snapshots.read(A) == slot
    assert snapshots.take() is None and A in snapshots
    snapshots.release(slot)
    assert snapshots.take() is None
    snapshots.release(slot)
    assert snapshots.take() == slot and A not in snapshots


def test_slots_come_back():
    snapshots = StateSnapshots(2)
    first, second = snapshots.take(), snapshots.take()
    assert first is not None and second is not None and snapshots.take() is None
    snapshots.publish(A, first)
    snapshots.publish(A, second)  # another sequence was faster
    assert len(snapshots) == 1 and snapshots.take() == second
    snapshots.discard(second)
    snapshots.reset()
    assert {snapshots.take(), snapshots.take()} == {first, second} and A not in snapshots
