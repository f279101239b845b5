"""/v1/segments: pieces of context that are computed once and kept in the cache until they are released."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.engine.api import AsyncLLM, Segment, SegmentRoomError
from tinyvllm.server.core.body import Body, honoured, limited
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import conversation_of, encode_start
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.limits import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TOKEN_IDS, MAX_TOOLS
from tinyvllm.server.core.params import request_options
from tinyvllm.server.core.prompts import check_size
from tinyvllm.server.core.response import ResponseWriter, json_response
from tinyvllm.server.core.schema import ACCESS_LOG_ONLY, DEFAULT_MODEL, Message, Name, Tool
from tinyvllm.server.core.segment_store import RegisteredSegment

_TOKEN_IDS = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
_MESSAGES_ONLY = ("tools", "documents", "chat_template_kwargs")
_MESSAGES_ONLY_NOTE = "requires messages; must be the same in the conversations that use the segment"


class SegmentRequest(Body):
    """POST /v1/segments: a text, token ids, or the first messages of conversations."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    text: str | None = honoured(example="Once upon a time")
    token_ids: _TOKEN_IDS | None = honoured(example=[5, 6, 7])
    messages: list[Message] | None = honoured(example=[{"role": "system", "content": "Be kind."}], min_length=1, max_length=MAX_MESSAGES)
    after: Name | None = honoured(says="id of the segment that this one follows; it must have the same cache_salt")
    cache_salt: Name | None = honoured(example="mine")
    priority: int | None = honoured(example=1, ge=-(2**31), le=2**31)
    tools: list[Tool] | None = limited(says=_MESSAGES_ONLY_NOTE, example=None, max_length=MAX_TOOLS)
    documents: list[dict[str, Any]] | None = limited(says=_MESSAGES_ONLY_NOTE, max_length=MAX_DOCUMENTS)
    chat_template_kwargs: dict[str, Any] | None = limited(says=_MESSAGES_ONLY_NOTE)
    user: str | None = limited(says=ACCESS_LOG_ONLY, example="user-1")

    @model_validator(mode="after")
    def _check_input(self) -> SegmentRequest:
        if sum(value is not None for value in (self.text, self.token_ids, self.messages)) != 1:
            raise PydanticCustomError("text", "text: send exactly one of text, token_ids and messages")
        if self.messages is None:
            for name in _MESSAGES_ONLY:
                if getattr(self, name) is not None:
                    raise PydanticCustomError(name, f"{name}: requires messages")
        return self


async def register(context: RequestContext, body: SegmentRequest, writer: ResponseWriter) -> None:
    """Compute a segment and keep it."""
    context.service.models.refuse_adapter(body.model, "segments are computed")
    store = context.service.segments
    async with context.service.models.use(body.model) as (model, llm):
        after = store.use(context.owner, context, [body.after], llm, body.cache_salt, "after")[0] if body.after is not None else None
        if body.messages is not None:
            registered = await _register_messages(context, body, llm, model, after)
        else:
            piece = body.text if body.text is not None else body.token_ids or []
            if isinstance(piece, str):
                check_size(llm, piece, "text")
            segment = await _compute(context, body, llm, piece, after.segment if after else None)
            registered = RegisteredSegment(segment, llm, model, context.owner, after, body.cache_salt)
    store.add(registered)
    context.count_tokens(registered.segment.num_tokens)
    context.record |= {"segment": registered.id, "prompt_tokens": registered.segment.end}
    await writer.json(registered.description())


async def _register_messages(
    context: RequestContext, body: SegmentRequest, llm: AsyncLLM, model: str, after: RegisteredSegment | None
) -> RegisteredSegment:
    if after is not None and after.messages is None:
        raise bad_field("after", f"after: segment {after.id} holds a text, and messages can follow only messages")
    own = conversation_of(context.service.config, context.data, body.chat_template_kwargs or {})
    before: list[Mapping[str, Any]] = list(after.messages or ()) if after else []
    prefix = (after.text or "") if after else ""
    conversation = replace(own, messages=[*before, *own.messages], add_generation_prompt=False, prefix=prefix)
    prompt = await encode_start(llm, conversation, context.data.get("tools") or None)
    token_ids, parent = prompt.encoded.token_ids, None
    if after is not None and token_ids[: after.segment.end] == after.segment.context:
        token_ids, parent = token_ids[after.segment.end :], after.segment
    segment = await _compute(context, body, llm, token_ids, parent)
    messages, text = prompt.conversation.messages, prompt.encoded.text
    return RegisteredSegment(segment, llm, model, context.owner, after, body.cache_salt, messages, text)


async def _compute(context: RequestContext, body: SegmentRequest, llm: AsyncLLM, piece: str | list[int], after: Segment | None) -> Segment:
    options = request_options(context, body)
    try:
        return await llm.segment(piece, after, cache_salt=options.cache_salt, options=options)
    except SegmentRoomError as error:
        raise Failure(409, str(error), code="no_room") from error


async def list_segments(request: Request) -> Response:
    """The segments of this key, oldest first, and their total size; blocks shared by several count once."""
    context = RequestContext.of(request)
    owned = context.service.segments.owned_by(context.owner)
    blocks = {(id(one.llm), block): one.segment.segments.block_bytes for one in owned for block in one.segment.table}
    data = [one.description() for one in owned]
    return json_response({"object": "list", "data": data, "blocks": len(blocks), "bytes": sum(blocks.values())})


async def get_segment(request: Request) -> Response:
    context = RequestContext.of(request)
    return json_response(context.service.segments.get(context.owner, request.path_params["name"]).description())


async def release_segment(request: Request) -> Response:
    """Free the blocks of a segment, unless it is in use."""
    context = RequestContext.of(request)
    registered = context.service.segments.release(context.owner, request.path_params["name"], context.service.running)
    context.record["segment"] = registered.id
    return json_response({"id": registered.id, "object": "segment", "deleted": True})
