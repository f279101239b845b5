"""The newest output of one request, handed from the thread that has it to the coroutine that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from tinyvllm.errors import TinyvllmError
from tinyvllm.request import RequestOutput


class Mailbox:
    """The newest output of one request. Made and used in the event loop of the request's caller only.

    One place rather than a queue: outputs are cumulative or can be joined, and a slow caller must not make them pile up. The engine knows
    the request by `key`, which is never reused: `name` is the caller's request id, free for another request while the engine still
    ends the old one. `joins` is for outputs that are deltas, none of which may be lost.
    """

    def __init__(self, name: str, key: str, joins: bool) -> None:
        self.name = name
        self.key = key
        self._joins = joins
        self.loop = asyncio.get_running_loop()
        self.over = False
        self._arrived = asyncio.Event()
        self._newest: RequestOutput | BaseException | None = None

    def put(self, result: RequestOutput | BaseException) -> None:
        if not self.over:
            before = self._newest
            if self._joins and isinstance(result, RequestOutput) and isinstance(before, RequestOutput):
                result = before.joined(result)
            self._newest = result
            self.over = isinstance(result, BaseException) or result.finished
            self._arrived.set()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What is put in, until the last one; raises what ended the request."""
        finished = False
        while not finished:
            output = await self.take()
            finished = output.finished
            yield output

    async def take(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        result, self._newest = self._newest, None
        assert result is not None, "a mailbox woke its reader without a result"
        if isinstance(result, BaseException):
            raise result
        return result

    def result(self, output: RequestOutput) -> RequestOutput | BaseException:
        """What the caller gets for an output: the output under its own id, or the exception that ended the request."""
        if output.failure is not None:
            return self.in_callers_words(output.failure)
        return replace(output, request_id=self.name)

    def in_callers_words(self, error: TinyvllmError) -> TinyvllmError:
        """The caller knows its request id and not the key."""
        error.args = (str(error).replace(self.key, self.name), *error.args[1:])
        return error


Delivery = tuple[Mailbox, RequestOutput | BaseException]


def deliver(results: Sequence[Delivery]) -> list[Mailbox]:
    """Put results into their mailboxes, from any thread: one wake-up per event loop, for any number of requests.

    Returns the mailboxes of loops that were closed, whose callers are gone.
    """
    loops: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for mailbox, result in results:
        loops.setdefault(mailbox.loop, []).append((mailbox, result))
    gone: list[Mailbox] = []
    for loop, own in loops.items():
        try:
            loop.call_soon_threadsafe(_put_all, own)
        except RuntimeError:
            gone += [mailbox for mailbox, _ in own]
    return gone


def _put_all(results: Sequence[Delivery]) -> None:
    for mailbox, result in results:
        mailbox.put(result)
