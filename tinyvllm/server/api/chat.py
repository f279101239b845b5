"""POST /v1/chat/completions. The events of a stream are formatted by hand, since there is one for each token."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import field
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams
from tinyvllm.server.core.answer import build_response, parse_answer
from tinyvllm.server.core.answer_format import Tools
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import after_segments, conversation_of, encode_conversation, reasoning_variables
from tinyvllm.server.core.failures import Failure, encode
from tinyvllm.server.core.generation import ChatRun, beam_search, chat_run, final_outputs
from tinyvllm.server.core.load_report import report_load
from tinyvllm.server.core.logprobs import LogprobStyle, Position, chat_logprobs, positions_of, prompt_logprobs
from tinyvllm.server.core.params import beam_params, output_length, request_options, sampling_params
from tinyvllm.server.core.prompts import truncation_of
from tinyvllm.server.core.response import DONE, ResponseWriter, quote, sse_event
from tinyvllm.server.core.schema import BatchChatRequest, ChatRequest, ChatTokensRequest
from tinyvllm.server.core.tool_turns import message_text
from tinyvllm.server.core.usage import extra_fields, finish_reason_of, request_metrics, usage_in_stream
from tinyvllm.text.parsing import Event, StreamParser

_DEFAULT_BEAM_TOKENS = 16


async def answer(context: RequestContext, body: ChatRequest, writer: ResponseWriter) -> None:
    """Continue a conversation."""
    _record_client(context, body)
    async with context.service.models.use(body.model) as (model, llm):
        report_load(context, llm)
        run = await _prepare(context, body, llm, model, context.data)
        if body.use_beam_search:
            await _write_whole(run, await _beam_search(run), writer)
        elif body.stream:
            await _ChatStream(run, writer).run_to_end()
        else:
            await _write_whole(run, await run.final_output(), writer)


async def answer_all(context: RequestContext, body: BatchChatRequest, writer: ResponseWriter) -> None:
    """Continue several conversations. Choices have the indices of their conversations."""
    _record_client(context, body)
    async with context.service.models.use(body.model) as (model, llm):
        report_load(context, llm)
        conversations = context.data["messages"]
        runs = [await _prepare(context, body, llm, model, {**context.data, "messages": one}) for one in conversations]
        outputs = await final_outputs(runs)
        await writer.json(await build_response(runs[0], outputs, lambda: _batch_completion(runs, outputs)))


def _record_client(context: RequestContext, body: ChatRequest) -> None:
    """Write to the access log what the client says of itself."""
    context.record |= {name: v for name in ("metadata", "safety_identifier") if (v := getattr(body, name)) is not None}


async def _write_whole(run: ChatRun, output: RequestOutput, writer: ResponseWriter) -> None:
    await writer.json(await build_response(run, [output], lambda: _completion(run, output)))


async def _prepare(context: RequestContext, body: ChatRequest, llm: AsyncLLM, model: str, data: Mapping[str, Any]) -> ChatRun:
    """The run of the conversation in `data`, the body's plain objects."""
    tools = _tools(context, body)
    variables = {**reasoning_variables(body.reasoning_effort), **(body.chat_template_kwargs or {})}
    segments = context.service.segments.used_by_body(context.owner, context, body, llm)
    conversation = after_segments(conversation_of(context.service.config, data, variables), segments)
    prompt = await encode_conversation(llm, conversation, tools.shown, truncation_of(body, body.max_completion_tokens or body.max_tokens))
    return chat_run(context, body, llm, model, prompt, tools, _params(llm, body))


async def input_tokens(context: RequestContext, body: ChatTokensRequest, writer: ResponseWriter) -> None:
    """Count the tokens of a conversation, as llama.cpp does."""
    async with context.service.models.use(body.model) as (model, llm):
        run = await _prepare(context, body, llm, model, context.data)
        await writer.json({"object": "response.input_tokens", "input_tokens": len(run.prompt.token_ids)})


def _tools(context: RequestContext, body: ChatRequest) -> Tools:
    functions, choice = context.data.get("tools") or [], body.tool_choice
    parallel = body.parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        return Tools(functions, choice or "auto", parallel=parallel)
    return Tools(functions, "required", choice.function.name, parallel)


def _max_tokens(body: ChatRequest) -> int | None:
    return output_length(body, "max_completion_tokens", "max_tokens")


def _params(llm: AsyncLLM, body: ChatRequest) -> SamplingParams:
    if body.use_beam_search:
        return SamplingParams(max_tokens=_max_tokens(body))
    return sampling_params(llm, body, max_tokens=_max_tokens(body), logprobs=(body.top_logprobs or 0) if body.logprobs else None)


async def _beam_search(run: ChatRun) -> RequestOutput:
    beams = beam_params(run.body, min(run.params.max_tokens or _DEFAULT_BEAM_TOKENS, run.room))
    (output,) = await beam_search(run.context, run.llm, [run.prompt], beams, request_options(run.context, run.body))
    run.usage.add_prompt(output)
    run.usage.add_completions(output)
    run.usage.add_energy(output)
    run.usage.record(run.context)
    return output


def _head(run: ChatRun, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{run.context.unique_id}",
        "object": kind,
        "created": int(time.time()),
        "model": run.model,
        "system_fingerprint": run.llm.fingerprint,
    }


def _completion(run: ChatRun, output: RequestOutput) -> dict[str, Any]:
    """The whole response."""
    body: ChatRequest = run.body
    choices = [_choice(run, part) for part in output.outputs]
    run.context.record["finish_reason"] = choices[0]["finish_reason"] if choices else None
    return {
        **_head(run, "chat.completion"),
        "choices": choices,
        "usage": run.usage.openai(),
        "prompt_logprobs": None if body.prompt_logprobs is None else prompt_logprobs(output),
        "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
        **request_metrics(run.context.service.config, output, len(choices), run.usage),
        **extra_fields(output, body.timings_per_token, run.usage),
    }


def _batch_completion(runs: Sequence[ChatRun], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The response to several conversations. Each choice has the token ids of its own prompt, if the request asks for token ids."""
    choices = []
    for index, (run, output) in enumerate(zip(runs, outputs, strict=True)):
        (part,) = output.outputs
        prompt = output.prompt_token_ids if run.body.return_token_ids else None
        choices.append({**_choice(run, part), "index": index, "prompt_token_ids": prompt})
    first = runs[0]
    first.context.record["finish_reason"] = choices[0]["finish_reason"]
    return {**_head(first, "chat.completion"), "choices": choices, "usage": first.usage.openai()}


def _choice(run: ChatRun, part: CompletionOutput) -> dict[str, Any]:
    """One of the n answers."""
    body: ChatRequest = run.body
    reason, stop = finish_reason_of(part)
    parsed = parse_answer(run, part)
    content = _echo(run) + parsed.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "reasoning": None}
    if parsed.reasoning and body.include_reasoning is not False:
        message |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}  # the names of vLLM and of DeepSeek
    if parsed.calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in parsed.calls
        ]
        reason = "tool_calls" if reason == "stop" else reason
    choice: dict[str, Any] = {"index": part.index, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
    if body.logprobs:
        style = LogprobStyle.of(run.context.service.config, body, body.top_logprobs)
        entries = chat_logprobs(run.llm.tokenizer, positions_of(part), style)
        choice["logprobs"] = {"content": entries, "refusal": None}
    return {**choice, "token_ids": part.token_ids if body.return_token_ids else None}


def _echo(run: ChatRun) -> str:
    """vLLM's echo: the last message, which the answer continues if it has the same role."""
    body: ChatRequest = run.body
    last = run.last_message
    role = last["role"] if body.add_generation_prompt is False else "assistant"
    return message_text(last) if body.echo and last["role"] == role else ""


@dataclass
class _StreamedChoice:
    """One of the n answers of a stream."""

    index: int
    parser: StreamParser | None
    finished: bool = False
    has_calls: bool = False
    pending: list[Position] = field(default_factory=list)  # tokens whose log-probabilities no event has carried yet
    token_ids: list[int] = field(default_factory=list)  # the same for return_token_ids


class _ChatStream:
    """The events of one run. Content without tools, reasoning and log-probabilities takes a fast path: one f-string for each step."""

    def __init__(self, run: ChatRun, writer: ResponseWriter):
        body: ChatRequest = run.body
        self.run, self.writer, self.body = run, writer, body
        self.include_usage, self.continuous_usage = usage_in_stream(run.context.service.config, body.stream_options, body.energy)
        self.style = LogprobStyle.of(run.context.service.config, body, body.top_logprobs)
        self.token_details = bool(body.logprobs or body.return_token_ids)
        self.event_start = f'data: {encode(_head(run, "chat.completion.chunk")).decode()[:-1]},"choices":[{{"index":'
        dialect = run.format.dialect
        thinks = dialect is not None and dialect.think is not None and body.include_reasoning is not False
        self.no_reasoning = ',"reasoning_content":null' if thinks else ""  # as DeepSeek sends: its clients read the field in every event
        self.started = False
        self.choices = [_StreamedChoice(i, run.format.parser(whole=False)) for i in range(run.params.n)]

    async def run_to_end(self) -> None:
        """Run the request and write its events."""
        final: RequestOutput | None = None
        self.writer.start_stream()
        async with aclosing(self.run.outputs()) as outputs:
            async for final in outputs:
                events = [*self._first_events(final), *self._step_events(final)]
                if events:
                    await self.writer.write("".join(events).encode())
        self.run.usage.record(self.run.context)
        await self.writer.close(self._usage_event(final) + DONE)

    def _first_events(self, output: RequestOutput) -> list[str]:
        """The role of each answer, and what it echoes, before the first tokens are counted."""
        if self.started:
            return []
        self.started = True
        prompt = f',"prompt_token_ids":{output.prompt_token_ids}' if self.body.return_token_ids else ""
        rest = f'"delta":{{"role":"assistant","content":""{self.no_reasoning}}},"logprobs":null,"finish_reason":null}}]{prompt}'
        deltas = [f"{choice.index},{rest}" for choice in self.choices]
        if echo := _echo(self.run):
            deltas += [self._delta(choice, f'{{"content":{quote(echo)}}}') for choice in self.choices]
        return self._events(deltas)

    def _step_events(self, output: RequestOutput) -> list[str]:
        """The events of one engine step."""
        deltas: list[str] = []
        for part in output.outputs:
            choice = self.choices[part.index]
            if not choice.finished and (part.token_ids or part.text or part.finish_reason is not None):
                self._add_part(choice, part, deltas)
        return self._events(deltas)

    def _events(self, deltas: list[str]) -> list[str]:
        """Events of deltas, each of which is the rest after event_start."""
        event_end = self._event_end()
        return [self.event_start + delta + event_end for delta in deltas]

    def _usage_event(self, final: RequestOutput | None) -> bytes:
        extra = extra_fields(final, self.body.timings_per_token, self.run.usage)
        if not (self.include_usage or extra):
            return b""
        usage: dict[str, Any] = {}
        if self.include_usage:
            metrics = request_metrics(self.run.context.service.config, final, len(self.choices), self.run.usage)
            usage = {"usage": self.run.usage.openai(), **metrics}
        return sse_event({**_head(self.run, "chat.completion.chunk"), "choices": [], **usage, **extra})

    def _event_end(self) -> str:
        """The end of an event, after its choices."""
        if self.continuous_usage:
            return f',"usage":{json.dumps(self.run.usage.openai())}}}\n\n'
        return ',"usage":null}\n\n' if self.include_usage else "}\n\n"

    def _add_part(self, choice: _StreamedChoice, part: CompletionOutput, deltas: list[str]) -> None:
        """Append the deltas of one answer's new text."""
        self.run.usage.completion += len(part.token_ids)
        if self.token_details:
            choice.pending += positions_of(part)
            choice.token_ids += part.token_ids
        if choice.parser is not None:
            self._add_parsed(choice, choice.parser, part, deltas)
        elif part.text:
            deltas.append(self._delta(choice, f'{{"content":{quote(part.text)}}}'))
        if part.finish_reason is not None:
            deltas.append(self._last_delta(choice, part))

    def _add_parsed(self, choice: _StreamedChoice, parser: StreamParser, part: CompletionOutput, deltas: list[str]) -> None:
        events = parser.add(part.text) if part.text else []
        if part.finish_reason is not None:
            events = events + parser.finish(part.finish_reason == "length")
        kept = self.run.format.kept(events)
        if kept and all(event.kind == "reasoning" for event in kept):
            self.run.usage.reasoning += len(part.token_ids)
        for event in kept:
            message = self._message_delta(choice, event)
            if message is not None:
                deltas.append(self._delta(choice, message))

    def _message_delta(self, choice: _StreamedChoice, event: Event) -> str | None:
        if event.kind == "content":
            return f'{{"content":{quote(event.text)}{self.no_reasoning}}}'
        if event.kind == "reasoning":
            text = quote(event.text)
            return None if self.body.include_reasoning is False else f'{{"reasoning":{text},"reasoning_content":{text}}}'
        if event.kind == "tool_start":
            choice.has_calls = True
            call = {"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
            return json.dumps({"tool_calls": [call]})
        if event.kind == "tool_arguments":
            return f'{{"tool_calls": [{{"index": {event.index}, "function": {{"arguments": {quote(event.text)}}}}}]}}'
        return None

    def _delta(self, choice: _StreamedChoice, message: str, reason: str = "null", more: str = "") -> str:
        logprobs = "null"
        if self.token_details:
            if self.body.logprobs and choice.pending:
                content = chat_logprobs(self.run.llm.tokenizer, choice.pending, self.style)
                logprobs = json.dumps({"content": content, "refusal": None})
            if self.body.return_token_ids:
                more += f',"token_ids":{choice.token_ids}'
            choice.pending, choice.token_ids = [], []
        return f'{choice.index},"delta":{message},"logprobs":{logprobs},"finish_reason":{reason}{more}}}]'

    def _last_delta(self, choice: _StreamedChoice, part: CompletionOutput) -> str:
        """The delta with the finish reason."""
        choice.finished = True
        try:
            reason, stop = finish_reason_of(part)
        except Failure:
            self.run.context.record["finish_reason"] = part.finish_reason
            raise
        reason = "tool_calls" if choice.has_calls and reason == "stop" else reason
        self.run.context.record["finish_reason"] = reason
        return self._delta(choice, f"{{{self.no_reasoning[1:]}}}", quote(reason or ""), f',"stop_reason":{json.dumps(stop)}')
