"""Answers of a conversation, split into content, reasoning and tool calls: whole ones, and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Protocol, TypeVar

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import CompletionOutput, RequestOutput
from tinyvllm.server.core.generation import ChatRun
from tinyvllm.server.core.prompts import extra_size, require_tokenizer, run_aside
from tinyvllm.text.parsing import Event

T = TypeVar("T")


@dataclass
class Answer:
    """One whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)  # id, name, arguments (JSON; a prefix of it where max_tokens has cut them)
    last_call_is_cut: bool = False

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "content":
                self.content += event.text
            elif event.kind == "reasoning":
                self.reasoning += event.text
            elif event.kind == "tool_start":
                self.calls.append({"id": event.id, "name": event.name, "arguments": ""})
            elif event.kind == "tool_arguments":
                self.calls[event.index]["arguments"] += event.text
            elif event.kind == "tool_end":
                self.last_call_is_cut = event.broken


async def build_response(run: ChatRun, outputs: Sequence[RequestOutput], build: Callable[[], T]) -> T:
    """What `build` makes of whole answers, in a thread if they are long: it parses them and encodes their reasoning to count its tokens."""
    size = sum(len(part.text) for output in outputs for part in output.outputs)
    return await run_aside(size + extra_size(run.llm.tokenizer), build)


def parse_answer(run: ChatRun, part: CompletionOutput) -> Answer:
    """One of the n whole answers; its reasoning tokens are counted."""
    parser = run.format.parser(whole=True)
    if parser is None:
        return Answer(part.text)
    answer = Answer()
    answer.add(run.format.kept([*parser.add(part.text), *parser.finish(part.finish_reason == "length")]))
    if answer.reasoning:
        tokenizer = require_tokenizer(run.llm)
        run.usage.reasoning += len(tokenizer.encode(answer.reasoning, add_special_tokens=False))
    return answer


class BlockWriter(Protocol):
    """Formats blocks as the events of one API. Kinds of blocks are content, reasoning and call; `cut` ones lack their end."""

    def begin(self, kind: str, event: Event) -> None: ...
    def append(self, text: str) -> None: ...
    def end(self, cut: bool) -> None: ...


class BlockStream:
    """Turns one streamed answer into blocks that begin, grow and end, as the streams of Anthropic and of OpenAI's responses need them."""

    def __init__(self, run: ChatRun, writer: BlockWriter):
        self._run = run
        self._parser = run.format.parser(whole=False)
        self._writer = writer
        self._kind: str | None = None
        self.calls = 0

    def add(self, part: CompletionOutput) -> None:
        """The new text of one engine step."""
        usage = self._run.usage
        usage.completion += len(part.token_ids)
        events = self._parse(part)
        if events and all(event.kind == "reasoning" for event in events):
            usage.reasoning += len(part.token_ids)
        hidden = getattr(self._run.body, "include_reasoning", None) is False
        for event in self._run.format.kept(events):
            if event.kind != "reasoning" or not hidden:
                self._write(event)
        if part.finish_reason is not None:
            self._switch(None, cut=part.finish_reason in ("length", "deadline"))

    def _parse(self, part: CompletionOutput) -> list[Event]:
        if self._parser is None:
            return [Event("content", part.text)] if part.text else []
        events = self._parser.add(part.text) if part.text else []
        return events + self._parser.finish(part.finish_reason == "length") if part.finish_reason is not None else events

    def _write(self, event: Event) -> None:
        if event.kind == "tool_start":
            self._switch(None)
            self._switch("call", event)
            self.calls += 1
        elif event.kind == "tool_arguments":
            self._writer.append(event.text)
        elif event.kind == "tool_end":
            self._switch(None, cut=event.broken)
        elif event.text:
            if self._kind != event.kind:
                self._switch(event.kind, event)
            self._writer.append(event.text)

    def _switch(self, kind: str | None, event: Event | None = None, *, cut: bool = False) -> None:
        """End the open block and begin one of another kind."""
        if self._kind is not None:
            self._writer.end(cut)
        self._kind = kind
        if kind is not None and event is not None:
            self._writer.begin(kind, event)
