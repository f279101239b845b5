"""POST /v1/responses: OpenAI's newer form of a conversation. Answers are kept, so that a request can continue an earlier one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOutput
from tinyvllm.server.api.responses_body import (
    InputTokensRequest,
    ResponsesRequest,
    conversation_of,
    params_of,
    tools_of,
    turns_of,
    turns_with_output,
    wants_logprobs,
)
from tinyvllm.server.core.answer import BlockStream, build_response, parse_answer
from tinyvllm.server.core.answer_format import Tools
from tinyvllm.server.core.background import is_active
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import ChatPrompt, encode_conversation
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.generation import ChatRun, chat_run
from tinyvllm.server.core.logprobs import LogprobStyle, Position, chat_logprobs, positions_of
from tinyvllm.server.core.params import request_options
from tinyvllm.server.core.prompts import require_tokenizer
from tinyvllm.server.core.response import ResponseWriter, json_response, quote, sse_event
from tinyvllm.server.core.response_store import StoredResponse
from tinyvllm.server.core.usage import extra_fields, finish_reason_of
from tinyvllm.text.parsing import Event

_ID_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
_EVENT_NAMES = {"content": "response.output_text", "reasoning": "response.reasoning_text", "call": "response.function_call_arguments"}


async def answer(context: RequestContext, body: ResponsesRequest, writer: ResponseWriter) -> None:
    """Continue a conversation."""
    async with context.service.models.use(body.model) as (model, llm):
        turns = turns_of(body, _messages_before(context, body))
        if body.store and not context.service.responses.enabled:
            context.add_ignored(["store"])
        prompt, tools = await _prompt(context, body, llm, turns)
        run = chat_run(context, body, llm, model, prompt, tools, params_of(body, llm.default_params))
        if body.background:
            await writer.json(_start_in_background(run))
        elif body.stream:
            await _stream(run, turns, writer)
        else:
            output = await run.final_output()
            response = await build_response(run, [output], lambda: _whole_response(run, output.outputs[0]))
            await writer.json({**_stored(run, turns, response), **extra_fields(output)})


def _whole_response(run: ChatRun, part: CompletionOutput) -> dict[str, Any]:
    status = _status(run, part)
    response = _response(run, status, _items(run, part, cut=status["status"] == "incomplete"))
    return response | _raw_messages(run, part.token_ids)


def _start_in_background(run: ChatRun) -> dict[str, Any]:
    """The queued response, whose answer a request without `background` gives in its place. Invalid fields have been refused here."""
    context = run.context
    if not context.service.responses.enabled:
        raise bad_field("background", "background: this server keeps no answers (--no-store)", "unsupported_parameter")
    response = {**_response(run, _state("queued"), [], usage=False), "background": True}
    request = {**context.data, "background": None, "store": True}
    if (deadline := request_options(context, run.body).deadline_ms) is not None:
        request["deadline_ms"] = deadline
    context.service.background.start(context.owner, response, _input_items(run), request, context.default_priority)
    return response


async def input_tokens(context: RequestContext, body: InputTokensRequest, writer: ResponseWriter) -> None:
    """Count the tokens of a conversation."""
    async with context.service.models.use(body.model) as (_, llm):
        prompt, _ = await _prompt(context, body, llm, turns_of(body, _messages_before(context, body)))
        await writer.json({"object": "response.input_tokens", "input_tokens": len(prompt.encoded.token_ids)})


def _messages_before(context: RequestContext, body: InputTokensRequest) -> Sequence[Mapping[str, Any]]:
    if body.previous_response_id is None:
        return ()
    before = context.service.responses.get(context.owner, body.previous_response_id, 400, "previous_response_id")
    if is_active(before.response):
        raise bad_field(
            "previous_response_id", f"previous_response_id: the response is {before.response['status']}; wait until it is finished"
        )
    return before.messages


async def _prompt(
    context: RequestContext, body: InputTokensRequest, llm: AsyncLLM, turns: Sequence[Mapping[str, Any]]
) -> tuple[ChatPrompt, Tools]:
    tools = tools_of(body)
    conversation = conversation_of(body, turns, context.service.config.chat_template)
    return await encode_conversation(llm, conversation, tools.shown), tools


def _stored(run: ChatRun, turns: Sequence[Mapping[str, Any]], response: dict[str, Any]) -> dict[str, Any]:
    """The finished response, kept for requests that continue it unless the client forbids that. `store` says whether it is."""
    if not response["store"]:
        return response
    messages = turns_with_output(turns, response["output"])
    kept = run.context.service.responses.add(run.context.owner, response, _input_items(run), messages)
    return {**response, "store": kept}


def _input_items(run: ChatRun) -> list[dict[str, Any]]:
    """The items of the request, each with an id."""
    items = run.context.data["input"]
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": items}]}]
    return [{**item, "id": item.get("id") or f"item_{run.context.unique_id}_{i}"} for i, item in enumerate(items)]


def _raw_messages(run: ChatRun, output: Sequence[int]) -> dict[str, Any]:
    """vLLM's enable_response_messages: prompt and output as the model reads and writes them; nothing unless the request asks for them."""
    if not run.body.enable_response_messages:
        return {}
    tokenizer = require_tokenizer(run.llm)

    def message(token_ids: Sequence[int]) -> list[dict[str, Any]]:
        text = tokenizer.decode(list(token_ids), False)
        return [{"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}]

    return {"input_messages": message(run.prompt.token_ids), "output_messages": message(output)}


async def get_response(request: Request) -> Response:
    """A stored answer."""
    return json_response(_find(request).response)


async def delete_response(request: Request) -> Response:
    """Forget a stored answer."""
    context, name = RequestContext.of(request), request.path_params["name"]
    context.service.background.delete(context.owner, name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """End an answer that runs in the background; a finished one is unchanged."""
    context = RequestContext.of(request)
    return json_response(context.service.background.cancel(context.owner, request.path_params["name"]))


async def list_input_items(request: Request) -> Response:
    """The items of the request of a stored answer, the last first unless ?order=asc; ?limit and ?after page through them."""
    items = list(_find(request).input_items)
    query = request.query_params
    limit, after = query.get("limit", "20"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise bad_field("limit", f"limit: must be an integer from 1 to 100, got {limit[:40]!r}")
    if query.get("order", "desc") != "asc":
        items.reverse()
    if after is not None:
        start = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if start is None:
            raise bad_field("after", f"after: there is no item {after[:100]!r}")
        items = items[start + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


def _find(request: Request) -> StoredResponse:
    context = RequestContext.of(request)
    return context.service.responses.get(context.owner, request.path_params["name"])


def _items(run: ChatRun, part: CompletionOutput, cut: bool) -> list[dict[str, Any]]:
    """The items of a whole answer. The last one of a `cut` answer is incomplete, unless it is a call that was at its end."""
    parsed, name = parse_answer(run, part), run.context.unique_id
    items: list[dict[str, Any]] = []
    if parsed.reasoning and run.body.include_reasoning is not False:
        items.append(_item("reasoning", f"rs_{name}", text=parsed.reasoning))
    if parsed.content or not parsed.calls:
        style = LogprobStyle.of(run.context.service.config, run.body, run.body.top_logprobs)
        logprobs = chat_logprobs(run.llm.tokenizer, positions_of(part), style) if wants_logprobs(run.body) else []
        items.append(_item("content", f"msg_{name}", text=parsed.content, logprobs=logprobs))
    items += [_item("call", f"fc_{name}_{i}", call, text=call["arguments"]) for i, call in enumerate(parsed.calls)]
    if parsed.last_call_is_cut if parsed.calls else cut:
        items[-1]["status"] = "incomplete"
    return items


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
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False and run.context.service.responses.enabled,
        "temperature": run.params.temperature,
        "text": {"format": {"type": "text"}, **(data.get("text") or {})},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": data.get("tools") or [],
        "top_p": run.params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "service_tier": "default",
        "frequency_penalty": run.params.frequency_penalty,
        "presence_penalty": run.params.presence_penalty,
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
    kind: str, id_: str, call: dict[str, str] | None = None, *, text: str = "", status: str = "completed", logprobs: Any = ()
) -> dict[str, Any]:
    """One item of the output; its status is in_progress when its stream begins, incomplete if its end is missing."""
    done = status != "in_progress"
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
        self.add("response.output_item.added", output_index=index, item=_item(kind, self._id, self._call, status="in_progress"))
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

    def end(self, cut: bool = False) -> None:
        text, name = "".join(self._text), _EVENT_NAMES[self._kind]
        if self._kind == "call":
            assert self._call is not None
            place = {"item_id": self._id, "output_index": len(self.items)}
            self.add(f"{name}.done", **place, name=self._call["name"], arguments=text)
        else:
            self.add(f"{name}.done", **self._place(), text=text, **({"logprobs": self._logprobs} if self._kind == "content" else {}))
            self.add("response.content_part.done", **self._place(), part=self._part(text))
        status = "incomplete" if cut else "completed"
        item = _item(self._kind, self._id, self._call, text=text, logprobs=self._logprobs, status=status)
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
        style = LogprobStyle.of(self._run.context.service.config, self._run.body, self._run.body.top_logprobs)
        logprobs = chat_logprobs(self._run.llm.tokenizer, self._positions, style)
        self._positions = []
        self._logprobs += logprobs
        return logprobs

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.items), "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return _output_text(text, self._logprobs) if self._kind == "content" else {"type": "reasoning_text", "text": text}


async def _stream(run: ChatRun, turns: Sequence[Mapping[str, Any]], writer: ResponseWriter) -> None:
    events = _ItemEvents(run)
    blocks = BlockStream(run, events)
    final: RequestOutput | None = None
    writer.format_failure = events.failure
    writer.start_stream()
    token_ids: list[int] = []
    async with aclosing(run.outputs()) as outputs:
        async for output in outputs:
            token_ids += output.outputs[0].token_ids
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
    response = _stored(run, turns, _response(run, status, events.items) | _raw_messages(run, token_ids))
    events.add(f"response.{status['status']}", response={**response, **extra_fields(final)})
    await writer.close(events.take())
