"""From the prompts of a request to token ids, off the event loop: a long prompt must not hold up the other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.engine.prompt import encode_piece
from tinyvllm.errors import TokenizerError
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.text.chat import render_chat
from tinyvllm.text.tokenizer import Tokenizer

T = TypeVar("T")
_SHORT = 2000  # characters that are encoded at once: less time than handing them to a thread


@dataclass(frozen=True)
class Encoded:
    """A prompt as the engine takes it. `text` is None where the client sent token ids."""

    token_ids: list[int]
    text: str | None = None

    def prompt(self) -> dict[str, Any]:
        """As AsyncLLM takes it."""
        return {"prompt_token_ids": self.token_ids} if self.text is None else {"prompt_token_ids": self.token_ids, "prompt": self.text}


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given. `template` None takes the model's."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    begins: str = ""  # what the text must begin with: that of the chunks which hold the first messages


def tokenizer_of(llm: AsyncLLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise Failure(400, "this model was loaded without its tokenizer: send token ids", code="no_tokenizer")
    return llm.tokenizer


async def encode_texts(
    llm: AsyncLLM,
    prompt: Any,
    name: str,
    *,
    special: bool = True,
    keep: int | None = None,
    limit: bool = True,
    head: list[int] | None = None,
) -> list[Encoded]:
    """Every prompt of a field that holds a text, a list of them, token ids or a list of those.

    keep: so many last tokens, -1 what fits. limit: refuse what is beyond the context. head: token ids that each of them goes on from; then
    it may be empty.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not prompt and head is None:
        raise bad_field(name, f"{name}: is empty")
    elif not prompt:
        prompts = [""]
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)

    def encode(item: Any) -> Encoded:
        if isinstance(item, str):
            if limit and keep is None:
                check_size(llm, item, name)
            if head is not None:
                return Encoded(head + encode_piece(llm.tokenizer, item, begins=False)[1] if item else head)
            return Encoded(_last(llm, tokenizer_of(llm).encode(item, add_special_tokens=special), keep), item)
        return Encoded(_last(llm, item, keep) if head is None else head + item)

    encoded = await _aside(sum(map(len, prompts)), lambda: [encode(item) for item in prompts])
    for index, one in enumerate(encoded if limit else ()):
        check_length(llm, one.token_ids, name if len(encoded) == 1 else f"{name}[{index}]")
    return encoded


async def encode_conversation(llm: AsyncLLM, conversation: Conversation, keep: int | None = None) -> Encoded:
    """A conversation through the chat template. RequestError or TokenizerError if it refuses."""
    tokenizer = tokenizer_of(llm)

    def encode() -> Encoded:
        text = _render(tokenizer, conversation)
        if not text.startswith(conversation.begins):
            raise bad_field("chunks", f"chunks: {_OTHERWISE}")
        if keep is None:
            check_size(llm, text, "messages")
        return Encoded(_last(llm, tokenizer.encode(text, add_special_tokens=conversation.add_special_tokens), keep), text)

    size = sum(len(m["content"]) if isinstance(m.get("content"), str) else _SHORT for m in conversation.messages)
    encoded = await _aside(size if conversation.template is None else _SHORT + 1, encode)  # a template of somebody's may take its time
    check_length(llm, encoded.token_ids, "messages")
    return encoded


async def encode_beginning(llm: AsyncLLM, conversation: Conversation) -> Encoded:
    """The beginning of a conversation whose further messages are not known. Failure where the template would write it otherwise then."""
    tokenizer = tokenizer_of(llm)
    role = "assistant" if conversation.messages[-1].get("role") == "user" else "user"
    longer = replace(conversation, messages=[*conversation.messages, {"role": role, "content": "Yes."}])

    def encode() -> Encoded:
        text = _render(tokenizer, conversation)
        with suppress(TokenizerError):  # a template may want another role here; that nobody goes on so is no fault of the beginning
            if not _render(tokenizer, longer).startswith(text):
                raise bad_field("messages", f"messages: {_CHANGES}")
        if not text.startswith(conversation.begins):
            raise bad_field("after", f"after: {_OTHERWISE}")
        check_size(llm, text, "messages")
        return Encoded(tokenizer.encode(text, add_special_tokens=False), text)

    encoded = await asyncio.to_thread(encode)
    check_length(llm, encoded.token_ids, "messages")
    return encoded


_OTHERWISE = (
    "the chat template writes the beginning of this conversation otherwise than when it was registered: send the same tools, documents and "
    "chat_template_kwargs, or register it once more"
)
_CHANGES = "the chat template changes what it has written of them when more follow, so they cannot be held: register a text for completions"


def check_length(llm: AsyncLLM, token_ids: list[int], name: str) -> None:
    """Failure 400 for a prompt that leaves no room for an answer."""
    longest = llm.max_model_len
    if len(token_ids) >= longest:
        text = f"{name}: {len(token_ids)} tokens, and the model's context of {longest} must also hold an answer"
        raise bad_field(name, text, "context_length_exceeded")
    if not token_ids:
        raise bad_field(name, f"{name}: holds no token")


_longest: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()  # characters of the longest token


def check_size(llm: AsyncLLM, text: str, name: str) -> None:
    """Failure 400 for a text that cannot fit, however it is tokenised: a megabyte would take a second and 50 MB to be refused."""
    context = llm.max_model_len
    if len(text) <= 32 * context:
        return
    tokenizer = tokenizer_of(llm)
    if tokenizer not in _longest:
        _longest[tokenizer] = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
    if (least := len(text) // max(1, _longest[tokenizer])) >= context:
        text = f"{name}: at least {least} tokens, and the model's context of {context} must also hold an answer"
        raise bad_field(name, text, "context_length_exceeded")


async def _aside(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _SHORT else await asyncio.to_thread(work)


def _last(llm: AsyncLLM, token_ids: list[int], keep: int | None) -> list[int]:
    if keep is None:
        return token_ids
    if keep == -1:
        keep = llm.max_model_len - 1
    return token_ids[-keep:] if keep else []


def _render(tokenizer: Tokenizer, conversation: Conversation) -> str:
    text = render_chat(
        tokenizer,
        conversation.messages,
        conversation.tools,
        conversation.add_generation_prompt and not conversation.continue_final_message,
        chat_template=conversation.template,
        documents=conversation.documents,
        **conversation.variables,
    )
    return _up_to_final(text, conversation.messages[-1]) if conversation.continue_final_message else text


def _up_to_final(text: str, message: Mapping[str, Any]) -> str:
    """The prompt without what the template writes behind the last message, so that the model goes on with it."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    if message.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise bad_field("continue_final_message", "continue_final_message: the last message must be the assistant's, with a text")
    at = text.rfind(content.strip())
    if at < 0:
        raise bad_field("continue_final_message", "continue_final_message: the chat template changes the last message's text")
    whole = text.rfind(content)
    return text[: whole + len(content)] if whole >= 0 else text[: at + len(content.strip())]
