"""The chunks that clients have registered: who owns each, what stands behind what, and which requests use it. Knows no HTTP.

A key knows its own chunks only; to everybody else they are not there. Chunks go with the engine that holds them: when a model is unloaded
its chunks are forgotten.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.engine.segments import Segment
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.prompts import Conversation

if TYPE_CHECKING:
    from tinyvllm.server.core.context import Call


@dataclass(eq=False)
class Held:
    """A chunk under the id by which its owner knows it. `messages` are those of its whole context, None of a text or token ids."""

    chunk: Segment
    llm: AsyncLLM
    model: str
    owner: Key
    after: Held | None
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None  # of these messages, as the chat template writes them
    id: str = field(default_factory=lambda: f"chunk-{secrets.token_hex(8)}")
    created: int = field(default_factory=lambda: int(time.time()))
    users: WeakSet[Call] = field(default_factory=WeakSet)

    def told(self) -> dict[str, Any]:
        """What the API says of it; blocks and bytes are those beyond the chunk before it."""
        chunk = self.chunk
        return {
            "id": self.id,
            "object": "chunk",
            "created": self.created,
            "model": self.model,
            "after": self.after.id if self.after else None,
            "kind": "text" if self.messages is None else "messages",
            "tokens": chunk.end - (self.after.chunk.end if self.after else 0),
            "context_tokens": chunk.end,
            "blocks": chunk.blocks,
            "bytes": chunk.bytes,
        }


class ChunkStore:
    """Those of one server. Belongs to its event loop."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, held: Held) -> None:
        self._held[held.id] = held

    def of(self, call: Call) -> list[Held]:
        """Those of whoever asks, the oldest first."""
        loaded = call.service.models.loaded()
        self._held = {name: held for name, held in self._held.items() if loaded.get(held.model) is held.llm}
        return [held for held in self._held.values() if held.owner is call.key]

    def one(self, call: Call, name: str, param: str | None = None) -> Held:
        """The chunk of an id. Failure 404 where whoever asks has none of this id."""
        for held in self.of(call):
            if held.id == name:
                return held
        text = f"there is no chunk {name!r:.80}: it was released, or never registered with this key, or went with a model that was unloaded"
        raise Failure(404, text, param=param, code="chunk_not_found")

    def use(self, call: Call, names: Sequence[str], llm: AsyncLLM, cache_salt: str | None, param: str = "chunks") -> list[Held]:
        """The chunks of these ids, in use until the call is over. Failure for those that are not there, or for others than this request."""
        found = [self.one(call, name, param) for name in names]
        for held in found:
            if held.llm is not llm:
                raise bad_field(param, f"{param}: chunk {held.id} is of model {held.model}")
            if held.chunk.cache_salt != cache_salt:
                raise bad_field("cache_salt", f"{param}: chunk {held.id} was registered with another cache_salt: send the same")
        for held in found:
            held.users.add(call)
        return found

    def release(self, call: Call, name: str) -> Held:
        """Give a chunk's blocks up. Failure 409 while requests use it or others stand behind it."""
        held = self.one(call, name)
        if users := len(held.users & call.service.running):
            text = f"chunk {held.id} is in use by {users} request{'s'[: users > 1]}: try again when nothing of that runs any more"
            raise Failure(409, text, code="chunk_in_use")
        if behind := [other.id for other in self._held.values() if other.after is held]:
            raise Failure(409, f"chunk {held.id} has others behind it: release {', '.join(behind)} first", code="chunk_in_use")
        del self._held[held.id]
        held.chunk.release()
        return held


def head_of(call: Call, llm: AsyncLLM, body: Any) -> list[int] | None:
    """Token ids of the chunks that a body's prompts begin with, None where it names none."""
    found = _named(call, llm, body)
    if found and body.add_special_tokens is not None:
        raise bad_field("add_special_tokens", "add_special_tokens: not with chunks, whose beginning was made when they were registered")
    return _context(found) if found else None


def begun(call: Call, llm: AsyncLLM, body: Any, conversation: Conversation) -> Conversation:
    """A conversation behind the messages of the chunks that a body names."""
    found = _named(call, llm, body)
    if not found:
        return conversation
    if conversation.add_special_tokens:
        raise bad_field("add_special_tokens", "add_special_tokens: not with chunks, which begin as the template writes them")
    last = _last_of_messages(found)
    return replace(conversation, messages=[*(last.messages or ()), *conversation.messages], begins=last.text or "")


def _named(call: Call, llm: AsyncLLM, body: Any) -> list[Held]:
    if not body.chunks:
        return []
    if body.truncate_prompt_tokens is not None:
        raise bad_field("truncate_prompt_tokens", "truncate_prompt_tokens: not with chunks, which it would cut off first")
    return call.service.chunks.use(call, body.chunks, llm, body.cache_salt)


def _context(found: Sequence[Held]) -> list[int]:
    """Token ids of chunks one behind the other; the first brings what it was registered behind. Failure where messages stand elsewhere."""
    ids, straight = found[0].chunk.context, True
    for before, held in zip(found, found[1:]):
        if straight and held.after is before:
            ids = held.chunk.context
            continue
        straight = False
        _refuse_elsewhere(held, before)
        ids = ids + held.chunk.token_ids
    return ids


def _last_of_messages(found: Sequence[Held]) -> Held:
    """The last chunk, which has the messages of all. Failure for what are none, or stand in another order than they were registered in."""
    for held in found:
        if held.messages is None:
            raise bad_field("chunks", f"chunks: {held.id} is no piece of a conversation: register messages, or send it to /v1/completions")
    for before, held in zip(found, found[1:]):
        if held.after is not before:
            _refuse_elsewhere(held, before)
    return found[-1]


def _refuse_elsewhere(held: Held, before: Held) -> None:
    if held.messages is not None:
        stands = f"behind {held.after.id}" if held.after else "at the beginning"
        raise bad_field("chunks", f"chunks: the messages of {held.id} stand {stands}, and not behind {before.id}")
