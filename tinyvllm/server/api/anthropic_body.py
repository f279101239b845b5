"""Bodies of /v1/messages, and their conversion to a conversation, tools and sampling params."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from tinyvllm.request import SamplingParams
from tinyvllm.server.core.answer_format import Tools
from tinyvllm.server.core.body import Body, EchoedBody, honoured, limited, refused, unheeded
from tinyvllm.server.core.conversation import Conversation
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.limits import MAX_COUNT, MAX_MESSAGES, MAX_NAME, MAX_PARTS, MAX_TOOLS, MAX_WORDS
from tinyvllm.server.core.params import output_kind, structure_of_format
from tinyvllm.server.core.schema import Name

_CACHED = "without effect: every prompt is cached by its tokens, and cache_creation_input_tokens is 0"
_NOT_ANTHROPIC = "not part of Anthropic's API"
_TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class CacheControl(EchoedBody):
    """A mark where the client wants its prompt cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class _Block(EchoedBody):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(EchoedBody):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(EchoedBody):
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
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class InputMessage(EchoedBody):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)]


class ToolDefinition(_Block):
    """A tool that the client runs; tools that Anthropic runs have other types and are refused."""

    type: Literal["custom"] | None = None
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    """Which tool to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether to reason, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    display: Literal["summarized", "omitted", "full"] | None = None


class OutputFormat(Body):
    """The format of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(..., alias="schema")


class OutputConfig(Body):
    """Format of the answer, and reasoning effort."""

    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(Body):
    """The client's own user."""

    user_id: Annotated[str, StringConstraints(max_length=MAX_NAME)] | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: Name = honoured(..., example=None)
    messages: list[InputMessage] = honoured(..., example=[{"role": "user", "content": "Hello"}], min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = honoured(example="Be brief.")
    tools: list[ToolDefinition] | None = honoured(example=[{"name": "look", "input_schema": {"type": "object"}}], max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = honoured(example={"type": "none"})
    thinking: ThinkingConfig | None = limited(
        says="a model without marks of reasoning ignores it, and X-Ignored-Fields names it", example={"type": "disabled"}
    )
    output_config: OutputConfig | None = honoured(
        example={"effort": "low"}, says="effort is passed to the chat template as reasoning_effort"
    )
    cache_control: CacheControl | None = limited(says=_CACHED, example={"type": "ephemeral"})
    speed: Literal["standard"] | None = limited(says="standard only", example="standard", beyond="fast")
    user_profile_id: str | None = limited(says="ignored", example="a")
    workspace_id: str | None = limited(says="ignored", example="a")


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int = honoured(..., example=4, ge=1, le=MAX_COUNT)
    stop_sequences: list[str] | None = honoured(example=["\n"], max_length=MAX_WORDS)
    stream: bool | None = honoured(example=False)
    temperature: float | None = honoured(example=0.5, ge=0, le=2)
    top_p: float | None = honoured(example=0.9, gt=0, le=1)
    top_k: int | None = honoured(example=5, ge=0, le=MAX_COUNT)
    metadata: Metadata | None = limited(says="user_id is written to the access log", example={"user_id": "user-1"})
    service_tier: Name | None = unheeded(says="auto and standard_only: there is one tier", heeded=("auto", "standard_only"), example="fast")
    thread: Any = refused(
        "there are no stored conversations; send all messages",
        example={"type": "create"},
        details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},  # then clients send all messages
    )
    container: Any = refused("containers are not implemented", example="c")
    diagnostics: Any = refused("diagnostics are not implemented", example={"previous_message_id": None})
    inference_geo: Any = refused("the server has one location", example="us")
    seed: int | None = honoured(example=7, says=_NOT_ANTHROPIC, ge=-(2**63), le=2**64 - 1)
    min_p: float | None = honoured(example=0.1, says=_NOT_ANTHROPIC, ge=0, le=1)
    priority: int | None = honoured(example=1, says=_NOT_ANTHROPIC, ge=-(2**31), le=2**31)
    cache_salt: Name | None = honoured(example="mine", says=_NOT_ANTHROPIC)
    deadline_ms: float | None = honoured(example=60000.0, says=_NOT_ANTHROPIC, gt=0, le=1e9)
    ttft_deadline_ms: float | None = honoured(example=60000.0, says=_NOT_ANTHROPIC, gt=0, le=1e9)
    receipt: bool | None = honoured(example=True, says=_NOT_ANTHROPIC)


def conversation_of_messages(body: CountRequest, template: str | None) -> Conversation:
    """The conversation of a body. Failure if the last message is the assistant's and cannot be continued."""
    messages = [*_system_message(body), *(one for message in body.messages for one in _plain_messages(message))]
    continued = body.messages[-1].role == "assistant"
    if continued and (not messages or not isinstance(messages[-1].get("content"), str) or messages[-1].get("tool_calls")):
        raise bad_field("messages", "messages: the last message is the assistant's, which can be continued only if it is a text")
    return Conversation(
        messages,
        template=template,
        variables=_variables(body),
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


def _variables(body: CountRequest) -> dict[str, Any]:
    enabled = body.thinking is not None and body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config is not None else None
    return {"enable_thinking": enabled, **({"reasoning_effort": effort} if effort is not None else {})}


def _system_message(body: CountRequest) -> list[dict[str, Any]]:
    if body.system is None:
        return []
    return [{"role": "system", "content": body.system if isinstance(body.system, str) else _joined_text(body.system)}]


def _joined_text(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _plain_messages(message: InputMessage) -> list[dict[str, Any]]:
    """One of Anthropic's messages in the form of chat templates: tool results are separate messages, before the rest of it."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    _check_roles(message.role, message.content)
    results = [_tool_result(block) for block in message.content if isinstance(block, ToolResultBlock)]
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    calls = [_tool_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    reasoning = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    if not texts and not calls and results:
        return results
    plain: dict[str, Any] = {"role": message.role}
    if calls:
        plain["tool_calls"] = calls
    if reasoning:
        plain["reasoning_content"] = "\n".join(reasoning)
    return [*results, {**plain, "content": _joined_text(texts)}]


def _check_roles(role: str, blocks: Sequence[Block]) -> None:
    if role == "user" and any(isinstance(block, (ToolUseBlock, ThinkingBlock, RedactedBlock)) for block in blocks):
        raise bad_field("messages", "messages: only assistant messages can contain tool_use and thinking blocks")
    if role == "assistant" and any(isinstance(block, ToolResultBlock) for block in blocks):
        raise bad_field("messages", "messages: only user messages can contain tool_result blocks")


def _tool_call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _tool_result(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content or ""
    text = content if isinstance(content, str) else _joined_text(content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


def tools_of(body: CountRequest) -> Tools:
    functions = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
            | ({"strict": False} if t.strict is False else {}),
        }
        for t in body.tools or []
    ]
    choice = body.tool_choice
    if choice is None:
        return Tools(functions)
    if choice.type == "tool" and choice.name is None:
        raise bad_field("tool_choice.name", 'tool_choice: type "tool" requires a name')
    name = choice.name if choice.type == "tool" else None
    return Tools(functions, _TOOL_CHOICES[choice.type], name, not choice.disable_parallel_tool_use)


def params_of(body: CountRequest, defaults: SamplingParams) -> SamplingParams:
    """The SamplingParams of a body; the defaults if its tokens are only counted."""
    if not isinstance(body, MessagesRequest):
        return defaults
    fields = {name: value for name in ("temperature", "top_p", "top_k", "min_p", "seed") if (value := getattr(body, name)) is not None}
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None and body.output_config.format is not None:
        fields["structured_outputs"] = structure_of_format("json_schema", body.output_config.format.schema_)
    kind = output_kind(body.stream)
    return replace(defaults, **fields, max_tokens=body.max_tokens, stop=body.stop_sequences, output_kind=kind)
