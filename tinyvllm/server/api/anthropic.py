"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a conversation, so that its clients and agents work unchanged."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOutput
from tinyvllm.server.api.anthropic_body import CountRequest, MessagesRequest, conversation_of_messages, params_of, tools_of
from tinyvllm.server.core.answer import BlockStream, build_response, parse_answer
from tinyvllm.server.core.answer_format import can_reason
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import encode_conversation
from tinyvllm.server.core.generation import ChatRun, chat_run
from tinyvllm.server.core.response import ResponseWriter, quote, sse_event
from tinyvllm.server.core.usage import extra_fields, finish_reason_of
from tinyvllm.text.parsing import Event

# type and field of a delta, by kind of block
_DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json")}


async def answer(context: RequestContext, body: MessagesRequest, writer: ResponseWriter) -> None:
    """Continue a conversation."""
    if body.metadata is not None and body.metadata.user_id is not None:
        context.record["user"] = body.metadata.user_id
    async with context.service.models.use(body.model) as (model, llm):
        run = await _prepare(context, body, llm, model)
        if body.stream:
            await _stream(run, writer)
        else:
            output = await run.final_output()
            await writer.json(await build_response(run, [output], lambda: _whole_message(run, output)))


async def count_tokens(context: RequestContext, body: CountRequest, writer: ResponseWriter) -> None:
    """Count the tokens of a conversation."""
    async with context.service.models.use(body.model) as (model, llm):
        run = await _prepare(context, body, llm, model)
        await writer.json({"input_tokens": len(run.prompt.token_ids)})


async def _prepare(context: RequestContext, body: CountRequest, llm: AsyncLLM, model: str) -> ChatRun:
    conversation = conversation_of_messages(body, context.service.config.chat_template)
    tools = tools_of(body)
    prompt = await encode_conversation(llm, conversation, tools.shown)
    params = params_of(body, llm.default_params)
    if body.thinking is not None and body.thinking.type != "disabled" and not can_reason(llm, conversation.template, tools):
        context.add_ignored(["thinking"])  # agents send it to every model
        params = replace(params, thinking_token_budget=None)
    return chat_run(context, body, llm, model, prompt, tools, params)


def _whole_message(run: ChatRun, output: RequestOutput) -> dict[str, Any]:
    part = output.outputs[0]
    parsed = parse_answer(run, part)
    content: list[dict[str, Any]] = []
    if parsed.reasoning:
        content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content or not parsed.calls:
        content.append({"type": "text", "text": parsed.content})
    try:
        inputs = [_input_of(call["arguments"]) for call in parsed.calls]
    except ValueError:  # nested deeper than the reader goes: the model's text, since `input` must be a value
        content, parsed.calls, inputs = [{"type": "text", "text": part.text}], [], []
    for call, value in zip(parsed.calls, inputs, strict=True):
        content.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": value})
    stop = _stop_fields(run, part, bool(parsed.calls))
    return {**_message(run), "content": content, **stop, "usage": _usage(run), **extra_fields(output)}


def _input_of(arguments: str) -> Any:
    """The arguments of a call as a value; of those that max_tokens has cut, what is there."""
    return from_json(arguments or "{}", allow_partial="trailing-strings")


def _message(run: ChatRun) -> dict[str, Any]:
    return {"id": f"msg_{run.context.unique_id}", "type": "message", "role": "assistant", "model": run.model}


def _usage(run: ChatRun) -> dict[str, Any]:
    """Anthropic's usage, where input_tokens excludes cached tokens."""
    usage = run.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _stop_fields(run: ChatRun, part: CompletionOutput, has_calls: bool) -> dict[str, Any]:
    reason, stop = finish_reason_of(part)
    run.context.record["finish_reason"] = reason
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


class _MessageEvents:
    """Formats the blocks of an answer as Anthropic's events."""

    def __init__(self, run: ChatRun) -> None:
        self.pending: list[bytes] = []  # events not written yet
        self._run = run
        self._index = -1
        self._kind = ""

    @property
    def empty(self) -> bool:
        """Whether no block has begun."""
        return self._index < 0

    def take(self) -> bytes:
        """The pending events."""
        events = b"".join(self.pending)
        self.pending.clear()
        return events

    def add(self, name: str, body: dict[str, Any]) -> None:
        self.pending.append(sse_event({"type": name, **body}, name))

    def start_message(self) -> None:
        message = {**_message(self._run), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self._run)}
        self.add("message_start", {"message": message})
        self.add("ping", {})

    def begin(self, kind: str, event: Event) -> None:
        self._index += 1
        self._kind = kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "call":
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        self.add("content_block_start", {"index": self._index, "content_block": block})

    def append(self, text: str) -> None:
        kind, name = _DELTAS[self._kind]
        delta = f'{{"type":"{kind}","{name}":{quote(text)}}}'
        line = f'{{"type":"content_block_delta","index":{self._index},"delta":{delta}}}'
        self.pending.append(f"event: content_block_delta\ndata: {line}\n\n".encode())

    def end(self, cut: bool = False) -> None:
        if self._kind == "reasoning":
            self.add("content_block_delta", {"index": self._index, "delta": {"type": "signature_delta", "signature": ""}})
        self.add("content_block_stop", {"index": self._index})


async def _stream(run: ChatRun, writer: ResponseWriter) -> None:
    events = _MessageEvents(run)
    blocks = BlockStream(run, events)
    final: RequestOutput | None = None
    writer.start_stream()
    async with aclosing(run.outputs()) as outputs:
        async for output in outputs:
            if final is None:
                events.start_message()
            final = output
            blocks.add(output.outputs[0])
            if events.pending and output.outputs[0].finish_reason is None:
                await writer.write(events.take())
    assert final is not None, "the engine returned no output"
    if events.empty:  # clients expect at least one block
        events.begin("content", Event("content"))
        events.end()
    run.usage.record(run.context)
    stop = _stop_fields(run, final.outputs[0], bool(blocks.calls))
    events.add("message_delta", {"delta": stop, "usage": _usage(run), **extra_fields(final)})
    events.add("message_stop", {})
    await writer.close(events.take())
