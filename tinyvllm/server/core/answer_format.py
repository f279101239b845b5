"""How the answer to a conversation is constrained and parsed: the dialect of the model, tool choice, and where reasoning ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import ReasoningParams, SamplingParams, StructuredOutputsParams
from tinyvllm.server.core.conversation import ChatPrompt
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.prompts import require_tokenizer
from tinyvllm.text.parsing import Event, Format, StreamParser, grammar_for, parser_for

Position = Literal["before", "inside", "after"]  # of the answer's start relative to the reasoning, as request.ReasoningParams spells it
_MAX_CACHED_FORMATS = 32  # an engine; clients may send templates of their own


@dataclass(frozen=True)
class Tools:
    """The functions of a conversation in OpenAI's form, and whether one must be called: choice is none, auto or required."""

    functions: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    required_name: str | None = None  # the only one that may be called
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.choice == "required" and not self.functions:
            raise bad_field("tool_choice", "tool_choice: requires a tool call, but the request has no tools")

    @property
    def enabled(self) -> bool:
        """Whether the template sees the tools, and calls are parsed."""
        return bool(self.functions) and self.choice != "none"

    @property
    def shown(self) -> list[Mapping[str, Any]] | None:
        """The tools for the chat template."""
        return list(self.functions) if self.enabled else None


@dataclass(frozen=True)
class AnswerFormat:
    """How one answer is split into content, reasoning and tool calls."""

    dialect: Format | None  # None: the whole answer is content
    tools: Tools
    reasoning: bool
    starts_in_reasoning: bool

    def parser(self, whole: bool) -> StreamParser | None:
        """A parser for one of the n answers; None if the whole answer is content."""
        if self.dialect is None:
            return None
        return StreamParser(self.dialect, self.tools.shown, self.reasoning, opened=self.starts_in_reasoning, whole=whole)

    def kept(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events that the client gets: without parallel calls, only those of the first call."""
        return events if self.tools.parallel else [event for event in events if event.index < 1]


def answer_format(llm: AsyncLLM, prompt: ChatPrompt, tools: Tools, params: SamplingParams) -> tuple[AnswerFormat, SamplingParams]:
    """The format of the answer to a prompt, and the params that enforce it.

    Failure or RequestError for tools that cannot be called as required.
    """
    dialect = _dialect(llm, prompt.conversation.template, tools.enabled)
    position = _answer_position(dialect, prompt)
    reasoning, starts_in_reasoning = True, position == "inside"
    structure = dialect.answer if params.structured_outputs is not None else ""  # a required call has the whole message in its grammar
    if tools.choice == "required":
        dialect, params = _require_call(dialect, tools, params)
    if params.structured_outputs is not None or params.thinking_token_budget is not None:
        params = _with_thinking(dialect, position, params, structure)
        if not _may_reason(params, position):
            reasoning = starts_in_reasoning = False  # all of the answer is content, even if the template has opened reasoning
    parsed = tools.enabled and dialect.name != "none" or dialect.think is not None
    if parsed and dialect.keep_special_tokens:
        params = replace(params, skip_special_tokens=False)
    return AnswerFormat(dialect if parsed else None, tools, reasoning, starts_in_reasoning), params


def can_reason(llm: AsyncLLM, template: str | None, tools: Tools) -> bool:
    """Whether the model marks its reasoning, so that it can be bounded and split from the answer."""
    return _dialect(llm, template, tools.enabled).think is not None


_dialects: WeakKeyDictionary[AsyncLLM, dict[tuple[str | None, bool], Format]] = WeakKeyDictionary()


def _dialect(llm: AsyncLLM, template: str | None, with_tools: bool) -> Format:
    """The dialect of the model's template, or of the request's; cached, since every request needs it."""
    cached = _dialects.setdefault(llm, {})
    if (template, with_tools) not in cached:
        tokenizer = require_tokenizer(llm)
        templates = tokenizer.chat_templates
        own = templates.get("tool_use") if with_tools and "tool_use" in templates else templates.get("default")
        special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        if len(cached) >= _MAX_CACHED_FORMATS:
            cached.clear()
        cached[template, with_tools] = parser_for(templates.get(template, template) if template is not None else own, special)
    return cached[template, with_tools]


def _answer_position(dialect: Format, prompt: ChatPrompt) -> Position:
    """Where the answer starts. With thinking disabled, or in the middle of an answer, it starts after the reasoning."""
    conversation = prompt.conversation
    content = conversation.messages[-1].get("content") if conversation.continue_final_message else None
    if isinstance(content, str):
        return "inside" if dialect.opened(content, continued=True) else "after"
    if dialect.opened(prompt.text):
        return "inside"
    closed = dialect.think is not None and prompt.text.rstrip().endswith(dialect.think[1])
    return "after" if closed or conversation.variables.get("enable_thinking") is False else "before"


def _with_thinking(dialect: Format, position: Position, params: SamplingParams, structure: str) -> SamplingParams:
    """Tell the engine the marks of reasoning: the template may be another than the model's own. Without marks, nothing waits for them.

    structure  what a structure has before it, after the closing mark
    """
    if dialect.think is not None:
        opening, closing = dialect.think
        return replace(params, reasoning=ReasoningParams(opening, closing + structure, position))
    if params.structured_outputs is None:
        return params
    return replace(params, structured_outputs=replace(params.structured_outputs, enable_in_reasoning=True))


def _may_reason(params: SamplingParams, position: Position) -> bool:
    """Whether the answer can contain reasoning: before a structure if it starts there, or in a structure that describes it."""
    structure = params.structured_outputs
    if structure is None:
        return True
    return structure.kind in ("regex", "grammar") if structure.enable_in_reasoning else position != "after"


def _require_call(dialect: Format, tools: Tools, params: SamplingParams) -> tuple[Format, SamplingParams]:
    if params.structured_outputs is not None:
        text = "structured_outputs: cannot be combined with a required tool call, which sets the format of the answer"
        raise bad_field("structured_outputs", text)
    forced = dialect.forced()
    grammar = grammar_for(forced, list(tools.functions), tools.required_name, tools.parallel)
    lenient = all(tool["function"].get("strict") is False for tool in tools.functions)
    return forced, replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar, lenient=lenient))
