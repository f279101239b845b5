"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a conversation, so that their clients and agents work unchanged."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams
from tinyvllm.server.core.body import Body, honoured, limited, refused
from tinyvllm.server.core.context import Call
from tinyvllm.server.core.conversation import Blocks, Tools, Turn, begin, read_whole
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.params import formatted
from tinyvllm.server.core.prompts import Conversation
from tinyvllm.server.core.schema import Name
from tinyvllm.server.core.usage import ended, extras
from tinyvllm.server.http.stream import Wire, event, quote
from tinyvllm.text.parsing import Event

_CACHED = "not needed: prefixes are cached and found by their tokens"


class CacheControl(Body):
    """Where a client wants its prompt cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class _Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Body):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class TurnMessage(Body):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolDefinition(_Block):
    """A tool of the client's; tools that Anthropic runs itself have other types and are refused."""

    type: Literal["custom"] | None = None
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class Choice(Body):
    """Which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether to think, and for how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted", "full"] | None = None


class OutputFormat(Body):
    """What the answer must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(..., alias="schema")


class OutputConfig(Body):
    """Format and effort."""

    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(Body):
    """Who asks."""

    user_id: str | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: Name = honoured(..., example=None)
    messages: list[TurnMessage] = honoured(..., example=[{"role": "user", "content": "Hello"}], min_length=1)
    system: str | list[TextBlock] | None = honoured(example="Be brief.")
    tools: list[ToolDefinition] | None = honoured(example=[{"name": "look", "input_schema": {"type": "object"}}])
    tool_choice: Choice | None = honoured(example={"type": "none"})
    thinking: Thinking | None = honoured(example={"type": "disabled"})
    output_config: OutputConfig | None = honoured(example={"effort": "low"}, says="effort reaches the template as reasoning_effort")
    cache_control: CacheControl | None = limited(says=_CACHED, example={"type": "ephemeral"})
    speed: Literal["standard"] | None = limited(says="standard only", example="standard", beyond="fast")
    user_profile_id: str | None = limited(says="not used", example="a")
    workspace_id: str | None = limited(says="not used", example="a")


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int = honoured(..., example=4, ge=1)
    stop_sequences: list[str] | None = honoured(example=["\n"])
    stream: bool | None = honoured(example=False)
    temperature: float | None = honoured(example=0.5, ge=0, le=2)
    top_p: float | None = honoured(example=0.9, gt=0, le=1)
    top_k: int | None = honoured(example=5, ge=0)
    metadata: Metadata | None = limited(says="user_id is written to the access log", example={"user_id": "somebody"})
    service_tier: Literal["auto", "standard_only"] | None = limited(says="there is one tier", example="auto", beyond="fast")
    container: Any = refused("there are no containers", example="c")
    diagnostics: Any = refused("there are no diagnostics", example={"previous_message_id": None})
    inference_geo: Any = refused("the server is where it is", example="us")
    seed: int | None = honoured(example=7, says="not Anthropic's", ge=-(2**63), le=2**64 - 1)
    min_p: float | None = honoured(example=0.1, says="not Anthropic's", ge=0, le=1)
    priority: int | None = honoured(example=1, says="not Anthropic's", ge=-(2**31), le=2**31)
    cache_salt: Name | None = honoured(example="mine", says="not Anthropic's")
    deadline_ms: float | None = honoured(example=60000.0, says="not Anthropic's", gt=0, le=1e9)
    ttft_deadline_ms: float | None = honoured(example=60000.0, says="not Anthropic's", gt=0, le=1e9)
    receipt: bool | None = honoured(example=True, says="not Anthropic's")


async def answer(call: Call, body: MessagesRequest, wire: Wire) -> None:
    """The work of /v1/messages."""
    if body.metadata is not None and body.metadata.user_id is not None:
        call.record["user"] = body.metadata.user_id
    async with call.service.models.use(body.model) as (model, llm):
        turn = await _turn(call, body, llm, model)
        if body.stream:
            await _stream(turn, wire)
            return
        output = await turn.last()
        part = output.outputs[0]
        answered = read_whole(turn, part)
        content: list[dict[str, Any]] = []
        if answered.reasoning:
            content.append({"type": "thinking", "thinking": answered.reasoning, "signature": ""})
        if answered.content or not answered.calls:
            content.append({"type": "text", "text": answered.content})
        for one in answered.calls:
            content.append({"type": "tool_use", "id": one["id"], "name": one["name"], "input": json.loads(one["arguments"] or "{}")})
        ends = _ends(turn, part, bool(answered.calls))
        await wire.json({**_message(turn), "content": content, **ends, "usage": _usage(turn), **extras(output)})


async def count_tokens(call: Call, body: CountRequest, wire: Wire) -> None:
    """The work of /v1/messages/count_tokens."""
    async with call.service.models.use(body.model) as (model, llm):
        turn = await _turn(call, body, llm, model)
        await wire.json({"input_tokens": len(turn.prompt.token_ids)})


async def _turn(call: Call, body: CountRequest, llm: AsyncLLM, model: str) -> Turn:
    messages = [*_system(body), *(plain for message in body.messages for plain in _messages(message))]
    continued = body.messages[-1].role == "assistant"
    if continued and (not messages or not isinstance(messages[-1].get("content"), str) or messages[-1].get("tool_calls")):
        raise bad_field("messages", "messages: the last one is the assistant's, and only a text can be continued")
    conversation = Conversation(
        messages,
        template=call.service.config.chat_template,
        variables=_variables(body),
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )
    params = _params(llm, body) if isinstance(body, MessagesRequest) else llm.default_params
    return await begin(call, llm, model, conversation, _tools(body), params, body, reasoning=True)


def _variables(body: CountRequest) -> dict[str, Any]:
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config is not None else None
    return {"enable_thinking": thinks, **({"reasoning_effort": effort} if effort is not None else {})}


def _params(llm: AsyncLLM, body: MessagesRequest) -> SamplingParams:
    given = {name: value for name in ("temperature", "top_p", "top_k", "min_p", "seed") if (value := getattr(body, name)) is not None}
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        given["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None and body.output_config.format is not None:
        given["structured_outputs"] = formatted("json_schema", body.output_config.format.schema_)
    kind = "delta" if body.stream else "final_only"
    return replace(llm.default_params, **given, max_tokens=body.max_tokens, stop=body.stop_sequences, output_kind=kind)


def _tools(body: CountRequest) -> Tools:
    given = [
        {"type": "function", "function": {"name": t.name, "description": t.description or "", "parameters": t.input_schema}}
        for t in body.tools or []
    ]
    choice = body.tool_choice
    if choice is None:
        return Tools(given)
    if choice.type == "tool" and choice.name is None:
        raise bad_field("tool_choice.name", 'tool_choice: type "tool" needs the name of one')
    kind = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}[choice.type]
    return Tools(given, kind, choice.name if choice.type == "tool" else None, not choice.disable_parallel_tool_use)


def _system(body: CountRequest) -> list[dict[str, Any]]:
    if body.system is None:
        return []
    return [{"role": "system", "content": body.system if isinstance(body.system, str) else _joined(body.system)}]


def _joined(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _messages(message: TurnMessage) -> list[dict[str, Any]]:
    """One of Anthropic's messages as templates know them: results of tools are messages of their own, before what else was said."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    if message.role == "user" and any(isinstance(b, (ToolUseBlock, ThinkingBlock, RedactedBlock)) for b in blocks):
        raise bad_field("messages", "messages: only the assistant uses tools and thinks")
    if message.role == "assistant" and any(isinstance(b, ToolResultBlock) for b in blocks):
        raise bad_field("messages", "messages: results of tools are the user's")
    said: dict[str, Any] = {"role": message.role}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.input}} for b in blocks if isinstance(b, ToolUseBlock)
    ]
    thoughts = [b.thinking for b in blocks if isinstance(b, ThinkingBlock)]
    results = [_result(b) for b in blocks if isinstance(b, ToolResultBlock)]
    if calls:
        said["tool_calls"] = calls
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if texts or calls or not results:
        said["content"] = "\n".join(texts)
        return [*results, said]
    return results


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


def _message(turn: Turn) -> dict[str, Any]:
    return {"id": f"msg_{turn.call.name}", "type": "message", "role": "assistant", "model": turn.model}


def _usage(turn: Turn) -> dict[str, Any]:
    """Anthropic counts what was read from the cache apart."""
    count = turn.count
    return {
        "input_tokens": count.prompt - count.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": count.cached,
        "output_tokens": count.completion,
    }


def _ends(turn: Turn, part: CompletionOutput, called: bool) -> dict[str, Any]:
    reason, stop = ended(part)
    turn.call.record["finish_reason"] = reason
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


class _Events:
    """Blocks as Anthropic's events."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self._index = -1
        self._kind = ""

    def begin(self, kind: str, event_: Event) -> None:
        self._index += 1
        self._kind = kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "call":
            block = {"type": "tool_use", "id": event_.id, "name": event_.name, "input": {}}
        self._add("content_block_start", {"index": self._index, "content_block": block})

    def grow(self, text: str) -> None:
        kind, name = _DELTAS[self._kind]
        delta = f'{{"type":"{kind}","{name}":{quote(text)}}}'
        line = f'{{"type":"content_block_delta","index":{self._index},"delta":{delta}}}'
        self.chunks.append(f"event: content_block_delta\ndata: {line}\n\n".encode())

    def end(self) -> None:
        if self._kind == "reasoning":
            self._add("content_block_delta", {"index": self._index, "delta": {"type": "signature_delta", "signature": ""}})
        self._add("content_block_stop", {"index": self._index})

    def _add(self, name: str, body: dict[str, Any]) -> None:
        self.chunks.append(event({"type": name, **body}, name))

    @property
    def empty(self) -> bool:
        return self._index < 0


_DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json")}


async def _stream(turn: Turn, wire: Wire) -> None:
    events = _Events()
    blocks = Blocks(turn, events)
    final: RequestOutput | None = None
    begun = False
    wire.open()
    async with aclosing(turn.outputs()) as outputs:
        async for final in outputs:
            if not begun:
                begun = True
                message = {**_message(turn), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(turn)}
                events.chunks += [event({"type": "message_start", "message": message}, "message_start"), event({"type": "ping"}, "ping")]
            blocks.read(final.outputs[0])
            if events.chunks and final.outputs[0].finish_reason is None:
                await wire.write(b"".join(events.chunks))
                events.chunks.clear()
    assert final is not None, "the engine gave no last output"
    if events.empty:  # clients expect a block
        events.begin("content", Event("content"))
        events.end()
    turn.count.note(turn.call)
    ends = {"type": "message_delta", "delta": _ends(turn, final.outputs[0], bool(blocks.calls)), "usage": _usage(turn), **extras(final)}
    tail = [event(ends, "message_delta"), event({"type": "message_stop"}, "message_stop")]
    await wire.close(b"".join([*events.chunks, *tail]))
