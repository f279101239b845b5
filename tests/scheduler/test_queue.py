"""Whose turn it is among those that wait."""

from __future__ import annotations

from tests.scheduler.builders import make_sequence
from tinyvllm.scheduler import queue as module
from tinyvllm.scheduler.queue import WaitingQueue


def fill(queue: WaitingQueue, *sequences) -> list:
    for sequence in sequences:
        queue.push(sequence)
    return list(sequences)


def drained(queue: WaitingQueue, tokens: int = 10) -> list[int]:
    """All that wait as they come, each served that many tokens."""
    order = []
    while queue:
        sequence = queue.first()
        queue.remove(sequence)
        queue.serve(sequence.options.key, tokens)
        order.append(sequence.sequence_id)
    return order


def test_priority_then_deadline_then_arrival():
    queue = WaitingQueue()
    fill(
        queue, make_sequence(0, 1), make_sequence(1, 1, priority=1, deadline_ms=1.0), make_sequence(2, 1, deadline_ms=900.0),
        make_sequence(3, 1, ttft_deadline_ms=800.0, deadline_ms=5000.0), make_sequence(4, 1, priority=-1), make_sequence(5, 1),
    )  # fmt: skip
    assert [s.sequence_id for s in queue] == [4, 3, 2, 0, 5, 1]
    assert drained(queue) == [4, 3, 2, 0, 5, 1]


def test_keys_take_turns_by_tokens_served():
    queue = WaitingQueue()
    fill(queue, *(make_sequence(i, 1, key="many") for i in range(6)), *(make_sequence(i, 1, key="few") for i in range(6, 9)))
    assert drained(queue) == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_a_key_that_was_served_much_waits_until_others_have_had_as_much():
    queue = WaitingQueue()
    big, *_ = fill(queue, make_sequence(0, 1, key="big"), make_sequence(1, 1, key="small"))
    queue.serve(big.options.key, 25)
    fill(queue, *(make_sequence(i, 1, key="small") for i in range(2, 6)))
    assert drained(queue, 10) == [1, 2, 3, 0, 4, 5]


def test_priority_comes_before_fairness():
    queue = WaitingQueue()
    served, _ = fill(queue, make_sequence(0, 1, key="a", priority=-1), make_sequence(1, 1, key="b"))
    queue.serve(served.options.key, 1000)
    assert queue.first() is served


def test_an_absent_key_earns_no_credit():
    queue = WaitingQueue()
    a, b = fill(queue, make_sequence(0, 1, key="a"), make_sequence(1, 1, key="b"))
    queue.remove(b)
    queue.serve(a.options.key, 1000)
    fill(queue, *(make_sequence(i, 1, key="b") for i in range(2, 5)), *(make_sequence(i, 1, key="a") for i in range(5, 7)))
    assert drained(queue) == [0, 2, 3, 5, 4, 6]


def test_nor_does_a_key_that_comes_while_none_waits():
    """All of one key's requests run; the count of the key that left the queue last is what a new one starts from."""
    queue = WaitingQueue()
    a, b = fill(queue, make_sequence(0, 1, key="a"), make_sequence(1, 1, key="b"))
    queue.remove(b)
    queue.remove(a)
    queue.serve(a.options.key, 1000)
    fill(queue, *(make_sequence(i, 1, key="b") for i in range(2, 5)), *(make_sequence(i, 1, key="a") for i in range(5, 8)))
    assert drained(queue) == [2, 5, 3, 6, 4, 7]


def test_those_taken_out_of_the_middle_do_not_come():
    queue = WaitingQueue()
    sequences = fill(queue, *(make_sequence(i, 3) for i in range(5)))
    queue.remove(sequences[2])
    queue.remove(sequences[4])
    queue.remove(sequences[0])
    assert len(queue) == 2 and queue.num_tokens == 6 and [s.sequence_id for s in queue] == [1, 3]
    assert drained(queue) == [1, 3] and queue.num_tokens == 0 and not queue._removed and not queue._heaps


def test_counts_of_keys_that_say_nothing_are_dropped(monkeypatch):
    """With a key a user they would be without end."""
    monkeypatch.setattr(module, "_KEYS", 8)
    queue = WaitingQueue()
    for i in range(200):
        sequence = make_sequence(i, 1, key=f"user {i}")
        queue.push(sequence)
        queue.remove(sequence)
        queue.serve(sequence.options.key, 3)
    assert len(queue._served) < 20
    fill(queue, make_sequence(201, 1, key="user 199"), make_sequence(200, 1, key="user 0"))
    assert queue.first().sequence_id == 200, "what is known of the last is kept"
