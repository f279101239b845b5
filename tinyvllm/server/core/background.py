"""Answers of /v1/responses that run in the background: the store has their state, which clients poll, and they can be cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinyvllm.server.core.failures import Failure, bad_field, busy
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.limits import MAX_BACKGROUND
from tinyvllm.server.core.local_call import call_until_accepted
from tinyvllm.server.core.response_store import ResponseStore

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PATH = "/v1/responses"
_ACTIVE = ("queued", "in_progress")


class BackgroundResponses:
    """The answers of one server that run in the background, at most MAX_BACKGROUND of a key. `app` gets their requests."""

    def __init__(self, store: ResponseStore):
        self.app: ASGIApp | None = None
        self._store = store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, Key] = {}

    @property
    def running(self) -> int:
        """The number of answers that wait or run."""
        return len(self._tasks)

    def start(
        self, owner: Key, response: Mapping[str, Any], input_items: Sequence[Mapping[str, Any]], request: Mapping[str, Any], priority: int
    ) -> None:
        """Keep a queued response, and answer the body `request` in its place. Failure 429 if the key has too many that run."""
        running = sum(one is owner for one in self._owners.values())
        if running >= MAX_BACKGROUND:
            raise busy(f"{running} responses of this key run in the background, the limit is {MAX_BACKGROUND}", 1.0)
        if not self._store.add(owner, response, input_items, ()):
            raise bad_field("input", "input: is too long to be kept, as background requires", "too_long")
        id_ = str(response["id"])
        task = asyncio.create_task(self._run(owner, id_, json.dumps(request).encode(), priority))
        self._owners[id_], self._tasks[id_] = owner, task
        task.add_done_callback(lambda _: self._forget(id_))  # also of a task that is cancelled before it has started

    def cancel(self, owner: Key, id_: str) -> Mapping[str, Any]:
        """End a response that runs; a finished one is unchanged. Failure 404 if there is none, 400 for one of the foreground."""
        response = self._store.get(owner, id_).response
        if not response["background"]:
            raise Failure(400, "Cannot cancel a synchronous response.", code="invalid_value")
        if is_active(response):
            self._store.update(id_, status="cancelled")
            self._tasks[id_].cancel()
        return self._store.get(owner, id_).response

    def delete(self, owner: Key, id_: str) -> None:
        """Forget a response, which ends if it runs. Failure 404 if there is none."""
        self._store.delete(owner, id_)
        if id_ in self._tasks:
            self._tasks[id_].cancel()

    def _forget(self, id_: str) -> None:
        del self._tasks[id_], self._owners[id_]

    async def _run(self, owner: Key, id_: str, body: bytes, priority: int) -> None:
        assert self.app is not None, "create_app sets it"
        try:
            self._store.update(id_, status="in_progress")
            status, _, raw = await call_until_accepted(self.app, PATH, body, owner, priority, lambda: self._store.has(id_))
            answer = json.loads(raw)
            if status != 200:
                self._store.update(id_, status="failed", error={"code": answer["error"]["code"], "message": answer["error"]["message"]})
            elif not self._store.replace(id_, answer["id"]):
                self._store.update(id_, status="failed", error={"code": "too_long", "message": "the answer is too long to be kept"})
        except Exception as error:  # noqa: BLE001  whatever ends an answer is shown in it, and ends nothing else
            message = f"internal error ({type(error).__name__})"
            self._store.update(id_, status="failed", error={"code": "internal_error", "message": message})


def is_active(response: Mapping[str, Any]) -> bool:
    """Whether a response waits or runs, so that it has no output yet."""
    return response["status"] in _ACTIVE
