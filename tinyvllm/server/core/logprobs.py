"""Log-probabilities in the shapes of OpenAI's two endpoints and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import ALL_LOGPROBS, CompletionOutput, Logprob, RequestOutput
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.text.tokenizer import Tokenizer

Position = tuple[int, dict[int, Logprob] | None]  # a token and the alternatives there; None for the first token of a prompt
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for an impossible token


def positions_of(part: CompletionOutput) -> list[Position]:
    """The tokens of an output with their alternatives."""
    return list(zip(part.token_ids, part.logprobs or [], strict=False))


@dataclass(frozen=True)
class LogprobStyle:
    """Which alternatives of a token are listed, and how tokens are written.

    top           the number of the most probable ones; -1 lists all
    only_listed   list what the engine returned: the tokens that the request named, and the drawn one
    as_token_ids  write tokens as "token_id:5", since not every token is valid text
    """

    top: int = 0
    only_listed: bool = False
    as_token_ids: bool = False

    @staticmethod
    def of(config: ServerConfig, body: Any, top: int | None) -> LogprobStyle:
        """The style that a body asks for; the server's where it does not."""
        as_token_ids = body.return_tokens_as_token_ids
        if as_token_ids is None:
            as_token_ids = config.return_tokens_as_token_ids
        return LogprobStyle(top or 0, bool(body.logprob_token_ids), as_token_ids)

    def alternatives(self, at: dict[int, Logprob], *also: int) -> list[tuple[int, Logprob]]:
        """The alternatives, the most probable first; `also` names tokens that are always among them."""
        every = self.only_listed or self.top == ALL_LOGPROBS
        chosen = [(i, p) for i, p in at.items() if every or p.rank <= self.top or i in also]
        return sorted(chosen, key=lambda item: item[1].rank)

    def text(self, token: int, p: Logprob) -> str:
        return self.write(token, p.decoded_token or "")

    def write(self, token: int, text: str) -> str:
        """How a token with this text is written."""
        return f"token_id:{token}" if self.as_token_ids else text


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """prompt_logprobs in vLLM's shape: an object by token id for each token, null for the first."""
    return [
        None if at is None else {str(i): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token} for i, p in at.items()}
        for at in output.prompt_logprobs or []
    ]


def completion_logprobs(
    tokenizer: Tokenizer | None, positions: Sequence[Position], style: LogprobStyle, offset: int = 0
) -> tuple[dict[str, Any], int]:
    """(the four lists of /v1/completions, characters of the text so far). The first token of a prompt has no probability.

    The token itself is the first of its alternatives, as in vLLM's answers.
    """
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, at in positions:
        own = None if at is None else at.get(token)
        result["text_offset"].append(offset)
        result["token_logprobs"].append(None if own is None else _finite(own.logprob))
        text = _text_without_logprob(tokenizer, token) if own is None else own.decoded_token or ""
        result["tokens"].append(style.write(token, text))
        listed = [] if at is None else sorted(style.alternatives(at, token), key=lambda item: item[0] != token)
        result["top_logprobs"].append(None if at is None else {style.text(i, p): _finite(p.logprob) for i, p in listed})
        is_unseen = own is None and tokenizer is not None and token in tokenizer.special_ids  # echo leaves out the BOS that was added
        offset += 0 if is_unseen else len(text)
    return result, offset


def _text_without_logprob(tokenizer: Tokenizer | None, token: int) -> str:
    return "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def _finite(value: float) -> float:
    return value if value > _MIN_LOGPROB else _MIN_LOGPROB


def chat_logprobs(tokenizer: Tokenizer | None, positions: Sequence[Position], style: LogprobStyle) -> list[dict[str, Any]]:
    """One object for each token, with its bytes and its alternatives."""
    entries = []
    for token, at in positions:
        if at is None or token not in at:
            continue
        alternatives = [_entry(tokenizer, i, p, style) for i, p in style.alternatives(at)]
        entries.append({**_entry(tokenizer, token, at[token], style), "top_logprobs": alternatives})
    return entries


def token_probabilities(tokenizer: Tokenizer | None, positions: Sequence[Position], style: LogprobStyle) -> list[dict[str, Any]]:
    """The same with token ids, for llama.cpp's clients."""
    return [
        {
            "id": token,
            **_entry(tokenizer, token, at[token], style),
            "top_logprobs": [{"id": i, **_entry(tokenizer, i, p, style)} for i, p in style.alternatives(at)],
        }
        for token, at in positions
        if at is not None and token in at
    ]


def _entry(tokenizer: Tokenizer | None, token: int, p: Logprob, style: LogprobStyle) -> dict[str, Any]:
    text = p.decoded_token or ""
    raw = tokenizer.token_bytes(token) if tokenizer is not None else text.encode("utf-8", "replace")
    return {"token": style.text(token, p), "logprob": _finite(p.logprob), "bytes": list(raw)}
