"""POST /v1/responses: OpenAI's newer form of a conversation. Stateless: the whole conversation is sent each time."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.request import MAX_LOGPROBS, CompletionOutput, RequestOutput, SamplingParams
from tinyvllm.server.core.body import Body, honoured, limited, refused
from tinyvllm.server.core.context import Call
from tinyvllm.server.core.conversation import Blocks, Tools, Turn, begin, read_whole
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.logprobs import Position, chat_logprobs, positions_of
from tinyvllm.server.core.params import formatted
from tinyvllm.server.core.prompts import Conversation
from tinyvllm.server.core.schema import Name, Texts
from tinyvllm.server.core.usage import ended, extras
from tinyvllm.server.http.stream import Wire, event, quote
from tinyvllm.text.parsing import Event

_STATELESS = "nothing is stored here: send the whole conversation"
_ALONE = "text is all there is"


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


class InputMessage(Body):
    """A message; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | RefusalPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(Body):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    async_: bool | None = Field(None, alias="async")
    caller: dict[str, Any] | None = None
    namespace: str | None = None


class FunctionCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


def _kind_of(item: Any) -> Any:
    """The type of an item; messages may leave it out."""
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None) or "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of),
]


class FunctionTool(Body):
    """A function, in this endpoint's flat spelling."""

    type: Literal["function"]
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model: Name | None = honoured(says="the first model where it is not given")
    input: str | list[Item] = honoured(..., example="Hello", min_length=1)
    instructions: str | None = honoured(example="Be brief.")
    max_output_tokens: int | None = honoured(example=4, ge=1)
    temperature: float | None = honoured(example=0.5, ge=0, le=2)
    top_p: float | None = honoured(example=0.9, gt=0, le=1)
    top_logprobs: int | None = honoured(example=2, ge=0, le=MAX_LOGPROBS, says='with include ["message.output_text.logprobs"]')
    tools: list[FunctionTool] | None = limited(
        says="functions only", example=[{"type": "function", "name": "look", "parameters": {}}], beyond=[{"type": "web_search"}]
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = honoured(example="none")
    parallel_tool_calls: bool | None = honoured(example=True)
    text: TextConfig | None = honoured(example={"format": {"type": "json_object"}})
    reasoning: Reasoning | None = limited(says="effort reaches the chat template; there are no summaries", example={"effort": "low"})
    stream: bool | None = honoured(example=False)
    stream_options: ResponseStreamOptions | None = limited(says="no padding", example={}, beyond={"include_obfuscation": True})
    store: Literal[False] | None = limited(says=f"false only: {_STATELESS}", example=False, beyond=True)
    metadata: Texts | None = honoured(example={"a": "b"}, says="given back")
    truncation: Literal["disabled"] | None = limited(says="disabled only", example="disabled", beyond="auto")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = limited(
        says="logprobs; encrypted reasoning is let through and left out", example=["message.output_text.logprobs"], beyond=["web"]
    )
    user: str | None = limited(says="written to the access log, nothing else", example="somebody")
    safety_identifier: str | None = limited(says="not used", example="somebody")
    prompt_cache_key: str | None = limited(says="not needed: cached prefixes are found by their tokens", example="mine")
    prompt_cache_retention: str | None = limited(says="not needed", example="in_memory")
    prompt_cache_options: Any = refused("cached prefixes are kept by use alone", example={"mode": "explicit"})
    service_tier: Literal["auto", "default"] | None = limited(says="auto and default only", example="auto", beyond="flex")
    background: Literal[False] | None = limited(says=f"false only: {_STATELESS}", example=False, beyond=True)
    background_options: Any = refused(_STATELESS, example={"a": 1})
    previous_response_id: str | None = refused(_STATELESS, example="resp_1")
    conversation: Any = refused(_STATELESS, example="conv_1")
    prompt: Any = refused("there are no stored prompts", example={"id": "p"})
    max_tool_calls: Any = refused("the server runs no tools", example=1)
    context_management: Any = refused(_STATELESS, example=[{"type": "compaction"}], harmless=([],))
    access_programs: Any = refused("there are none", example={"a": 1})
    image: Any = refused(_ALONE, example={"a": 1})
    moderation: Any = refused("nothing is moderated here", example={"model": "m"})
    top_k: int | None = honoured(example=5, ge=-1, says="not OpenAI's")
    min_p: float | None = honoured(example=0.1, ge=0, le=1, says="not OpenAI's")
    seed: int | None = honoured(example=7, ge=-(2**63), le=2**64 - 1, says="not OpenAI's")
    priority: int | None = honoured(example=1, ge=-(2**31), le=2**31, says="not OpenAI's")
    cache_salt: Name | None = honoured(example="mine", says="not OpenAI's")
    deadline_ms: float | None = honoured(example=60000.0, gt=0, le=1e9, says="not OpenAI's")
    ttft_deadline_ms: float | None = honoured(example=60000.0, gt=0, le=1e9, says="not OpenAI's")
    receipt: bool | None = honoured(example=True, says="not OpenAI's")


async def answer(call: Call, body: ResponsesRequest, wire: Wire) -> None:
    """The work of the endpoint."""
    async with call.service.models.use(body.model) as (model, llm):
        turn = await _turn(call, body, llm, model)
        if body.stream:
            await _stream(turn, wire)
            return
        output = await turn.last()
        part = output.outputs[0]
        answered = read_whole(turn, part)
        items: list[dict[str, Any]] = []
        if answered.reasoning:
            items.append(_item("reasoning", f"rs_{call.name}", text=answered.reasoning))
        if answered.content or not answered.calls:
            logprobs = chat_logprobs(llm.tokenizer, positions_of(part), body.top_logprobs or 0) if _wants_logprobs(body) else []
            items.append(_item("content", f"msg_{call.name}", text=answered.content, logprobs=logprobs))
        items += [_item("call", f"fc_{call.name}_{i}", one, text=one["arguments"]) for i, one in enumerate(answered.calls)]
        await wire.json({**_response(turn, _status(turn, part), items), **extras(output)})


async def _turn(call: Call, body: ResponsesRequest, llm: AsyncLLM, model: str) -> Turn:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for item in body.input:
            _add(messages, item)
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = {} if effort is None else {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    conversation = Conversation(messages, template=call.service.config.chat_template, variables=variables)
    return await begin(call, llm, model, conversation, _tools(body), _params(llm, body), body, reasoning=True)


def _add(messages: list[dict[str, Any]], item: InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem) -> None:
    """An item as templates know it: calls and thoughts belong to the assistant's message."""
    if isinstance(item, InputMessage):
        parts = [InputText(type="text", text=item.content)] if isinstance(item.content, str) else item.content
        texts = [part.text if isinstance(part, InputText) else part.refusal for part in parts]
        last = messages[-1] if messages else {}
        if item.role == "assistant" and last.get("role") == "assistant" and "content" not in last:
            last["content"] = "\n".join(texts)  # behind its thoughts
        else:
            messages.append({"role": item.role, "content": "\n".join(texts)})
        return
    if isinstance(item, FunctionCallOutput):
        text = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    said = messages[-1]
    if isinstance(item, ReasoningItem):
        said["reasoning_content"] = "\n".join(part.text for part in item.content or item.summary or [])
    else:
        one = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        said.setdefault("tool_calls", []).append(one)


def _params(llm: AsyncLLM, body: ResponsesRequest) -> SamplingParams:
    given = {name: v for name in ("temperature", "top_p", "top_k", "min_p", "seed") if (v := getattr(body, name)) is not None}
    if body.text is not None and body.text.format is not None:
        given["structured_outputs"] = formatted(body.text.format.type, body.text.format.schema_)
    if _wants_logprobs(body):
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise bad_field("top_logprobs", 'top_logprobs: needs include ["message.output_text.logprobs"]')
    kind = "delta" if body.stream else "final_only"
    return replace(llm.default_params, **given, max_tokens=body.max_output_tokens, output_kind=kind)


def _wants_logprobs(body: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (body.include or [])


def _tools(body: ResponsesRequest) -> Tools:
    given = [
        {"type": "function", "function": {"name": t.name, "description": t.description or "", "parameters": t.parameters or {}}}
        for t in body.tools or []
    ]
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        return Tools(given, choice or "auto", parallel=parallel)
    return Tools(given, "required", choice.name, parallel)


def _status(turn: Turn, part: CompletionOutput) -> dict[str, Any]:
    reason, _ = ended(part)
    turn.call.record["finish_reason"] = reason
    if reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed", "incomplete_details": None}


def _response(turn: Turn, status: dict[str, Any], items: list[dict[str, Any]], used: bool = True) -> dict[str, Any]:
    body: ResponsesRequest = turn.body
    count = turn.count
    if used:
        count.note(turn.call)
    usage = {
        "input_tokens": count.prompt,
        "input_tokens_details": {"cached_tokens": count.cached, "cache_write_tokens": 0},
        "output_tokens": count.completion,
        "output_tokens_details": {"reasoning_tokens": count.reasoning},
        "total_tokens": count.prompt + count.completion,
    }
    asked = turn.call.data
    return {
        "id": f"resp_{turn.call.name}",
        "object": "response",
        "created_at": int(time.time()),
        **status,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": turn.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": turn.params.temperature,
        "text": {"format": {"type": "text"}, **(asked.get("text") or {})},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_p": turn.params.top_p,
        "truncation": "disabled",
        "background": False,
        "usage": usage if used else None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _item(
    kind: str, id_: str, call: dict[str, str] | None = None, *, text: str = "", done: bool = True, logprobs: Any = ()
) -> dict[str, Any]:
    """An item of the output, begun or whole."""
    status = "completed" if done else "in_progress"
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}] if done else []
        return {"id": id_, "type": "reasoning", "summary": [], "content": content, "status": status}
    if kind == "call":
        assert call is not None
        return {"id": id_, "type": "function_call", "call_id": call["id"], "name": call["name"], "arguments": text, "status": status}
    content = [_text(text, logprobs)] if done else []
    return {"id": id_, "type": "message", "role": "assistant", "content": content, "status": status}


def _text(text: str, logprobs: Any = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class _Events:
    """Blocks as the events of this endpoint, each with its number."""

    def __init__(self, turn: Turn):
        self.chunks: list[bytes] = []
        self.items: list[dict[str, Any]] = []
        self._turn = turn
        self._number = 0
        self._kind = ""
        self._call: dict[str, str] | None = None
        self._id = ""
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        self._pending: list[Position] = []

    def note(self, part: CompletionOutput) -> None:
        """Tokens whose log-probabilities go out with the next text."""
        if _wants_logprobs(self._turn.body):
            self._pending += positions_of(part)

    def _taken(self) -> list[Any]:
        found = chat_logprobs(self._turn.llm.tokenizer, self._pending, self._turn.body.top_logprobs or 0)
        self._pending = []
        self._logprobs += found
        return found

    def add(self, kind: str, /, **body: Any) -> None:
        self.chunks.append(event({"type": kind, "sequence_number": self._number, **body}, kind))
        self._number += 1

    def begin(self, kind: str, event_: Event) -> None:
        index, name = len(self.items), self._turn.call.name
        self._kind, self._text, self._logprobs = kind, [], []
        self._call = {"id": event_.id, "name": event_.name} if kind == "call" else None
        self._id = f"{_PREFIXES[kind]}_{name}_{index}"
        self.add("response.output_item.added", output_index=index, item=_item(kind, self._id, self._call, done=False))
        if kind != "call":
            self.add("response.content_part.added", **self._place(), part=self._part(""))

    def grow(self, text: str) -> None:
        self._text.append(text)
        name = _DELTAS[self._kind]
        place = f'"item_id":{quote(self._id)},"output_index":{len(self.items)}'
        if self._kind != "call":
            place += ',"content_index":0'
        if self._kind == "content":
            place += f',"logprobs":{json.dumps(self._taken() if self._pending else [])}'
        line = f'{{"type":"{name}.delta","sequence_number":{self._number},{place},"delta":{quote(text)}}}'
        self.chunks.append(f"event: {name}.delta\ndata: {line}\n\n".encode())
        self._number += 1

    def end(self) -> None:
        text, name = "".join(self._text), _DELTAS[self._kind]
        if self._kind == "call":
            assert self._call is not None
            place = {"item_id": self._id, "output_index": len(self.items)}
            self.add(f"{name}.done", **place, name=self._call["name"], arguments=text)
        else:
            self.add(f"{name}.done", **self._place(), text=text, **({"logprobs": self._logprobs} if self._kind == "content" else {}))
            self.add("response.content_part.done", **self._place(), part=self._part(text))
        item = _item(self._kind, self._id, self._call, text=text, logprobs=self._logprobs)
        self.add("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)

    def failed(self, failure: Failure) -> bytes:
        """A stream of this endpoint that breaks says so in an event of its own."""
        start = len(self.chunks)
        error = {"code": failure.code or "server_error", "message": failure.message}
        response = {**_response(self._turn, {"status": "failed", "incomplete_details": None}, self.items), "error": error}
        self.add("error", **error, param=failure.param)
        self.add("response.failed", response=response)
        return b"".join(self.chunks[start:])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.items), "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return _text(text, self._logprobs) if self._kind == "content" else {"type": "reasoning_text", "text": text}


_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
_DELTAS = {"content": "response.output_text", "reasoning": "response.reasoning_text", "call": "response.function_call_arguments"}


async def _stream(turn: Turn, wire: Wire) -> None:
    events = _Events(turn)
    blocks = Blocks(turn, events)
    wire.failed = events.failed
    final: RequestOutput | None = None
    begun = False
    wire.open()
    async with aclosing(turn.outputs()) as outputs:
        async for final in outputs:
            if not begun:
                begun = True
                response = _response(turn, {"status": "in_progress", "incomplete_details": None}, [], used=False)
                events.add("response.created", response=response)
                events.add("response.in_progress", response=response)
            events.note(final.outputs[0])
            blocks.read(final.outputs[0])
            if events.chunks and final.outputs[0].finish_reason is None:
                await wire.write(b"".join(events.chunks))
                events.chunks.clear()
    assert final is not None, "the engine gave no last output"
    status = _status(turn, final.outputs[0])
    if not events.items:  # clients expect a message
        events.begin("content", Event("content"))
        events.end()
    events.add(f"response.{status['status']}", response={**_response(turn, status, events.items), **extras(final)})
    await wire.close(b"".join(events.chunks))
