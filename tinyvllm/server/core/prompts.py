"""Encodes the text prompts of a request, off the event loop: a long prompt must not delay other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tinyvllm.engine.api import AsyncLLM, encode_piece
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.text.tokenizer import Tokenizer

T = TypeVar("T")
SHORT_TEXT = 2000  # characters; encoding them takes less time than starting a thread
_HUGE_TEXT = 2**18  # characters; encoding takes a hundred bytes for each, so few are encoded at once
_CUT_MARGIN = 32  # tokens
_REDUCE = "Please reduce the length of the input prompt."  # vLLM's words


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine takes it. `text` is None if the client sent token ids."""

    token_ids: list[int]
    text: str | None = None

    def room(self, llm: AsyncLLM) -> int:
        """Output tokens for which the context has room after this prompt."""
        return llm.max_model_len - len(self.token_ids)

    def engine_prompt(self) -> dict[str, Any]:
        """The argument of AsyncLLM.generate."""
        return {"prompt_token_ids": self.token_ids} if self.text is None else {"prompt_token_ids": self.token_ids, "prompt": self.text}


@dataclass(frozen=True)
class Truncation:
    """How many tokens of a prompt are kept (-1: as many as fit next to `reserved` output tokens), and from which side the others go."""

    keep: int
    side: str = "left"
    reserved: int = 1

    def length(self, llm: AsyncLLM) -> int:
        """The number of tokens that are kept. Failure 400 for more than the context holds."""
        if self.keep > llm.max_model_len:
            text = f"truncate_prompt_tokens: {self.keep} is greater than max_model_len ({llm.max_model_len})"
            raise bad_field("truncate_prompt_tokens", f"{text}. Please request a smaller truncation size.")
        return max(0, llm.max_model_len - self.reserved) if self.keep == -1 else self.keep

    def apply(self, llm: AsyncLLM, token_ids: list[int]) -> list[int]:
        """The tokens that are kept."""
        keep = self.length(llm)
        if self.side == "right":
            return token_ids[:keep]
        return token_ids[-keep:] if keep else []


def truncation_of(body: Any, reserved: int | None = None) -> Truncation | None:
    """The truncation that a body asks for, next to `reserved` output tokens (None or 0: one). Failure for a side without a length."""
    if body.truncate_prompt_tokens is None:
        if body.truncation_side is not None:
            raise bad_field("truncation_side", "truncation_side: requires truncate_prompt_tokens")
        return None
    return Truncation(body.truncate_prompt_tokens, body.truncation_side or "left", reserved or 1)


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
    truncation: Truncation | None = None,
    limit: bool = True,
    output: bool = True,
    prefix: list[int] | None = None,
) -> list[EncodedPrompt]:
    """The prompts of a field that holds a text, token ids, or a list of texts and of lists of token ids.

    special  add the tokenizer's special tokens to texts
    limit    refuse prompts longer than the context
    output   the context must also hold an output token
    prefix   token ids that precede each prompt (segments); each prompt may then be empty
    """
    prompts = _prompt_list(prompt, name, prefix is not None)

    def encode(item: Any) -> EncodedPrompt:
        if not isinstance(item, str):
            return EncodedPrompt(truncated(llm, item, truncation) if prefix is None else prefix + item)
        if limit and truncation is None:
            check_size(llm, item, name, output)
        if prefix is not None:
            return EncodedPrompt(prefix + encode_piece(llm.tokenizer, item, begins=False)[1] if item else prefix)
        return EncodedPrompt(encode_truncated(llm, item, special, truncation), item)

    encoded = await run_aside(sum(map(len, prompts)) + extra_size(llm.tokenizer), lambda: [encode(item) for item in prompts])
    for index, one in enumerate(encoded if limit else ()):
        check_length(llm, one.token_ids, name if len(encoded) == 1 else f"{name}[{index}]", output)
    return encoded


def _prompt_list(prompt: Any, name: str, may_be_empty: bool) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        if may_be_empty:
            return [""]
        raise bad_field(name, f"{name}: is empty")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def check_length(llm: AsyncLLM, token_ids: list[int], name: str, output: bool = True) -> None:
    """Failure 400 for an empty prompt, or one that does not fit into the context, with an output token if there is one."""
    context = llm.max_model_len
    if len(token_ids) + output > context:
        raise _too_long(name, len(token_ids), context, output)
    if not token_ids:
        raise bad_field(name, f"{name}: is empty after tokenization")


_max_token_chars: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()  # characters of each tokenizer's longest token


def _token_chars(tokenizer: Tokenizer) -> int:
    if tokenizer not in _max_token_chars:
        _max_token_chars[tokenizer] = max(1, *(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size)))
    return _max_token_chars[tokenizer]


def check_size(llm: AsyncLLM, text: str, name: str, output: bool = True) -> None:
    """Failure 400 for a text that cannot fit, however it is tokenized. Tokenizing a megabyte would take a second and 100 MB."""
    context = llm.max_model_len
    if len(text) > 32 * context and (minimum := len(text) // _token_chars(require_tokenizer(llm))) >= context:
        raise _too_long(name, minimum, context, output, "at least ")


def check_room(llm: AsyncLLM, prompt_tokens: int, max_tokens: int, field: str) -> None:
    """Failure 400 if a prompt and the output that the client's `field` asks for do not fit into the context together."""
    context = llm.max_model_len
    if prompt_tokens + max_tokens > context:
        text = (
            f"{_maximum(context)}, however you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt; {max_tokens} "
            f"for the output). Shorten the prompt or reduce {field}."
        )
        for_anthropic = f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {max_tokens} > {context}, decrease "
        raise _context_failure(field, text, for_anthropic + "input length or `max_tokens` and try again", prompt_tokens, context)


def _too_long(name: str, tokens: int, context: int, output: bool, bound: str = "") -> Failure:
    parts = f"{bound}{tokens} in {name}{'; 1 for the output' if output else ''}"
    text = f"{_maximum(context)}, however you requested {bound}{tokens + output} tokens ({parts})"
    text = f"{text}, which exceeds the available context size. {_REDUCE}"  # llama.cpp's words, and vLLM's
    return _context_failure(name, text, f"prompt is too long: {bound}{tokens} tokens > {context - output} maximum", tokens, context)


def _maximum(context: int) -> str:
    return f"This model's maximum context length is {context} tokens"  # agents recognize the error by these words


def _context_failure(param: str, message: str, anthropic_message: str, tokens: int, context: int) -> Failure:
    """OpenAI's clients recognize the code, llama.cpp's the type and the two numbers."""
    details = {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": context}
    return Failure(400, message, param=param, code="context_length_exceeded", anthropic_message=anthropic_message, details=details)


def encode_truncated(llm: AsyncLLM, text: str, special: bool, truncation: Truncation | None) -> list[int]:
    """Token ids of a text after its truncation. What is certainly cut off is not encoded: 30 MB took 3 GB.

    The rest has _CUT_MARGIN tokens more than are kept, and begins or ends with a word, so that what differs at the cut is dropped. Within a
    single run of spaces or letters longer than that, merges may begin elsewhere than in the whole text.
    """
    tokenizer = require_tokenizer(llm)
    if truncation is None:
        return tokenizer.encode(text, add_special_tokens=special)
    keep, longest = truncation.length(llm), _token_chars(tokenizer)
    size, margin = (keep + 2 * _CUT_MARGIN) * longest, _CUT_MARGIN * longest
    if size < len(text):
        if truncation.side == "right":
            rest = text[: max(size - margin, text.rfind(" ", size - margin, size))]
        else:
            rest = text[max(len(text) - size, text.find(" ", len(text) - size, len(text) - size + margin)) :]
        ids = tokenizer.encode(rest, add_special_tokens=special)
        if len(ids) >= keep + _CUT_MARGIN:
            return truncation.apply(llm, ids)
    return truncation.apply(llm, tokenizer.encode(text, add_special_tokens=special))  # short, or its tokenizer drops characters


def extra_size(tokenizer: Tokenizer | None) -> int:
    """What counts as text in addition: a tokenizer that may be slow works in a thread."""
    return SHORT_TEXT if tokenizer is not None and not tokenizer.is_quick else 0


async def run_aside(size: int, work: Callable[[], T]) -> T:
    """Run work on `size` characters: short texts at once, long texts in a thread, huge texts in one of two threads."""
    if size <= SHORT_TEXT:
        return work()
    if size <= _HUGE_TEXT:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_huge_texts(), work)


@cache
def _huge_texts() -> ThreadPoolExecutor:
    """Two threads. The first is started here: an executor without a thread keeps the texts of jobs for which none could be started."""
    executor = ThreadPoolExecutor(2, "tinyvllm-text")
    executor.submit(int)
    return executor


def text_size(value: Any) -> int:
    """Characters of the texts in a JSON value, plus one for each value; counting ends when it is a huge text."""
    size, rest = 0, [value]
    while rest and size <= _HUGE_TEXT:
        one = rest.pop()
        size += 1 + (len(one) if isinstance(one, str) else 0)
        if isinstance(one, Mapping):
            rest += one.keys()
            rest += one.values()
        elif isinstance(one, Sequence) and not isinstance(one, str):
            rest += one
    return size


def truncated(llm: AsyncLLM, token_ids: list[int], truncation: Truncation | None) -> list[int]:
    """The tokens of a prompt after its truncation, if there is one."""
    return token_ids if truncation is None else truncation.apply(llm, token_ids)
