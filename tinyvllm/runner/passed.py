"""What has passed the stages before the last one of a pipeline, in the order in which its ranks do it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tinyvllm.runner.kv import KVPool

Message = dict[str, Any]


class PassedMessages:
    """The messages that a rank of the last stage gets from the stage before. All ranks of the stage take the same steps in the same order,
    that of rank 0: their kernels meet.
    """

    def __init__(self, receive: Callable[[], Message], do: Callable[[Message], None]):
        """`do` is what a message that is not a step asks for."""
        self._receive, self._do = receive, do
        self._waiting: deque[Message] = deque()  # that have come before they were wanted

    def take(self, number: int, aside: bool) -> Message:
        """The message of a step. One `aside` passes those before it, which stay as they are; any other is the next one. What was announced
        before that, and is no step, is done.
        """
        if aside:
            while (message := self._receive()).get("do") != "step" or message["number"] != number:
                self._waiting.append(message)
            return message
        while (message := self._waiting.popleft() if self._waiting else self._receive())["do"] != "step":
            self._do(message)
        return message


def copy_blocks(pool: KVPool, message: Message) -> None:
    """Do the copies of a message."""
    pool.copy([tuple(pair) for pair in message["pairs"]])
