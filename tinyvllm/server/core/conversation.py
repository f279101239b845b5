"""One turn of a conversation, whatever API asks for it: its prompt, and its answer read as content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams, Thinking
from tinyvllm.server.core.context import Call
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.params import request_options
from tinyvllm.server.core.prompts import Conversation, Encoded, encode_conversation, tokenizer_of
from tinyvllm.server.core.usage import Count, outputs_of
from tinyvllm.text.parsing import Event, Format, StreamParser, grammar_for, parser_for


@dataclass(frozen=True)
class Tools:
    """The functions of a turn in OpenAI's spelling, and whether one must be called: choice is none, auto or required."""

    given: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    named: str | None = None  # the one that must be called
    parallel: bool = True

    @property
    def readable(self) -> bool:
        return bool(self.given) and self.choice != "none"


@dataclass
class Turn:
    """A turn that is ready to run."""

    call: Call
    llm: AsyncLLM
    model: str
    prompt: Encoded
    params: SamplingParams
    format: Format | None  # None: everything is content
    tools: Tools
    reasoning: bool
    opened: bool
    body: Any
    count: Count = field(default_factory=Count)

    def parser(self, whole: bool) -> StreamParser | None:
        """A reader for one of the n answers; None where there is nothing to tell apart."""
        if self.format is None:
            return None
        tools = list(self.tools.given) if self.tools.readable else None
        return StreamParser(self.format, tools, self.reasoning, opened=self.opened, whole=whole)

    def kept(self, events: Sequence[Event]) -> Sequence[Event]:
        """What is told of an answer: one call at most where calls may not be parallel."""
        return events if self.tools.parallel else [event for event in events if event.index < 1]

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What the engine gives; the prompt is counted with the first."""
        first = True
        on = request_options(self.call, self.body)
        async with aclosing(outputs_of(self.llm, [self.prompt], self.params, on, self.call.name)) as outputs:
            async for _, output in outputs:
                if first:
                    self.count.add_prompt(output)
                    first = False
                yield output

    async def last(self) -> RequestOutput:
        """The whole answer, which has been counted."""
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                final = output
        self.count.completion = sum(len(part.token_ids) for part in final.outputs)
        self.count.note(self.call)
        return final


_formats: WeakKeyDictionary[AsyncLLM, dict[tuple[str | None, bool], Format]] = WeakKeyDictionary()


async def begin(
    call: Call, llm: AsyncLLM, model: str, conversation: Conversation, tools: Tools, params: SamplingParams, body: Any, *, reasoning: bool
) -> Turn:
    """A Turn of a conversation. Failure, RequestError or TokenizerError for what the template or the tools cannot be."""
    if tools.choice == "required" and not tools.given:
        raise bad_field("tool_choice", "tool_choice: a call is required, and there are no tools")
    conversation = plain(conversation, list(tools.given) if tools.readable else None)
    prompt = await encode_conversation(llm, conversation, getattr(body, "truncate_prompt_tokens", None))
    dialect = _format(llm, conversation.template, tools.readable)
    begins = _begins(dialect, conversation, prompt.text or "")
    opened = begins == "inside"
    if tools.choice == "required":
        dialect, params = _enforce(dialect, tools, params)
    if params.structured_outputs is not None or params.thinking_token_budget is not None:
        params = _thinking(dialect, begins, params)
        if not _may_think(params, begins):
            reasoning = opened = False  # all of it is content, whatever the template has opened
    needed = tools.readable and (dialect.name != "none") or dialect.think is not None
    if needed and dialect.keep_special_tokens:
        params = replace(params, skip_special_tokens=False)
    return Turn(call, llm, model, prompt, params, dialect if needed else None, tools, reasoning, opened, body)


def _begins(dialect: Format, conversation: Conversation, prompt: str) -> str:
    """Where the answer begins, as Thinking says it. Nobody begins to think who was told not to, or who is in the midst of an answer."""
    content = conversation.messages[-1].get("content") if conversation.continue_final_message else None
    if isinstance(content, str):
        return "inside" if dialect.opened(content, continued=True) else "behind"
    if dialect.opened(prompt):
        return "inside"
    closed = dialect.think is not None and prompt.rstrip().endswith(dialect.think[1])
    return "behind" if closed or conversation.variables.get("enable_thinking") is False else "before"


def _thinking(dialect: Format, begins: str, params: SamplingParams) -> SamplingParams:
    """What the engine has to know of thoughts: the template need not be the one that it knows. Without marks nothing waits for them."""
    if dialect.think is not None:
        return replace(params, thinking=Thinking(*dialect.think, begins))
    if params.structured_outputs is None:
        return params
    return replace(params, structured_outputs=replace(params.structured_outputs, enable_in_reasoning=True))


def _may_think(params: SamplingParams, begins: str) -> bool:
    """Whether thoughts may stand in the answer: before a structure, where there is room, or in a structure that describes them."""
    structure = params.structured_outputs
    if structure is None:
        return True
    return structure.kind in ("regex", "grammar") if structure.enable_in_reasoning else begins != "behind"


def _enforce(dialect: Format, tools: Tools, params: SamplingParams) -> tuple[Format, SamplingParams]:
    if params.structured_outputs is not None:
        raise bad_field("response_format", "response_format: an answer that must be a call of a tool has no other format")
    forced = dialect.forced()
    lark = grammar_for(forced, list(tools.given), tools.named, tools.parallel)
    return forced, replace(params, structured_outputs=StructuredOutputsParams(grammar=lark))


def _format(llm: AsyncLLM, template: str | None, with_tools: bool) -> Format:
    """The dialect of a model's template, or of the one that stands for it; asked for at every request, so kept."""
    kept = _formats.setdefault(llm, {})
    if (template, with_tools) not in kept:
        tokenizer = tokenizer_of(llm)
        templates = tokenizer.chat_templates
        own = templates.get("tool_use") if with_tools and "tool_use" in templates else templates.get("default")
        special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        if len(kept) >= 32:
            kept.clear()
        kept[template, with_tools] = parser_for(templates.get(template, template) if template is not None else own, special)
    return kept[template, with_tools]


def plain(conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> Conversation:
    """A conversation with its tools, without what clients send back as null; a developer is the system of templates that know none."""
    rename = "developer" not in (conversation.template or "")

    def told(message: Mapping[str, Any]) -> dict[str, Any]:
        said = {name: value for name, value in message.items() if value is not None}
        return {**said, "role": "system"} if rename and said["role"] == "developer" else said

    return replace(conversation, messages=[told(message) for message in conversation.messages], tools=tools)


@dataclass
class Answered:
    """One whole answer, told apart."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)  # id, name, arguments (JSON)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "content":
                self.content += event.text
            elif event.kind == "reasoning":
                self.reasoning += event.text
            elif event.kind == "tool_start":
                self.calls.append({"id": event.id, "name": event.name, "arguments": ""})
            elif event.kind == "tool_arguments":
                self.calls[event.index]["arguments"] += event.text


def read_whole(turn: Turn, part: CompletionOutput) -> Answered:
    """One of the n answers, as what it consists of."""
    parser = turn.parser(whole=True)
    if parser is None:
        return Answered(part.text)
    answered = Answered()
    answered.take(turn.kept([*parser.add(part.text), *parser.finish()]))
    if answered.reasoning:
        tokenizer = tokenizer_of(turn.llm)
        turn.count.reasoning += len(tokenizer.encode(answered.reasoning, add_special_tokens=False))
    return answered


class Blocks:
    """Events of one streamed answer as blocks that begin, grow and end, which is how Anthropic's and OpenAI's newer streams tell it.

    `writer` gets begin(kind, event), grow(text) and end(); kinds are content, reasoning and call.
    """

    def __init__(self, turn: Turn, writer: BlockWriter):
        self._turn = turn
        self._parser = turn.parser(whole=False)
        self._writer = writer
        self._kind: str | None = None
        self.calls = 0

    def read(self, part: CompletionOutput) -> None:
        """What a step brought."""
        self._turn.count.completion += len(part.token_ids)
        if self._parser is None:
            events = [Event("content", part.text)] if part.text else []
        else:
            events = self._parser.add(part.text) if part.text else []
            if part.finish_reason is not None:
                events += self._parser.finish()
        if events and all(event.kind == "reasoning" for event in events):
            self._turn.count.reasoning += len(part.token_ids)
        for event in self._turn.kept(events):
            self._take(event)
        if part.finish_reason is not None:
            self._change(None)

    def _take(self, event: Event) -> None:
        if event.kind == "tool_start":
            self._change(None)
            self._change("call", event)
            self.calls += 1
        elif event.kind == "tool_arguments":
            self._writer.grow(event.text)
        elif event.kind == "tool_end":
            self._change(None)
        elif event.text:
            if self._kind != event.kind:
                self._change(event.kind, event)
            self._writer.grow(event.text)

    def _change(self, kind: str | None, event: Event | None = None) -> None:
        if self._kind is not None:
            self._writer.end()
        self._kind = kind
        if kind is not None and event is not None:
            self._writer.begin(kind, event)


class BlockWriter(Protocol):
    """Who spells blocks as an API's events."""

    def begin(self, kind: str, event: Event) -> None: ...
    def grow(self, text: str) -> None: ...
    def end(self) -> None: ...
