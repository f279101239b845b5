"""POST /v1/responses: OpenAI's newer form of a conversation. Stateless: each request holds the whole conversation."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from typing import Any

from tinyvllm.request import CompletionOutput, RequestOutput
from tinyvllm.server.api.responses_body import ResponsesRequest, conversation_of_items, params_of, tools_of, wants_logprobs
from tinyvllm.server.core.answer import BlockStream, parse_answer
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import encode_conversation
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.generation import ChatRun, chat_run
from tinyvllm.server.core.logprobs import LogprobStyle, Position, chat_logprobs, positions_of
from tinyvllm.server.core.response import ResponseWriter, quote, sse_event
from tinyvllm.server.core.usage import extra_fields, finish_reason_of
from tinyvllm.text.parsing import Event

_ID_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
_EVENT_NAMES = {"content": "response.output_text", "reasoning": "response.reasoning_text", "call": "response.function_call_arguments"}


async def answer(context: RequestContext, body: ResponsesRequest, writer: ResponseWriter) -> None:
    """Continue a conversation."""
    async with context.service.models.use(body.model) as (model, llm):
        tools = tools_of(body)
        conversation = conversation_of_items(body, context.service.config.chat_template)
        prompt = await encode_conversation(llm, conversation, tools.shown)
        run = chat_run(context, body, llm, model, prompt, tools, params_of(body, llm.default_params))
        if body.stream:
            await _stream(run, writer)
        else:
            output = await run.final_output()
            items = _items(run, output.outputs[0])
            await writer.json({**_response(run, _status(run, output.outputs[0]), items), **extra_fields(output)})


def _items(run: ChatRun, part: CompletionOutput) -> list[dict[str, Any]]:
    """The items of a whole answer."""
    parsed, name = parse_answer(run, part), run.context.unique_id
    items: list[dict[str, Any]] = []
    if parsed.reasoning:
        items.append(_item("reasoning", f"rs_{name}", text=parsed.reasoning))
    if parsed.content or not parsed.calls:
        style = LogprobStyle(run.body.top_logprobs or 0)
        logprobs = chat_logprobs(run.llm.tokenizer, positions_of(part), style) if wants_logprobs(run.body) else []
        items.append(_item("content", f"msg_{name}", text=parsed.content, logprobs=logprobs))
    return items + [_item("call", f"fc_{name}_{i}", call, text=call["arguments"]) for i, call in enumerate(parsed.calls)]


def _status(run: ChatRun, part: CompletionOutput) -> dict[str, Any]:
    reason, _ = finish_reason_of(part)
    run.context.record["finish_reason"] = reason
    if reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return _state("completed")


def _state(status: str) -> dict[str, Any]:
    return {"status": status, "incomplete_details": None}


def _response(run: ChatRun, status: dict[str, Any], items: list[dict[str, Any]], usage: bool = True) -> dict[str, Any]:
    """The response object; usage=False while the run has just begun."""
    return {
        "id": f"resp_{run.context.unique_id}",
        "object": "response",
        "created_at": int(time.time()),
        **status,
        "error": None,
        **_request_fields(run, items),
        "background": False,
        "usage": _usage(run) if usage else None,
        "user": run.body.user,
        "metadata": run.body.metadata or {},
    }


def _request_fields(run: ChatRun, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of the request that a response repeats, with its output."""
    body: ResponsesRequest = run.body
    data = run.context.data
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": run.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": run.params.temperature,
        "text": {"format": {"type": "text"}, **(data.get("text") or {})},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": data.get("tools") or [],
        "top_p": run.params.top_p,
        "truncation": "disabled",
    }


def _usage(run: ChatRun) -> dict[str, Any]:
    usage = run.usage
    usage.record(run.context)
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _item(
    kind: str, id_: str, call: dict[str, str] | None = None, *, text: str = "", done: bool = True, logprobs: Any = ()
) -> dict[str, Any]:
    """One item of the output; done=False when its stream begins."""
    status = "completed" if done else "in_progress"
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}] if done else []
        return {"id": id_, "type": "reasoning", "summary": [], "content": content, "status": status}
    if kind == "call":
        assert call is not None
        return {"id": id_, "type": "function_call", "call_id": call["id"], "name": call["name"], "arguments": text, "status": status}
    content = [_output_text(text, logprobs)] if done else []
    return {"id": id_, "type": "message", "role": "assistant", "content": content, "status": status}


def _output_text(text: str, logprobs: Any = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class _ItemEvents:
    """Formats the blocks of an answer as the events of this endpoint, which are numbered."""

    def __init__(self, run: ChatRun):
        self.pending: list[bytes] = []  # events not written yet
        self.items: list[dict[str, Any]] = []
        self._run = run
        self._number = 0
        self._kind = ""
        self._call: dict[str, str] | None = None
        self._id = ""
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        self._positions: list[Position] = []  # tokens whose log-probabilities no event has carried yet

    def take(self) -> bytes:
        """The pending events."""
        events = b"".join(self.pending)
        self.pending.clear()
        return events

    def add(self, kind: str, /, **body: Any) -> None:
        self.pending.append(sse_event({"type": kind, "sequence_number": self._number, **body}, kind))
        self._number += 1

    def add_logprobs(self, part: CompletionOutput) -> None:
        """Keep the log-probabilities of new tokens for the next text delta."""
        if wants_logprobs(self._run.body):
            self._positions += positions_of(part)

    def begin(self, kind: str, event: Event) -> None:
        index, name = len(self.items), self._run.context.unique_id
        self._kind, self._text, self._logprobs = kind, [], []
        self._call = {"id": event.id, "name": event.name} if kind == "call" else None
        self._id = f"{_ID_PREFIXES[kind]}_{name}_{index}"
        self.add("response.output_item.added", output_index=index, item=_item(kind, self._id, self._call, done=False))
        if kind != "call":
            self.add("response.content_part.added", **self._place(), part=self._part(""))

    def append(self, text: str) -> None:
        self._text.append(text)
        name = _EVENT_NAMES[self._kind]
        place = f'"item_id":{quote(self._id)},"output_index":{len(self.items)}'
        if self._kind != "call":
            place += ',"content_index":0'
        if self._kind == "content":
            place += f',"logprobs":{json.dumps(self._take_logprobs())}'
        line = f'{{"type":"{name}.delta","sequence_number":{self._number},{place},"delta":{quote(text)}}}'
        self.pending.append(f"event: {name}.delta\ndata: {line}\n\n".encode())
        self._number += 1

    def end(self) -> None:
        text, name = "".join(self._text), _EVENT_NAMES[self._kind]
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

    def failure(self, failure: Failure) -> bytes:
        """The last events of a stream that fails; a ResponseWriter's format_failure."""
        start = len(self.pending)
        error = {"code": failure.code or "server_error", "message": failure.message}
        self.add("error", **error, param=failure.param)
        self.add("response.failed", response={**_response(self._run, _state("failed"), self.items), "error": error})
        return b"".join(self.pending[start:])

    def _take_logprobs(self) -> list[Any]:
        if not self._positions:
            return []
        logprobs = chat_logprobs(self._run.llm.tokenizer, self._positions, LogprobStyle(self._run.body.top_logprobs or 0))
        self._positions = []
        self._logprobs += logprobs
        return logprobs

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.items), "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return _output_text(text, self._logprobs) if self._kind == "content" else {"type": "reasoning_text", "text": text}


async def _stream(run: ChatRun, writer: ResponseWriter) -> None:
    events = _ItemEvents(run)
    blocks = BlockStream(run, events)
    final: RequestOutput | None = None
    writer.format_failure = events.failure
    writer.start_stream()
    async with aclosing(run.outputs()) as outputs:
        async for output in outputs:
            if final is None:
                response = _response(run, _state("in_progress"), [], usage=False)
                events.add("response.created", response=response)
                events.add("response.in_progress", response=response)
            final = output
            events.add_logprobs(output.outputs[0])
            blocks.add(output.outputs[0])
            if events.pending and output.outputs[0].finish_reason is None:
                await writer.write(events.take())
    assert final is not None, "the engine returned no output"
    status = _status(run, final.outputs[0])
    if not events.items:  # clients expect at least one message
        events.begin("content", Event("content"))
        events.end()
    events.add(f"response.{status['status']}", response={**_response(run, status, events.items), **extra_fields(final)})
    await writer.close(events.take())
