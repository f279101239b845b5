"""Log-probabilities as OpenAI's two endpoints and vLLM spell them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tinyvllm.request import CompletionOutput, Logprob, RequestOutput
from tinyvllm.text.tokenizer import Tokenizer

Position = tuple[int, dict[int, Logprob] | None]  # a token and what was probable there; None for the first of a prompt


def positions_of(part: CompletionOutput) -> list[Position]:
    """A continuation's tokens and what was probable there."""
    return list(zip(part.token_ids, part.logprobs or [], strict=False))


def prompt_positions(output: RequestOutput) -> list[dict[str, Any] | None]:
    """prompt_logprobs in vLLM's shape: a dict by token id for each token, null for the first."""
    return [
        None if at is None else {str(i): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token} for i, p in at.items()}
        for at in output.prompt_logprobs or []
    ]


def completion_logprobs(positions: Sequence[Position], best: int, offset: int = 0) -> dict[str, Any]:
    """The four lists of the old endpoint. `best` alternatives are named beside each token; the first of a prompt has no probability."""
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, at in positions:
        own = None if at is None else at.get(token)
        text = "" if own is None else own.decoded_token or ""
        result["text_offset"].append(offset)
        result["token_logprobs"].append(None if own is None else finite(own.logprob))
        result["tokens"].append(text)
        result["top_logprobs"].append(None if at is None else {p.decoded_token or "": finite(p.logprob) for p in _named(at, token, best)})
        offset += len(text)
    return result


def _named(at: dict[int, Logprob], token: int, best: int) -> Iterator[Logprob]:
    """The best ones and the token itself, the most probable first."""
    for i, p in sorted(at.items(), key=lambda item: item[1].rank):
        if p.rank <= best or i == token:
            yield p


def finite(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999.0 for a token that cannot come."""
    return value if value > -9999.0 else -9999.0


def chat_logprobs(tokenizer: Tokenizer | None, positions: Sequence[Position], best: int) -> list[dict[str, Any]]:
    """One object a token, with its bytes and the `best` most probable ones."""
    found = []
    for token, at in positions:
        if at is None or token not in at:
            continue
        top = [_entry(tokenizer, i, p) for i, p in sorted(at.items(), key=lambda item: item[1].rank) if p.rank <= best]
        found.append({**_entry(tokenizer, token, at[token]), "top_logprobs": top})
    return found


def _entry(tokenizer: Tokenizer | None, token: int, p: Logprob) -> dict[str, Any]:
    text = p.decoded_token or ""
    raw = tokenizer.token_bytes(token) if tokenizer is not None else text.encode("utf-8", "replace")
    return {"token": text, "logprob": finite(p.logprob), "bytes": list(raw)}
