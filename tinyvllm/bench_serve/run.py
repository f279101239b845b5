"""Runs a load against a server: waits until it is ready, sends each request at its arrival, and notes when it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinyvllm.bench_serve.client import Stream
from tinyvllm.bench_serve.workload import Request
from tinyvllm.errors import TinyvllmError

READY_PAUSE, MAX_READY_PAUSE = 0.25, 5.0  # seconds between two attempts
_REFUSED = (401, 403)  # of a server that is up and will not change its answer


class Poster(Protocol):
    """What sends a request: the client, or a test's."""

    async def post(self, path: str, body: bytes) -> Stream: ...


class Getter(Protocol):
    url: str

    async def get(self, path: str) -> Stream: ...


@dataclass(frozen=True)
class Timing:
    """The clock that a load runs by."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class Done:
    """What became of a request. `began` is its arrival; with a limit of concurrency the time at which its turn came."""

    request: Request
    began: float
    stream: Stream


@dataclass(frozen=True)
class Load:
    """The requests in their order, and the seconds until the end of the last."""

    seconds: float
    done: tuple[Done, ...]


async def run_load(
    client: Poster,
    path: str,
    work: Sequence[Request],
    concurrency: int | None,
    on_done: Callable[[Done], None] = lambda done: None,
    timing: Timing = Timing(),
) -> Load:
    """All requests, each at its arrival; at most `concurrency` at the same time, or as many as there are.

    A request counts from its arrival, also where it could only be sent later, so that a client that is late makes no server look fast.
    With a limit of concurrency it counts from the end of its wait for the limit, as vLLM's benchmark counts.
    """
    start = timing.now()
    gate = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)

    async def one(request: Request) -> Done:
        async with gate:
            began = start + request.arrival if concurrency is None else timing.now()
            done = Done(request, began, await client.post(path, request.body))
        on_done(done)
        return done

    running = []
    async with asyncio.TaskGroup() as tasks:
        for request in work:
            wait = start + request.arrival - timing.now()
            if wait > 0:
                await timing.sleep(wait)
            running.append(tasks.create_task(one(request)))
    return Load(timing.now() - start, tuple(task.result() for task in running))


async def wait_until_ready(
    client: Getter, seconds: float, timing: Timing = Timing(), tell: Callable[[str], None] = lambda text: None
) -> str | None:
    """The first model that the server lists, None if it has no list. TinyvllmError if it does not answer within `seconds`, or refuses.

    `tell` gets a line where the server is not ready at once.
    """
    end, pause, told = timing.now() + seconds, READY_PAUSE, False
    while True:
        answer = await client.get("/v1/models")
        if answer.status == 200 and answer.error is None:
            return _first_model(answer.body)
        if answer.status in _REFUSED:
            raise TinyvllmError(f"bench serve: {client.url} refuses: {answer.error}; give --api-key")
        if answer.status in (404, 405):
            return None
        if timing.now() + pause > end:
            raise TinyvllmError(
                f"bench serve: {client.url} was not ready within {seconds:g} s, its last answer: {answer.error}; start a server, or give "
                "--base-url and --ready-check-timeout-sec"
            )
        if not told:
            tell(f"waiting up to {seconds:g} s for {client.url}: {answer.error}")
            told = True
        await timing.sleep(pause)
        pause = min(2 * pause, MAX_READY_PAUSE)


def _first_model(body: bytes) -> str | None:
    try:
        name = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None
