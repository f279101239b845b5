"""How rank 0 watches the other ranks."""

from __future__ import annotations

import socket

from tinyvllm.distributed.ranks import Ranks


def test_a_watch_that_begins_after_the_end_is_over() -> None:
    """An engine that is closed at once closes its sockets before the thread that watches them has run."""
    link, other = socket.socketpair()
    link.close()
    other.close()
    ranks = Ranks.__new__(Ranks)
    ranks._sockets, ranks._closing, ranks.failure = [link], True, None
    ranks._watch()
