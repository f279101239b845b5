"""Conversations: the input of a chat template, and the prompt that the template renders from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.errors import TokenizerError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.prompts import (
    SHORT_TEXT,
    EncodedPrompt,
    Truncation,
    check_length,
    check_size,
    encode_truncated,
    extra_size,
    require_tokenizer,
    run_aside,
    text_size,
)
from tinyvllm.server.core.segment_store import RegisteredSegment, last_of_messages
from tinyvllm.server.core.tool_turns import as_plain_turns, has_tool_results, message_text, shows_tool_results, with_ended_calls, with_marks
from tinyvllm.text.chat import SlowRenderError, render_chat
from tinyvllm.text.template_budget import LOOP_SECONDS, MAX_SECONDS, at_most
from tinyvllm.text.tokenizer import Tokenizer

_RESERVED = ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenizer_or_template")
_RENDERED_DIFFERENTLY = (
    "the chat template renders the start of this conversation differently than at registration; send the same tools, documents and "
    "chat_template_kwargs, or register it again"
)
_REWRITTEN = "the chat template rewrites these messages when more follow, so they cannot be kept; register a text for /v1/completions"


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template. `template` None means the model's own."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    prefix: str = ""  # the rendered text must start with this: the text of the segments that hold the first messages


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as its chat template rendered it."""

    conversation: Conversation
    encoded: EncodedPrompt

    @property
    def text(self) -> str:
        return self.encoded.text or ""


def conversation_of(config: ServerConfig, data: Mapping[str, Any], variables: Mapping[str, Any]) -> Conversation:
    """The conversation of a body's plain objects. Failure for a client's own template unless the server allows it."""
    template = data.get("chat_template")
    if template is not None and not config.trust_request_chat_template:
        text = (
            "chat_template: this server accepts only the models' own templates; start it with --trust-request-chat-template to change that"
        )
        raise bad_field("chat_template", text, "unsupported_parameter")
    if data.get("continue_final_message") and data.get("add_generation_prompt"):
        text = "continue_final_message and add_generation_prompt are mutually exclusive; send one of them"
        raise bad_field("continue_final_message", text)
    check_variables(variables)
    return Conversation(
        messages=data["messages"],
        documents=data.get("documents"),
        template=template if template is not None else config.chat_template,
        variables=variables,
        add_generation_prompt=data.get("add_generation_prompt") is not False,
        continue_final_message=bool(data.get("continue_final_message")),
        add_special_tokens=bool(data.get("add_special_tokens")),
    )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Failure for template variables that are fields of the request."""
    if reserved := next((name for name in variables if name in _RESERVED), None):
        raise bad_field("chat_template_kwargs", f"chat_template_kwargs: {reserved} is a separate field of the request")


def reasoning_variables(effort: str | None) -> dict[str, Any]:
    """The template variables for a reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def after_segments(conversation: Conversation, segments: Sequence[RegisteredSegment]) -> Conversation:
    """The conversation preceded by the messages of segments."""
    if not segments:
        return conversation
    if conversation.add_special_tokens:
        text = "add_special_tokens: cannot be combined with segments, which start as the chat template renders them"
        raise bad_field("add_special_tokens", text)
    last = last_of_messages(segments)
    return replace(conversation, messages=[*(last.messages or ()), *conversation.messages], prefix=last.text or "")


def _normalized(conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> Conversation:
    """The conversation with its tools, without null fields. The role developer becomes system for templates that lack it.

    Templates read reasoning_content, gpt-oss's `thinking`; vLLM's clients send `reasoning`.
    """
    rename = "developer" not in (conversation.template or "")

    def normalize(message: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in message.items() if value is not None}
        if "reasoning" in fields:
            fields.setdefault("reasoning_content", fields["reasoning"])
        if "reasoning_content" in fields:
            fields.setdefault("thinking", fields["reasoning_content"])
        return {**fields, "role": "system"} if rename and fields["role"] == "developer" else fields

    return replace(conversation, messages=[normalize(message) for message in conversation.messages], tools=tools)


async def encode_conversation(
    llm: AsyncLLM,
    conversation: Conversation,
    tools: Sequence[Mapping[str, Any]] | None,
    truncation: Truncation | None = None,
    output: bool = True,
) -> ChatPrompt:
    """The prompt that the chat template renders. RequestError or TokenizerError if the template fails.

    output  the context must also hold an output token
    """
    wanted, tokenizer = _normalized(conversation, tools), require_tokenizer(llm)

    def encode() -> ChatPrompt:
        conversation, text = _render_with_results(tokenizer, wanted)
        if not text.startswith(conversation.prefix):
            raise bad_field("segments", f"segments: {_RENDERED_DIFFERENTLY}")
        if truncation is None:
            check_size(llm, text, "messages", output)
        ids = encode_truncated(llm, text, conversation.add_special_tokens, truncation)
        return ChatPrompt(conversation, EncodedPrompt(ids, text))

    size = text_size([wanted.messages, wanted.tools, wanted.documents, wanted.variables]) + extra_size(tokenizer)
    if wanted.template is not None:
        size += SHORT_TEXT  # a client's template may be slow: always in a thread
    prompt = await (_encode_short(encode) if size <= SHORT_TEXT else run_aside(size, encode))
    check_length(llm, prompt.encoded.token_ids, "messages", output)
    return prompt


async def render_conversation(llm: AsyncLLM, conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The text that the chat template renders, of any length that its budget allows. RequestError or TokenizerError if it fails."""
    wanted, tokenizer = _normalized(conversation, tools), require_tokenizer(llm)
    return await asyncio.to_thread(lambda: _render_with_results(tokenizer, wanted)[1])


async def _encode_short(encode: Callable[[], ChatPrompt]) -> ChatPrompt:
    """A short conversation, at once; in a thread if its template turns out to be slow, since a model's template is foreign code."""
    try:
        with at_most(LOOP_SECONDS):
            return encode()
    except SlowRenderError:
        return await asyncio.to_thread(encode)


async def encode_start(llm: AsyncLLM, conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> ChatPrompt:
    """The start of a conversation whose later messages are unknown. Failure if the template would render it differently then."""
    conversation, tokenizer = _normalized(conversation, tools), require_tokenizer(llm)
    role = "assistant" if conversation.messages[-1].get("role") == "user" else "user"
    longer = replace(conversation, messages=[*conversation.messages, {"role": role, "content": "Yes."}])

    def encode() -> EncodedPrompt:
        with at_most(MAX_SECONDS):  # for both renderings
            text = _render(tokenizer, conversation)
            with suppress(TokenizerError):  # the template may want another role next; that is no fault of the start
                if not _render(tokenizer, longer).startswith(text):
                    raise bad_field("messages", f"messages: {_REWRITTEN}")
        if not text.startswith(conversation.prefix):
            raise bad_field("after", f"after: {_RENDERED_DIFFERENTLY}")
        check_size(llm, text, "messages")
        return EncodedPrompt(tokenizer.encode(text, add_special_tokens=False), text)

    encoded = await asyncio.to_thread(encode)
    check_length(llm, encoded.token_ids, "messages")
    return ChatPrompt(conversation, encoded)


def _render_with_results(tokenizer: Tokenizer, conversation: Conversation) -> tuple[Conversation, str]:
    """(the conversation, its text). Tool results become turns of the user's if the template has no role for them."""
    with at_most(MAX_SECONDS):  # for up to four renderings
        if has_tool_results(conversation.messages):
            return _with_results(tokenizer, conversation)
        return conversation, _render(tokenizer, conversation)


def _with_results(tokenizer: Tokenizer, conversation: Conversation) -> tuple[Conversation, str]:
    plain = replace(conversation, messages=as_plain_turns(conversation.messages))
    try:
        text = _render(tokenizer, conversation)
    except SlowRenderError:
        raise  # another rendering would be as slow
    except TokenizerError as error:
        try:
            return plain, _render(tokenizer, plain)
        except TokenizerError:
            raise error from None  # the results are not what the template refuses
    if shows_tool_results(conversation.messages, text):
        return conversation, text
    marked, marks = with_marks(conversation.messages)
    marked_text = _render(tokenizer, replace(conversation, messages=marked, continue_final_message=False))
    return (conversation, text) if all(mark in marked_text for mark in marks) else (plain, _render(tokenizer, plain))


def _render(tokenizer: Tokenizer, conversation: Conversation) -> str:
    text = render_chat(
        tokenizer,
        with_ended_calls(conversation.messages),
        conversation.tools,
        conversation.add_generation_prompt and not conversation.continue_final_message,
        chat_template=conversation.template,
        documents=conversation.documents,
        **conversation.variables,
    )
    return _cut_after_final(text, conversation.messages[-1]) if conversation.continue_final_message else text


def _cut_after_final(text: str, message: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's content, so that the model continues it."""
    content = message_text(message)
    if message.get("role") != "assistant" or not content.strip():
        raise bad_field("continue_final_message", "continue_final_message: the last message must be the assistant's and contain text")
    start = text.rfind(content.strip())
    if start < 0:
        raise bad_field("continue_final_message", "continue_final_message: the chat template changes the text of the last message")
    whole = text.rfind(content)
    return text[: whole + len(content)] if whole >= 0 else text[: start + len(content.strip())]
