"""The finished answers of /v1/responses that clients continue by previous_response_id, in memory. A key sees only its own."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.limits import MAX_STORED_AGE, MAX_STORED_BYTES, MAX_STORED_KEY_BYTES, MAX_STORED_RESPONSES


@dataclass(frozen=True)
class StoredResponse:
    """One answer: the response object, the items of its request, and the messages of the conversation with the answer."""

    response: Mapping[str, Any]
    input_items: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]
    size: int  # bytes of all of it as JSON
    owner: Key
    stored: float  # time.monotonic

    @property
    def id(self) -> str:
        return str(self.response["id"])


class ResponseStore:
    """Answers by id, the oldest first. Bounded in number and bytes for each key, in bytes for all, and in age."""

    def __init__(self, enabled: bool = True, clock: Callable[[], float] = time.monotonic):
        self.enabled = enabled
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._clock = clock

    def __len__(self) -> int:
        return len(self._responses)

    def add(
        self, owner: Key, response: Mapping[str, Any], input_items: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Keep an answer; the oldest ones make room. False for one that alone is more than a key may keep."""
        size = len(json.dumps([response, input_items, messages]))
        if size > MAX_STORED_KEY_BYTES:
            return False
        stored = StoredResponse(response, input_items, messages, size, owner, self._clock())
        self._responses[stored.id] = stored
        self._drop_old()
        return True

    def get(self, owner: Key, id_: str, status: int = 404, param: str | None = None) -> StoredResponse:
        """The answer with this id. Failure for one that does not exist, has expired, or belongs to another key."""
        self._drop_old()
        stored = self._responses.get(id_)
        if stored is None or stored.owner is not owner:
            kept = f"The server keeps the last {MAX_STORED_RESPONSES} of each key for {MAX_STORED_AGE // 3600} hours."
            kept = kept if self.enabled else "The server keeps no answers (--no-store)."
            text = f"Response with id '{id_[:100]}' not found. {kept}"
            raise Failure(status, text, param=param, code="previous_response_not_found" if param else "not_found")
        return stored

    def has(self, id_: str) -> bool:
        """Whether an answer is still kept."""
        return id_ in self._responses

    def update(self, id_: str, **fields: Any) -> None:
        """Change fields of a response object, if it is still kept."""
        if (stored := self._responses.get(id_)) is not None:
            self._responses[id_] = replace(stored, response={**stored.response, **fields})

    def replace(self, id_: str, finished: str) -> bool:
        """Put the answer `finished` in the place of a response of the background, under its id. False if `finished` is not kept."""
        answer, place = self._responses.pop(finished, None), self._responses.get(id_)
        if answer is None:
            return False
        if place is not None:
            head = {name: place.response[name] for name in ("id", "created_at", "background")}
            self._responses[id_] = replace(answer, response={**answer.response, **head})
        return True

    def delete(self, owner: Key, id_: str) -> None:
        """Forget an answer; Failure 404 if there is none. Answers that continue it hold its text, too, and stay."""
        del self._responses[self.get(owner, id_).id]

    def _drop_old(self) -> None:
        oldest = self._clock() - MAX_STORED_AGE
        counts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        total = 0
        for stored in reversed(list(self._responses.values())):
            name = stored.owner.name
            counts[name] = counts.get(name, 0) + 1
            sizes[name] = sizes.get(name, 0) + stored.size
            total += stored.size
            too_many = counts[name] > MAX_STORED_RESPONSES or sizes[name] > MAX_STORED_KEY_BYTES or total > MAX_STORED_BYTES
            if too_many or stored.stored < oldest:
                del self._responses[stored.id]
                counts[name] -= 1
                sizes[name] -= stored.size
                total -= stored.size
