"""Log-probabilities in the shapes of OpenAI's two endpoints and of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tinyvllm.request import CompletionOutput, Logprob, RequestOutput
from tinyvllm.text.tokenizer import Tokenizer

Position = tuple[int, dict[int, Logprob] | None]  # a token and the alternatives there; None for the first token of a prompt
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for an impossible token


def positions_of(part: CompletionOutput) -> list[Position]:
    """The tokens of an output with their alternatives."""
    return list(zip(part.token_ids, part.logprobs or [], strict=False))


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """prompt_logprobs in vLLM's shape: an object by token id for each token, null for the first."""
    return [
        None if at is None else {str(i): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token} for i, p in at.items()}
        for at in output.prompt_logprobs or []
    ]


def completion_logprobs(positions: Sequence[Position], top: int, offset: int = 0) -> dict[str, Any]:
    """The four lists of /v1/completions, with the `top` most probable alternatives of each token. The first token of a prompt has none."""
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, at in positions:
        own = None if at is None else at.get(token)
        text = "" if own is None else own.decoded_token or ""
        result["text_offset"].append(offset)
        result["token_logprobs"].append(None if own is None else _finite(own.logprob))
        result["tokens"].append(text)
        alternatives = None if at is None else {p.decoded_token or "": _finite(p.logprob) for p in _most_probable(at, token, top)}
        result["top_logprobs"].append(alternatives)
        offset += len(text)
    return result


def _most_probable(at: dict[int, Logprob], token: int, top: int) -> Iterator[Logprob]:
    """The `top` alternatives and the token itself, most probable first."""
    for i, p in sorted(at.items(), key=lambda item: item[1].rank):
        if p.rank <= top or i == token:
            yield p


def _finite(value: float) -> float:
    return value if value > _MIN_LOGPROB else _MIN_LOGPROB


def chat_logprobs(tokenizer: Tokenizer | None, positions: Sequence[Position], top: int) -> list[dict[str, Any]]:
    """One object for each token, with its bytes and the `top` most probable alternatives."""
    entries = []
    for token, at in positions:
        if at is None or token not in at:
            continue
        alternatives = [_entry(tokenizer, i, p) for i, p in sorted(at.items(), key=lambda item: item[1].rank) if p.rank <= top]
        entries.append({**_entry(tokenizer, token, at[token]), "top_logprobs": alternatives})
    return entries


def _entry(tokenizer: Tokenizer | None, token: int, p: Logprob) -> dict[str, Any]:
    text = p.decoded_token or ""
    raw = tokenizer.token_bytes(token) if tokenizer is not None else text.encode("utf-8", "replace")
    return {"token": text, "logprob": _finite(p.logprob), "bytes": list(raw)}
