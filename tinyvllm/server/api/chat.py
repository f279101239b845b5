"""POST /v1/chat/completions. Chunks of a stream are put together by hand, since there is one a token."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams
from tinyvllm.server.core.chunk_store import begun
from tinyvllm.server.core.context import Call
from tinyvllm.server.core.conversation import Tools, Turn, begin, read_whole
from tinyvllm.server.core.failures import Failure, bad_field, encode
from tinyvllm.server.core.logprobs import Position, chat_logprobs, positions_of, prompt_positions
from tinyvllm.server.core.params import beam_params, request_options, sampling_params
from tinyvllm.server.core.prompts import Conversation
from tinyvllm.server.core.schema import ChatRequest
from tinyvllm.server.core.usage import ended, extras
from tinyvllm.server.http.stream import DONE, Wire, event, quote
from tinyvllm.text.parsing import Event, StreamParser


async def answer(call: Call, body: ChatRequest, wire: Wire) -> None:
    """The work of the endpoint."""
    call.record |= {name: v for name in ("metadata", "safety_identifier") if (v := getattr(body, name)) is not None}
    async with call.service.models.use(body.model) as (model, llm):
        turn = await _turn(call, body, llm, model)
        if body.use_beam_search:
            beams = beam_params(body, turn.params.max_tokens or 16)
            final = await llm.beam_search(turn.prompt.prompt(), beams, options=request_options(call, body))
            turn.count.add_prompt(final)
            turn.count.completion = sum(len(part.token_ids) for part in final.outputs)
            turn.count.note(call)
            await wire.json(_whole(turn, final))
        elif body.stream:
            await _Stream(turn, wire).run()
        else:
            await wire.json(_whole(turn, await turn.last()))


async def _turn(call: Call, body: ChatRequest, llm: AsyncLLM, model: str) -> Turn:
    longest = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.use_beam_search:
        params = SamplingParams(max_tokens=longest)
    else:
        params = sampling_params(llm, body, max_tokens=longest, logprobs=logprobs)
    effort = body.reasoning_effort
    variables = {} if effort is None else {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    conversation = begun(call, llm, body, conversation_of(call, call.data, {**variables, **(body.chat_template_kwargs or {})}))
    return await begin(call, llm, model, conversation, _tools(call, body), params, body, reasoning=True)


def conversation_of(call: Call, data: dict[str, Any], variables: dict[str, Any]) -> Conversation:
    """The conversation of a body's plain objects. A template of the client's own is refused, unless the server trusts them."""
    config = call.service.config
    template = data.get("chat_template")
    if template is not None and not config.trust_request_chat_template:
        text = "chat_template: this server uses the models' own templates (--trust-request-chat-template lets requests bring theirs)"
        raise bad_field("chat_template", text, "unsupported_parameter")
    if data.get("continue_final_message") and data.get("add_generation_prompt"):
        raise bad_field("continue_final_message", "continue_final_message and add_generation_prompt exclude each other: send one of them")
    if wrong := next((name for name in variables if name in _TEMPLATE_OWN), None):
        raise bad_field("chat_template_kwargs", f"chat_template_kwargs: {wrong} is a field of its own")
    return Conversation(
        messages=data["messages"],
        documents=data.get("documents"),
        template=template if template is not None else config.chat_template,
        variables=variables,
        add_generation_prompt=data.get("add_generation_prompt") is not False,
        continue_final_message=bool(data.get("continue_final_message")),
        add_special_tokens=bool(data.get("add_special_tokens")),
    )


_TEMPLATE_OWN = ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenizer_or_template")


def _tools(call: Call, body: ChatRequest) -> Tools:
    given, choice = call.data.get("tools") or [], body.tool_choice
    parallel = body.parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        return Tools(given, choice or "auto", parallel=parallel)
    return Tools(given, "required", choice.function.name, parallel)


def _head(turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.call.name}", "object": kind, "created": int(time.time()), "model": turn.model}


def _whole(turn: Turn, output: RequestOutput) -> dict[str, Any]:
    body: ChatRequest = turn.body
    choices = []
    for part in output.outputs:
        reason, stop = ended(part)
        answered = read_whole(turn, part)
        message: dict[str, Any] = {"role": "assistant", "content": answered.content, "refusal": None}
        if answered.reasoning and body.include_reasoning is not False:
            message["reasoning_content"] = answered.reasoning
        if answered.calls:
            message["content"] = answered.content or None
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in answered.calls
            ]
            reason = "tool_calls" if reason == "stop" else reason
        choice: dict[str, Any] = {"index": part.index, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
        if body.logprobs:
            choice["logprobs"] = {"content": chat_logprobs(turn.llm.tokenizer, positions_of(part), body.top_logprobs or 0), "refusal": None}
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
        choices.append(choice)
    turn.call.record["finish_reason"] = choices[0]["finish_reason"] if choices else None
    whole = {**_head(turn, "chat.completion"), "choices": choices, "usage": turn.count.usage(), **extras(output)}
    if body.prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_positions(output)
    if body.return_token_ids:
        whole["prompt_token_ids"] = output.prompt_token_ids
    return whole


@dataclass
class _Choice:
    """One of the n answers while it streams."""

    index: int
    parser: StreamParser | None
    begun: bool = False
    over: bool = False
    called: bool = False
    pending: list[Position] = field(default_factory=list)  # tokens whose log-probabilities no chunk has carried yet
    token_ids: list[int] = field(default_factory=list)  # the same for return_token_ids


class _Stream:
    """The chunks of one turn. Content without tools, reasoning and log-probabilities goes the short way: one string put together."""

    def __init__(self, turn: Turn, wire: Wire):
        body: ChatRequest = turn.body
        self.turn, self.wire, self.body = turn, wire, body
        options = body.stream_options
        self.include = bool(options and options.include_usage)
        self.continuous = bool(options and options.continuous_usage_stats)
        self.details = bool(body.logprobs or body.return_token_ids)
        self.front = f'data: {encode(_head(turn, "chat.completion.chunk")).decode()[:-1]},"choices":[{{"index":'
        self.choices = [_Choice(i, turn.parser(whole=False)) for i in range(turn.params.n)]

    async def run(self) -> None:
        turn, last = self.turn, None
        self.wire.open()
        async with aclosing(turn.outputs()) as outputs:
            async for output in outputs:
                last = output
                chunks: list[str] = []
                for part in output.outputs:
                    choice = self.choices[part.index]
                    if not choice.over and (part.token_ids or part.text or part.finish_reason is not None):
                        self._read(choice, part, output, chunks)
                if chunks:
                    back = self._back()
                    await self.wire.write("".join([self.front + chunk + back for chunk in chunks]).encode())
        turn.count.note(turn.call)
        tail = b""
        if self.include or self.body.receipt or self.body.explain:
            usage = turn.count.usage()
            tail = event({**_head(turn, "chat.completion.chunk"), "choices": [], "usage": usage, **extras(last)})
        await self.wire.close(tail + DONE)

    def _back(self) -> str:
        """What closes a chunk, behind its choices."""
        if self.continuous:
            return f',"usage":{json.dumps(self.turn.count.usage())}}}\n\n'
        return ',"usage":null}\n\n' if self.include else "}\n\n"

    def _read(self, choice: _Choice, part: CompletionOutput, output: RequestOutput, chunks: list[str]) -> None:
        """Chunks for what a step brought to one answer."""
        self.turn.count.completion += len(part.token_ids)
        if not choice.begun:
            choice.begun = True
            prompt = f',"prompt_token_ids":{output.prompt_token_ids}' if self.body.return_token_ids else ""
            chunks.append(f'{choice.index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]{prompt}')
        if self.details:
            choice.pending += positions_of(part)
            choice.token_ids += part.token_ids
        if choice.parser is None:
            if part.text:
                chunks.append(self._chunk(choice, f'{{"content":{quote(part.text)}}}'))
        else:
            read = choice.parser.add(part.text) if part.text else []
            events = self.turn.kept(read + choice.parser.finish() if part.finish_reason is not None else read)
            if events and all(e.kind == "reasoning" for e in events):
                self.turn.count.reasoning += len(part.token_ids)
            for e in events:
                delta = self._delta(choice, e)
                if delta is not None:
                    chunks.append(self._chunk(choice, delta))
        if part.finish_reason is not None:
            self._finish(choice, part, chunks)

    def _delta(self, choice: _Choice, e: Event) -> str | None:
        if e.kind == "content":
            return f'{{"content":{quote(e.text)}}}'
        if e.kind == "reasoning":
            return None if self.body.include_reasoning is False else f'{{"reasoning_content": {quote(e.text)}}}'
        if e.kind == "tool_start":
            choice.called = True
            call = {"index": e.index, "id": e.id, "type": "function", "function": {"name": e.name, "arguments": ""}}
            return json.dumps({"tool_calls": [call]})
        if e.kind == "tool_arguments":
            return f'{{"tool_calls": [{{"index": {e.index}, "function": {{"arguments": {quote(e.text)}}}}}]}}'
        return None

    def _chunk(self, choice: _Choice, delta: str, reason: str = "null", more: str = "") -> str:
        logprobs = "null"
        if self.details:
            if self.body.logprobs and choice.pending:
                content = chat_logprobs(self.turn.llm.tokenizer, choice.pending, self.body.top_logprobs or 0)
                logprobs = json.dumps({"content": content, "refusal": None})
            if self.body.return_token_ids:
                more += f',"token_ids":{choice.token_ids}'
            choice.pending, choice.token_ids = [], []
        return f'{choice.index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}{more}}}]'

    def _finish(self, choice: _Choice, part: CompletionOutput, chunks: list[str]) -> None:
        choice.over = True
        try:
            reason, stop = ended(part)
        except Failure:
            self.turn.call.record["finish_reason"] = part.finish_reason
            raise
        reason = "tool_calls" if choice.called and reason == "stop" else reason
        self.turn.call.record["finish_reason"] = reason
        chunks.append(self._chunk(choice, "{}", quote(reason or ""), f',"stop_reason":{json.dumps(stop)}'))
