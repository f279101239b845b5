"""/v1/chunks: pieces of context that are computed once and held until they are released, and prompts that begin with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.engine.segments import Segment, SegmentRoomError
from tinyvllm.request import RequestOptions
from tinyvllm.server.api.chat import conversation_of
from tinyvllm.server.api.probes import reply
from tinyvllm.server.core.body import Body, honoured, limited
from tinyvllm.server.core.chunk_store import Held
from tinyvllm.server.core.context import CALL, Call
from tinyvllm.server.core.conversation import plain
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.prompts import Conversation, check_size, encode_beginning
from tinyvllm.server.core.schema import ONE_MODEL, Message, Name, Tool
from tinyvllm.server.http.stream import Wire

_IDS = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class ChunkRequest(Body):
    """POST /v1/chunks: a text, token ids, or the first messages of conversations."""

    model: Name | None = honoured(says=ONE_MODEL)
    text: str | None = honoured(example="Once upon a time")
    token_ids: _IDS | None = honoured(example=[5, 6, 7])
    messages: list[Message] | None = honoured(example=[{"role": "system", "content": "Be kind."}], min_length=1)
    after: Name | None = honoured(says="id of the chunk that this one stands behind; with the same cache_salt")
    cache_salt: Name | None = honoured(example="mine")
    priority: int | None = honoured(example=1, ge=-(2**31), le=2**31)
    tools: list[Tool] | None = limited(says="with messages only, as the conversations will have them", example=None)
    documents: list[dict[str, Any]] | None = limited(says="with messages only, as the conversations will have them")
    chat_template_kwargs: dict[str, Any] | None = limited(says="with messages only, as the conversations will have them")
    user: str | None = limited(says="written to the access log, nothing else", example="somebody")

    @model_validator(mode="after")
    def _one(self) -> ChunkRequest:
        if sum(given is not None for given in (self.text, self.token_ids, self.messages)) != 1:
            raise PydanticCustomError("text", "text: give one of text, token_ids and messages")
        if self.messages is None:
            for name in ("tools", "documents", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise PydanticCustomError(name, f"{name}: means something with messages only")  # type: ignore[arg-type]
        return self


async def register(call: Call, body: ChunkRequest, wire: Wire) -> None:
    """Compute a piece of context and hold it."""
    async with call.service.models.use(body.model) as (model, llm):
        after = call.service.chunks.use(call, [body.after], llm, body.cache_salt, "after")[0] if body.after is not None else None
        if body.messages is not None:
            held = await _conversation(call, body, llm, model, after)
        else:
            piece = body.text if body.text is not None else body.token_ids or []
            if isinstance(piece, str):
                check_size(llm, piece, "text")
            held = Held(await _held(call, body, llm, piece, after.chunk if after else None), llm, model, _owner(call), after)
    call.service.chunks.add(held)
    call.tokens = held.chunk.num_tokens
    call.record |= {"chunk": held.id, "prompt_tokens": held.chunk.end}
    await wire.json(held.told())


async def _conversation(call: Call, body: ChunkRequest, llm: AsyncLLM, model: str, after: Held | None) -> Held:
    if after is not None and after.messages is None:
        raise bad_field("after", f"after: chunk {after.id} holds a text, and messages stand behind messages only")
    own = conversation_of(call, call.data, body.chat_template_kwargs or {})
    before: list[Mapping[str, Any]] = list(after.messages or ()) if after else []
    begins = (after.text or "") if after else ""
    conversation: Conversation = replace(own, messages=[*before, *own.messages], add_generation_prompt=False, begins=begins)
    conversation = plain(conversation, call.data.get("tools") or None)
    encoded = await encode_beginning(llm, conversation)
    ids, behind = encoded.token_ids, None
    if after is not None and ids[: after.chunk.end] == after.chunk.context:
        ids, behind = ids[after.chunk.end :], after.chunk
    chunk = await _held(call, body, llm, ids, behind)
    return Held(chunk, llm, model, _owner(call), after, conversation.messages, encoded.text)


async def _held(call: Call, body: ChunkRequest, llm: AsyncLLM, piece: str | list[int], after: Segment | None) -> Segment:
    on = RequestOptions(body.priority or 0, key=_owner(call).name)
    try:
        return await llm.segment(piece, after, cache_salt=body.cache_salt, options=on)
    except SegmentRoomError as error:
        raise Failure(409, str(error), code="no_room") from error


def _owner(call: Call) -> Key:
    assert call.key is not None, "the door lets nobody in without a key, if only that of nobody"
    return call.key


async def listed(request: Request) -> Response:
    """The chunks of this key, the oldest first, and what they hold together, blocks of several once."""
    call: Call = request.scope[CALL]
    held = call.service.chunks.of(call)
    blocks = {(id(h.llm), block): h.chunk.segments.block_bytes for h in held for block in h.chunk.table}
    return reply({"object": "list", "data": [h.told() for h in held], "blocks": len(blocks), "bytes": sum(blocks.values())})


async def one(request: Request) -> Response:
    call: Call = request.scope[CALL]
    return reply(call.service.chunks.one(call, request.path_params["name"]).told())


async def release(request: Request) -> Response:
    """Give the blocks of a chunk up, unless it is in use."""
    call: Call = request.scope[CALL]
    held = call.service.chunks.release(call, request.path_params["name"])
    call.record["chunk"] = held.id
    return reply({"id": held.id, "object": "chunk", "deleted": True})
