"""Bodies of /v1/responses, and their conversion to a conversation, tools and sampling params."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from tinyvllm.request import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from tinyvllm.server.core.answer_format import Tools
from tinyvllm.server.core.body import Body, EchoedBody, honoured, limited, refused, unheeded
from tinyvllm.server.core.conversation import Conversation, check_variables, reasoning_variables
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.limits import MAX_COUNT, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from tinyvllm.server.core.params import check_logprob_token_ids, output_kind, sampling_fields, structure_of_format, structure_params
from tinyvllm.server.core.schema import ACCESS_LOG_ONLY, DEFAULT_MODEL, Name, SamplingFields, Texts

_NOT_OPENAI = "not part of OpenAI's API"
_STORE_NOTE = "the last answers of each key are kept in memory for a day"


class InputText(EchoedBody):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(EchoedBody):
    type: Literal["refusal"]
    refusal: str


class InputMessage(EchoedBody):
    """A message; `type` is optional."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | RefusalPart], Field(max_length=MAX_PARTS)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(EchoedBody):
    """A tool call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    async_: bool | None = Field(None, alias="async")
    caller: dict[str, Any] | None = None
    namespace: str | None = None


class FunctionCallOutput(EchoedBody):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(max_length=MAX_PARTS)]
    id: str | None = None
    status: str | None = None


class ReasoningText(EchoedBody):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(EchoedBody):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    status: str | None = None


def _item_type(item: Any) -> Any:
    """The type of an item; optional in messages."""
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None) or "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class FunctionTool(EchoedBody):
    """A function, in the flat form of this endpoint."""

    type: Literal["function"]
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Name | None = unheeded(says='"medium"', heeded=("medium",), example="low")


class Reasoning(Body):
    effort: str | None = None
    summary: Name | None = unheeded(says="auto: there are no summaries", heeded=("auto",), example="detailed")
    generate_summary: Name | None = unheeded(says="there are no summaries", example="auto")


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class InputTokensRequest(Body):
    """POST /v1/responses/input_tokens: the fields that the prompt depends on."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] = honoured(..., example="Hello", min_length=1)
    instructions: str | None = honoured(example="Be brief.")
    previous_response_id: Name | None = honoured(says=_STORE_NOTE)
    conversation: Any = refused("there are no stored conversations; send previous_response_id", example="conv_1")
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = limited(
        says="functions only", example=[{"type": "function", "name": "look", "parameters": {}}], beyond=[{"type": "web_search"}]
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = honoured(example="none")
    parallel_tool_calls: bool | None = honoured(example=True)
    text: TextConfig | None = honoured(example={"format": {"type": "json_object"}})
    reasoning: Reasoning | None = limited(says="effort is passed to the chat template; there are no summaries", example={"effort": "low"})
    truncation: Name | None = unheeded(says="disabled: the client shortens its input", heeded=("disabled",), example="auto")
    personality: Name | None = unheeded(says="the instructions say how to answer", example="friendly")
    chat_template_kwargs: dict[str, Any] | None = honoured(example={"enable_thinking": False}, says=_NOT_OPENAI)


class ResponsesRequest(InputTokensRequest, SamplingFields):
    """POST /v1/responses."""

    max_output_tokens: int | None = honoured(example=4, ge=1, le=MAX_COUNT)
    top_logprobs: int | None = honoured(
        example=2, ge=ALL_LOGPROBS, le=MAX_LOGPROBS, says='requires include=["message.output_text.logprobs"]; -1 lists the whole vocabulary'
    )
    stream: bool | None = honoured(example=False)
    stream_options: ResponseStreamOptions | None = limited(says="no padding", example={}, beyond={"include_obfuscation": True})
    store: bool | None = honoured(example=False, says=f"true if unset: {_STORE_NOTE}")
    metadata: Texts | None = honoured(example={"a": "b"}, says="returned in the response")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = limited(
        says="log-probabilities; encrypted reasoning is accepted and omitted", example=["message.output_text.logprobs"], beyond=["web"]
    )
    include_reasoning: bool | None = honoured(example=True, says="vLLM: false omits the reasoning items")
    user: str | None = limited(says=ACCESS_LOG_ONLY, example="user-1")
    safety_identifier: str | None = limited(says="ignored", example="user-1")
    prompt_cache_key: str | None = limited(says="not needed: the prefix cache matches tokens", example="mine")
    prompt_cache_retention: str | None = limited(says="not needed", example="in_memory")
    prompt_cache_options: Any = refused("the prefix cache evicts by use only", example={"mode": "explicit"})
    service_tier: Name | None = unheeded(says="auto and default: there is one tier", heeded=("auto", "default"), example="flex")
    background: bool | None = honoured(example=True, says="the answer runs without its client, which polls it by its id; not with stream")
    background_options: Any = refused("answers of the background have no options", example={"a": 1})
    enable_response_messages: bool | None = honoured(
        example=True, says="vLLM: adds input_messages and output_messages, texts and token ids as the model reads and writes them"
    )
    prompt: Any = refused("there are no stored prompts", example={"id": "p"})
    max_tool_calls: Any = refused("the server runs no tools", example=1)
    context_management: Any = refused("the client shortens its input", example=[{"type": "compaction"}], harmless=([],))
    access_programs: Any = refused("access programs are not implemented", example={"a": 1})
    image: Any = refused("the model reads and writes text only", example={"a": 1})
    moderation: Any = refused("moderation is not implemented", example={"model": "m"})

    @model_validator(mode="after")
    def _check_background(self) -> ResponsesRequest:
        if self.background and self.store is False:
            raise PydanticCustomError("background", "background: background can only be used when `store` is true")
        if self.background and self.stream:
            raise PydanticCustomError("background", "background: cannot be combined with stream; poll the response by its id")
        return self


def turns_of(body: InputTokensRequest, before: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The messages of the input items, after those that previous_response_id means. Instructions are of one request only."""
    return _add_items([dict(message) for message in before], body.input)


def turns_with_output(turns: Sequence[Mapping[str, Any]], output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages and the items of their answer, as if the client had sent both."""
    return _add_items([dict(message) for message in turns], _OUTPUT.validate_python(list(output)))


def conversation_of(body: InputTokensRequest, turns: Sequence[Mapping[str, Any]], template: str | None) -> Conversation:
    """The conversation of instructions and messages."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = {**reasoning_variables(effort), **(body.chat_template_kwargs or {})}
    check_variables(variables)
    return Conversation([*system, *turns], template=template, variables=variables)


_OUTPUT = TypeAdapter(list[Item])


def _add_items(messages: list[dict[str, Any]], items: str | list[Any]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        _add_item(messages, item)
    for message in messages:
        if not message.get("tool_calls"):
            message.setdefault("content", "")  # reasoning without an answer
    return messages


def _add_item(messages: list[dict[str, Any]], item: InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem) -> None:
    """Add an item in the form of chat templates: tool calls and reasoning are parts of the assistant's message."""
    if isinstance(item, InputMessage):
        _add_message(messages, item)
        return
    if isinstance(item, FunctionCallOutput):
        text = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    message = messages[-1]
    if isinstance(item, ReasoningItem):
        message["reasoning_content"] = "\n".join(part.text for part in item.content or item.summary or [])
    else:
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        message.setdefault("tool_calls", []).append(call)


def _add_message(messages: list[dict[str, Any]], item: InputMessage) -> None:
    parts = [InputText(type="text", text=item.content)] if isinstance(item.content, str) else item.content
    text = "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in parts)
    last = messages[-1] if messages else {}
    if item.role == "assistant" and last.get("role") == "assistant" and "content" not in last:
        last["content"] = text  # the message whose reasoning came before
    else:
        messages.append({"role": item.role, "content": text})


def tools_of(body: InputTokensRequest) -> Tools:
    functions = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description or "", "parameters": t.parameters or {}}
            | ({"strict": False} if t.strict is False else {}),
        }
        for t in body.tools or []
    ]
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        return Tools(functions, choice or "auto", parallel=parallel)
    return Tools(functions, "required", choice.name, parallel)


def params_of(body: ResponsesRequest, defaults: SamplingParams) -> SamplingParams:
    fields = sampling_fields(body)
    text_format = body.text.format if body.text is not None else None
    if text_format is not None:
        fields["structured_outputs"] = structure_of_format(text_format.type, text_format.schema_, text_format.strict is False)
    if body.structured_outputs is not None:
        if fields.get("structured_outputs") is not None:
            raise bad_field("structured_outputs", "structured_outputs and text.format are mutually exclusive; send one of them")
        fields["structured_outputs"] = structure_params(body.structured_outputs)
    if wants_logprobs(body):
        fields["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise bad_field("top_logprobs", 'top_logprobs: requires include=["message.output_text.logprobs"]')
    check_logprob_token_ids(body, fields.get("logprobs"))
    return replace(defaults, **fields, max_tokens=body.max_output_tokens, output_kind=output_kind(body.stream))


def wants_logprobs(body: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (body.include or [])
