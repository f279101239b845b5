"""Encodes the text prompts of a request, off the event loop: a long prompt must not delay other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tinyvllm.engine.api import AsyncLLM, encode_piece
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.text.tokenizer import Tokenizer

T = TypeVar("T")
SHORT_TEXT = 2000  # characters; encoding them takes less time than starting a thread


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine takes it. `text` is None if the client sent token ids."""

    token_ids: list[int]
    text: str | None = None

    def engine_prompt(self) -> dict[str, Any]:
        """The argument of AsyncLLM.generate."""
        return {"prompt_token_ids": self.token_ids} if self.text is None else {"prompt_token_ids": self.token_ids, "prompt": self.text}


def require_tokenizer(llm: AsyncLLM) -> Tokenizer:
    """The tokenizer of an engine; Failure 400 if it was loaded without one."""
    if llm.tokenizer is None:
        raise Failure(400, "this model was loaded without a tokenizer; send token ids", code="no_tokenizer")
    return llm.tokenizer


async def encode_texts(
    llm: AsyncLLM,
    prompt: Any,
    name: str,
    *,
    special: bool = True,
    keep: int | None = None,
    limit: bool = True,
    prefix: list[int] | None = None,
) -> list[EncodedPrompt]:
    """The prompts of a field that holds a text, a list of texts, token ids or a list of lists of token ids.

    special  add the tokenizer's special tokens to texts
    keep     keep only this number of last tokens; -1 keeps what fits into the context
    limit    refuse prompts longer than the context
    prefix   token ids that precede each prompt (segments); each prompt may then be empty
    """
    prompts = _prompt_list(prompt, name, prefix is not None)

    def encode(item: Any) -> EncodedPrompt:
        if not isinstance(item, str):
            return EncodedPrompt(last_tokens(llm, item, keep) if prefix is None else prefix + item)
        if limit and keep is None:
            check_size(llm, item, name)
        if prefix is not None:
            return EncodedPrompt(prefix + encode_piece(llm.tokenizer, item, begins=False)[1] if item else prefix)
        ids = require_tokenizer(llm).encode(item, add_special_tokens=special)
        return EncodedPrompt(last_tokens(llm, ids, keep), item)

    encoded = await run_aside(sum(map(len, prompts)), lambda: [encode(item) for item in prompts])
    for index, one in enumerate(encoded if limit else ()):
        check_length(llm, one.token_ids, name if len(encoded) == 1 else f"{name}[{index}]")
    return encoded


def _prompt_list(prompt: Any, name: str, may_be_empty: bool) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        if may_be_empty:
            return [""]
        raise bad_field(name, f"{name}: is empty")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def check_length(llm: AsyncLLM, token_ids: list[int], name: str) -> None:
    """Failure 400 for an empty prompt, or one that leaves no room for an output token."""
    context = llm.max_model_len
    if len(token_ids) >= context:
        raise _too_long(name, f"{len(token_ids)} tokens", context)
    if not token_ids:
        raise bad_field(name, f"{name}: is empty after tokenization")


_max_token_chars: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()  # characters of each tokenizer's longest token


def check_size(llm: AsyncLLM, text: str, name: str) -> None:
    """Failure 400 for a text that cannot fit, however it is tokenized. Tokenizing a megabyte would take a second and 50 MB."""
    context = llm.max_model_len
    if len(text) <= 32 * context:
        return
    tokenizer = require_tokenizer(llm)
    if tokenizer not in _max_token_chars:
        _max_token_chars[tokenizer] = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
    if (minimum := len(text) // max(1, _max_token_chars[tokenizer])) >= context:
        raise _too_long(name, f"at least {minimum} tokens", context)


def _too_long(name: str, size: str, context: int) -> Failure:
    text = f"{name}: {size} do not fit into the model's context of {context} tokens, which must also hold the output"
    return bad_field(name, text, "context_length_exceeded")


async def run_aside(size: int, work: Callable[[], T]) -> T:
    """Run work on `size` characters: short texts at once, long texts in a thread."""
    return work() if size <= SHORT_TEXT else await asyncio.to_thread(work)


def last_tokens(llm: AsyncLLM, token_ids: list[int], keep: int | None) -> list[int]:
    """The last `keep` tokens: all for None, as many as fit into the context for -1."""
    if keep is None:
        return token_ids
    if keep == -1:
        keep = llm.max_model_len - 1
    return token_ids[-keep:] if keep else []
