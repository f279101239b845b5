"""What a conversation talks to: a model in this process (`Local`) or on a server (`remote.Remote`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tinyvllm.cli.broken import broken_reason
from tinyvllm.cli.interrupts import deferred_interrupts
from tinyvllm.cli.options import MAX_TOKENS, only_adapter
from tinyvllm.cli.progress import Tally, closing_line
from tinyvllm.errors import ModelError, RequestError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import RequestOutput, SamplingParams
from tinyvllm.text.parsing import Event, StreamParser, parser_for

if TYPE_CHECKING:
    from tinyvllm.engine.llm import LLM

Message = dict[str, str]
ANSWER_SHARE = 4  # a conversation leaves its answer this part of the context (1/4), or max_tokens if that is less
CUT_BY_CONTEXT = "the end of the context: /undo takes the last question back, /reset starts over"


@dataclass(frozen=True)
class Piece:
    """A part of an answer: what the conversation keeps, or `reasoning`, which it does not."""

    text: str
    reasoning: bool = False


class ContextFull(RequestError):
    """The conversation leaves its answer too little of the context. `counts`: its tokens and those of the context, where known."""

    def __init__(self, message: str, counts: tuple[int, int] | None = None):
        super().__init__(message)
        self.counts = counts


class Partner(Protocol):
    """A model in this process, or on a server."""

    default_params: SamplingParams
    breakable: bool  # whether a KeyboardInterrupt may be raised in the middle of an answer, to end it

    def answer(self, messages: list[Message], params: SamplingParams, chosen: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Pieces of the answer. `chosen` has the fields of `params` that the user set. ContextFull before the first piece."""

    def cut(self) -> str | None:
        """What ended the last answer too early, and what to try; None if nothing did."""

    def figures(self) -> str | None:
        """Tokens and speed of the last answer, if there was one."""


class Local:
    """A model in this process. `tell` gets a line for the user."""

    breakable = False

    def __init__(self, llm: LLM, tell: Callable[[str], None] = lambda text: None):
        self.llm = llm
        self.default_params = replace(llm.default_params, max_tokens=MAX_TOKENS["chat"])
        self._tell, self._lora = tell, only_adapter(llm.config)
        self._limited: int | None = None  # the value of max_tokens that the user was told is limited
        self._last: RequestOutput | None = None
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None  # it has a chat template
        special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        self._dialect = parser_for(tokenizer.chat_templates.get("default"), special)

    def answer(self, messages: list[Message], params: SamplingParams, chosen: Mapping[str, Any]) -> Generator[Piece, None, None]:
        prompt, room = self._encode(messages, params)
        self._tell_limit(chosen.get("max_tokens"))
        params = replace(params, max_tokens=min(params.max_tokens or room, room))
        reader, shown = None, 0
        if self._dialect.think is not None:  # its marks are to be in the text, also where they are special tokens
            reader = StreamParser(self._dialect, None, opened=self._dialect.opened(prompt["prompt"]))
            params = replace(params, skip_special_tokens=params.skip_special_tokens and not self._dialect.keep_special_tokens)
        with deferred_interrupts() as interrupted, contextlib.closing(self.llm.follow(prompt, params, lora_request=self._lora)) as outputs:
            for output in outputs:
                self._last = output
                text = output.outputs[0].text
                piece, shown = text[shown:], len(text)
                yield from [Piece(piece)] if reader is None else _pieces(reader.add(piece))
                if interrupted():
                    break
        if reader is not None:
            yield from _pieces(reader.finish(cut=output.outputs[0].finish_reason == "length"))
        if (error := broken_reason(output)) is not None:
            raise ModelError(f"chat: {error}")

    def _encode(self, messages: list[Message], params: SamplingParams) -> tuple[dict[str, Any], int]:
        """The prompt, and the tokens that it leaves for the answer. A first message may take all but one token of the context."""
        from tinyvllm.engine.prompt import encode_prompt

        encoded, context = encode_prompt(self.llm.engine.tokenizer, {"messages": messages}), self.llm.max_model_len
        room = context - len(encoded.token_ids)
        is_first = sum(message["role"] == "user" for message in messages) < 2
        if room < (1 if is_first else min(params.max_tokens or context, max(1, context // ANSWER_SHARE))):
            raise ContextFull(
                f"chat: the conversation has {len(encoded.token_ids)} tokens, the context of {context} tokens holds at most {context - 1} "
                "before an answer; shorten the message, or start with a larger --max-model-len",
                (len(encoded.token_ids), context),
            )
        return {"prompt_token_ids": encoded.token_ids, "prompt": encoded.text}, room

    def _tell_limit(self, max_tokens: int | None) -> None:
        """Say once that an explicit max_tokens is more than any answer can have."""
        if max_tokens is not None and max_tokens >= self.llm.max_model_len and max_tokens != self._limited:
            self._tell(f"max_tokens={max_tokens} is limited by the context of {self.llm.max_model_len} tokens")
            self._limited = max_tokens

    def cut(self) -> str | None:
        if self._last is None or self._last.outputs[0].finish_reason != "length":
            return None
        tokens = len(self._last.outputs[0].token_ids)
        if len(self._last.prompt_token_ids) + tokens >= self.llm.max_model_len:
            return CUT_BY_CONTEXT
        return f"max_tokens={tokens}: /set max_tokens N changes it"

    def figures(self) -> str | None:
        return None if self._last is None else closing_line(self.llm, Tally.of([self._last]))


def _pieces(events: list[Event]) -> list[Piece]:
    return [Piece(event.text, event.kind == "reasoning") for event in events]
