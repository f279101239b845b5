"""Prompts and sampling parameters as callers pass them, and as the engine gets them: token ids, one SamplingParams a prompt.

Knows no model and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyvllm.engine.segments import Segment, concat_token_ids
from tinyvllm.errors import ArgumentError, ModelError, RequestError, TinyvllmError, nearest
from tinyvllm.foreign import MAX_JSON_BYTES, parse_json, read_bounded
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import SamplingParams, check_cache_salt
from tinyvllm.text.chat import render_chat
from tinyvllm.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
# a text, {"prompt": text}, {"prompt_token_ids": ids}, {"messages": conversation, ...}, {"segments": [Segment, ...], "prompt": text};
# a dict may have a cache_salt
Prompt = str | Mapping[str, Any]

_CHAT_OPTIONS = ("messages", "tools", "chat_template", "add_generation_prompt", "chat_template_kwargs")
_FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class PromptError(RequestError):
    """The prompt `index` of several cannot be served, for `reason`. None of them has run."""

    def __init__(self, index: int, reason: str):
        super().__init__(f"prompt {index} of the list (counted from 0): {reason}")
        self.index = index
        self.reason = reason


@dataclass(frozen=True)
class Encoded:
    """A prompt as the engine takes it; `text` is None for token ids, and for a prompt that begins with `segments`. `cache_salt` is None
    where the prompt has none of its own.
    """

    text: str | None
    token_ids: list[int]
    segments: tuple[Segment, ...] = ()
    cache_salt: str | None = None


def encode_prompt(tokenizer: Tokenizer | None, prompt: Prompt) -> Encoded:
    """Token ids of a text, of a conversation through the chat template, or the ids. ArgumentError or RequestError otherwise."""
    if isinstance(prompt, str):
        return _encode_text(tokenizer, prompt)
    if not isinstance(prompt, Mapping):
        hint = '; segment + "text" continues a segment' if isinstance(prompt, Segment) else ""
        raise ArgumentError(
            f"a prompt must be a text or a dict with prompt_token_ids, prompt or messages, got {type(prompt).__name__}{hint}"
        )
    kinds = [kind for kind in ("segments", "prompt_token_ids", "messages", "prompt") if kind in prompt]
    allowed = {"messages": _CHAT_OPTIONS, "prompt_token_ids": ("prompt_token_ids", "prompt"), "prompt": ("prompt",)}
    allowed["segments"] = ("segments", "prompt", "prompt_token_ids")
    if not kinds:
        raise ArgumentError(
            f"a prompt dict must have prompt_token_ids, prompt or messages, got {', '.join(map(repr, prompt)) or 'nothing'}"
        )
    known = (*allowed[kinds[0]], "cache_salt")
    for key in prompt:
        if key not in known:
            raise ArgumentError(f"a prompt with {kinds[0]} takes no {key!r}{nearest(str(key), known)}")
    salt = prompt.get("cache_salt")
    check_cache_salt(salt)
    encoded = _encode_dict(tokenizer, prompt, kinds[0])
    return encoded if salt is None else replace(encoded, cache_salt=salt)


def _encode_dict(tokenizer: Tokenizer | None, prompt: Mapping[str, Any], kind: str) -> Encoded:
    if kind == "prompt_token_ids":
        return Encoded(prompt.get("prompt"), _check_ids(prompt["prompt_token_ids"]))
    if kind == "prompt":
        return _encode_text(tokenizer, prompt["prompt"])
    if kind == "segments":
        return _encode_segments(tokenizer, prompt)
    return _encode_messages(tokenizer, prompt)


def _encode_text(tokenizer: Tokenizer | None, text: object) -> Encoded:
    if not isinstance(text, str):
        raise ArgumentError(f"prompt must be a text, got {type(text).__name__}")
    if tokenizer is None:
        raise RequestError("this engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids instead of a text")
    return Encoded(text, tokenizer.encode(text))


def _encode_messages(tokenizer: Tokenizer | None, prompt: Mapping[str, Any]) -> Encoded:
    if tokenizer is None:
        raise RequestError("this engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids instead of messages")
    messages = prompt["messages"]
    if not is_conversation(messages):
        raise ArgumentError(f"messages must be a list of dicts with a role, got {messages!r:.80}")
    text = render_chat(
        tokenizer,
        messages,
        tools=prompt.get("tools"),
        add_generation_prompt=prompt.get("add_generation_prompt", True),
        chat_template=prompt.get("chat_template"),
        **_template_kwargs(prompt),
    )
    return Encoded(text, tokenizer.encode(text, add_special_tokens=False))  # the template writes BOS itself


def _encode_segments(tokenizer: Tokenizer | None, prompt: Mapping[str, Any]) -> Encoded:
    segments = prompt["segments"]
    if not isinstance(segments, (list, tuple)) or not segments or any(not isinstance(one, Segment) for one in segments):
        raise ArgumentError(f"segments must be a list of results of llm.segment, got {segments!r:.80}")
    if "prompt" in prompt and "prompt_token_ids" in prompt:
        raise ArgumentError("a prompt with segments continues with prompt or with prompt_token_ids: give one of them")
    more = prompt.get("prompt", prompt.get("prompt_token_ids", []))
    rest = encode_piece(tokenizer, more, begins=False)[1] if more else []
    return Encoded(None, concat_token_ids(segments) + rest, tuple(segments))


def encode_piece(tokenizer: Tokenizer | None, piece: str | Sequence[int], begins: bool) -> tuple[list[int], list[int]]:
    """(leading token ids, own token ids) of a text: the leading ones are those that the tokenizer puts before it at the beginning.

    Token ids stay as they are. A text that does not begin a context is tokenised as one that follows other text, whatever that is.
    """
    if not isinstance(piece, str):
        return [], _check_ids(piece)
    whole = _encode_text(tokenizer, piece).token_ids
    assert tokenizer is not None
    own = tokenizer.encode(piece, add_special_tokens=False)
    head = whole[: next((p for p in range(len(whole)) if whole[p : p + len(own)] == own), 0)]
    return head, own if begins else tokenizer.encode_within(piece) or own


def _template_kwargs(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    kwargs = prompt.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping) or any(not isinstance(name, str) or name in _CHAT_OPTIONS for name in kwargs):
        raise ArgumentError(f"chat_template_kwargs must be a dict of the template's own variables, without {', '.join(_CHAT_OPTIONS)}")
    return kwargs


def _check_ids(ids: object) -> list[int]:
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)) or any(type(i) is not int or i < 0 for i in ids):
        raise ArgumentError(f"prompt_token_ids must be a list of token ids, got {ids!r:.80}")
    return list(ids)


def is_conversation(value: object) -> bool:
    """Whether `value` is one conversation: a list of messages with roles."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return bool(value) and all(isinstance(message, Mapping) and "role" in message for message in value)


def encode_all(tokenizer: Tokenizer | None, prompts: list[Prompt]) -> list[Encoded]:
    """`encode_prompt` of each; for several, a PromptError has the index of the one that fails."""
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(encode_prompt(tokenizer, prompt))
        except TinyvllmError as error:
            if len(prompts) == 1:
                raise
            raise PromptError(index, str(error)) from error
    return encoded


def spread(params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts: the default, a single one for all, or a list."""
    if params is None or isinstance(params, SamplingParams):
        return [default if params is None else params] * count
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    for one in each:
        if not isinstance(one, SamplingParams):
            raise ArgumentError(f"sampling_params must be a SamplingParams or a list of them, got {type(one).__name__}")
    if len(each) != count:
        raise ArgumentError(f"sampling_params: expected one, or one for each of {count} prompts, got {len(each)}")
    return each


def default_sampling_params(folder: Path) -> SamplingParams:
    """SamplingParams with the recommendations of the model's generation_config.json, if it has one. As in vLLM, `do_sample` is ignored."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        recommended = parse_json(read_bounded(path, MAX_JSON_BYTES))
        return replace(SamplingParams(), **{name: recommended[name] for name in _FROM_MODEL if recommended.get(name) is not None})
    except (OSError, ValueError, AttributeError) as error:  # not UTF-8, not JSON, not an object, or a value that SamplingParams refuses
        raise ModelError(f"{path}: {error}") from error
