"""The context segments that clients have registered: the owner of each, the order they follow each other, and the requests that use them.

A key sees only its own segments; for another key they do not exist. Segments live as long as the engine that holds their blocks: when a
model is unloaded, its segments are dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import field
from typing import Any
from weakref import WeakSet

from tinyvllm.engine.api import AsyncLLM, Segment
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.models import Models


@dataclass(eq=False)
class RegisteredSegment:
    """A segment under the id that its owner uses. `messages` are those of its whole context; None for a text or token ids."""

    segment: Segment
    llm: AsyncLLM
    model: str
    owner: Key
    after: RegisteredSegment | None
    cache_salt: str | None = None  # as the request named it; the segment's own also has the part of the key
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None  # of these messages, as rendered by the chat template
    id: str = field(default_factory=lambda: f"segment-{secrets.token_hex(8)}")
    created: int = field(default_factory=lambda: int(time.time()))
    users: WeakSet[Any] = field(default_factory=WeakSet)  # requests

    def description(self) -> dict[str, Any]:
        """The segment as the API shows it; blocks and bytes exclude those of the segment before it."""
        segment = self.segment
        return {
            "id": self.id,
            "object": "segment",
            "created": self.created,
            "model": self.model,
            "after": self.after.id if self.after else None,
            "kind": "text" if self.messages is None else "messages",
            "tokens": segment.end - (self.after.segment.end if self.after else 0),
            "context_tokens": segment.end,
            "blocks": segment.blocks,
            "bytes": segment.bytes,
        }


class SegmentStore:
    """The segments of one server. Belongs to its event loop."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._segments: dict[str, RegisteredSegment] = {}

    def add(self, registered: RegisteredSegment) -> None:
        self._segments[registered.id] = registered

    def owned_by(self, owner: Key) -> list[RegisteredSegment]:
        """The segments of a key, oldest first."""
        loaded = self._models.loaded()
        self._segments = {name: one for name, one in self._segments.items() if loaded.get(one.model) is one.llm}
        return [one for one in self._segments.values() if one.owner is owner]

    def get(self, owner: Key, name: str, param: str | None = None) -> RegisteredSegment:
        """The segment with this id. Failure 404 if the key has none."""
        for registered in self.owned_by(owner):
            if registered.id == name:
                return registered
        text = f"there is no segment {name!r:.80}: it was released, its model was unloaded, or this key never registered it"
        raise Failure(404, text, param=param, code="segment_not_found")

    def use(
        self, owner: Key, user: object, names: Sequence[str], llm: AsyncLLM, cache_salt: str | None, param: str = "segments"
    ) -> list[RegisteredSegment]:
        """The segments with these ids, in use until the request `user` ends.

        Failure for ids that do not exist, belong to another model, or have another cache_salt.
        """
        segments = [self.get(owner, name, param) for name in names]
        for registered in segments:
            if registered.llm is not llm:
                raise bad_field(param, f"{param}: segment {registered.id} belongs to model {registered.model}")
            if registered.cache_salt != cache_salt:
                text = f"{param}: segment {registered.id} was registered with a different cache_salt; send the same one"
                raise bad_field("cache_salt", text)
        for registered in segments:
            registered.users.add(user)
        return segments

    def used_by_body(self, owner: Key, user: object, body: Any, llm: AsyncLLM) -> list[RegisteredSegment]:
        """The segments that a body names, in use until the request `user` ends."""
        if not body.segments:
            return []
        if body.truncate_prompt_tokens is not None:
            text = "truncate_prompt_tokens: cannot be combined with segments, which it would cut off first"
            raise bad_field("truncate_prompt_tokens", text)
        return self.use(owner, user, body.segments, llm, body.cache_salt)

    def release(self, owner: Key, name: str, running: Set[Any]) -> RegisteredSegment:
        """Free the blocks of a segment. Failure 409 while running requests use it, or other segments follow it."""
        registered = self.get(owner, name)
        if users := len(registered.users & running):
            text = f"segment {registered.id} is in use by {users} request{'s'[: users > 1]}; release it after they finish"
            raise Failure(409, text, code="segment_in_use")
        if followers := [other.id for other in self._segments.values() if other.after is registered]:
            text = f"segment {registered.id} is followed by other segments; release {', '.join(followers)} first"
            raise Failure(409, text, code="segment_in_use")
        del self._segments[registered.id]
        registered.segment.release()
        return registered


def prefix_of(segments: Sequence[RegisteredSegment], body: Any) -> list[int] | None:
    """Token ids of the segments that a body's text prompts start with; None without segments."""
    if segments and body.add_special_tokens is not None:
        text = "add_special_tokens: cannot be combined with segments, whose start was fixed at registration"
        raise bad_field("add_special_tokens", text)
    return _joined_token_ids(segments) if segments else None


def _joined_token_ids(segments: Sequence[RegisteredSegment]) -> list[int]:
    """Token ids of consecutive segments, including the context that the first one was registered after.

    Failure if a segment of messages does not follow the segment that it was registered after.
    """
    ids, in_order = segments[0].segment.context, True
    for before, following in zip(segments, segments[1:]):
        if in_order and following.after is before:
            ids = following.segment.context
            continue
        in_order = False
        _check_follows(following, before)
        ids = ids + following.segment.token_ids
    return ids


def last_of_messages(segments: Sequence[RegisteredSegment]) -> RegisteredSegment:
    """The last segment, whose messages include those of all others. Failure for segments of text, or in another order than registered."""
    for registered in segments:
        if registered.messages is None:
            text = f"segments: {registered.id} holds no messages; register messages, or send it to /v1/completions"
            raise bad_field("segments", text)
    for before, following in zip(segments, segments[1:]):
        if following.after is not before:
            _check_follows(following, before)
    return segments[-1]


def _check_follows(following: RegisteredSegment, before: RegisteredSegment) -> None:
    if following.messages is not None:
        position = f"must directly follow {following.after.id}" if following.after else "must be the first segment"
        raise bad_field("segments", f"segments: segment {following.id} {position}, but it follows {before.id}")
