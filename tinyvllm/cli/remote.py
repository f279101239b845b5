"""A model on an OpenAI server, for `tinyvllm chat --url`. Retries with growing pauses as long as nothing has been received."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from tinyvllm.cli.partner import CUT_BY_CONTEXT, ContextFull, Piece
from tinyvllm.errors import RequestError, TinyvllmError
from tinyvllm.http_client import RETRY_STATUS, authorization, json_events, reason, retry_after, server_address
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import SamplingParams

ATTEMPTS = 8
_FIRST_PAUSE, _MAX_PAUSE = 0.5, 30.0  # seconds; a server's Retry-After may be longer
_MAX_RETRY_AFTER = 600.0  # seconds; for a longer pause the user should decide
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 600.0


class _Retry(Exception):
    """Nothing was received, and a retry may succeed. `after`: the seconds of the server's Retry-After."""

    def __init__(self, reason: str, after: float | None = None):
        super().__init__(reason)
        self.after = after


@dataclass
class _Figures:
    began: float
    first: float | None = None
    last: float = 0.0
    pieces: int = 0
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None

    def line(self) -> str:
        usage = self.usage or {}
        generated = usage.get("completion_tokens", self.pieces)
        counts = f"{usage['prompt_tokens']} prompt + {generated} generated tokens" if "prompt_tokens" in usage else f"{generated} pieces"
        if self.first is None:
            return counts
        line, seconds = f"{counts}, first token after {self.first - self.began:.2f} s", self.last - self.first
        return f"{line}, {(generated - 1) / seconds:.1f} tok/s" if generated > 1 and seconds > 0 else line


class Remote:
    """url: of the server, with or without /v1. model: its name there, where None the first that the server lists.

    tell: gets a line for the user before each pause. ArgumentError for an invalid URL.
    """

    breakable = True
    default_params = SamplingParams(max_tokens=None)

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None, tell: Callable[[str], None] = lambda text: None):
        address = server_address(url, "--url")
        self.url = url
        self._secure, self._root = address.secure, address.root
        self._address = (address.host, address.port)
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"} | authorization(api_key)
        self._model = model
        self._tell = tell
        self._figures: _Figures | None = None
        self._max_tokens: int | None = None  # of the last request

    def answer(self, messages: list[dict[str, str]], params: SamplingParams, chosen: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Pieces of the answer. Only the `chosen` fields are sent: for the others the server has the recommendation of its model."""
        if self._model is None:
            self._model = self._with_retries(self._first_model)
        settings = {name: value for name, value in chosen.items() if value is not None}
        self._max_tokens = settings.get("max_tokens")
        body = {"model": self._model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **settings}
        self._figures = _Figures(time.monotonic())
        events = self._with_retries(lambda: self._begin(json.dumps(body).encode()))
        with contextlib.closing(events):
            for event in events:
                yield from self._read(event, self._figures)

    def cut(self) -> str | None:
        if self._figures is None or self._figures.finish_reason != "length":
            return None
        tokens = (self._figures.usage or {}).get("completion_tokens", self._max_tokens)
        if self._max_tokens is not None and tokens == self._max_tokens:
            return f"max_tokens={tokens}: /set max_tokens N changes it"
        return CUT_BY_CONTEXT if self._max_tokens is None else f"max_tokens or by {CUT_BY_CONTEXT}"

    def figures(self) -> str | None:
        return None if self._figures is None else self._figures.line()

    def _read(self, event: Mapping[str, Any], figures: _Figures) -> list[Piece]:
        """The texts of an event."""
        figures.usage = event.get("usage") or figures.usage
        choices = event.get("choices") or [{}]
        figures.finish_reason = choices[0].get("finish_reason") or figures.finish_reason
        delta = choices[0].get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")  # the second is the name of OpenRouter and of later vLLM
        texts = ((thought, True), (delta.get("content"), False))
        pieces = [Piece(text, reasoning) for text, reasoning in texts if isinstance(text, str) and text]
        if pieces:
            figures.last = time.monotonic()
            figures.first = figures.first or figures.last
            figures.pieces += 1
        return pieces

    def _with_retries(self, attempt: Callable[[], Any]) -> Any:
        """The result of the first `attempt` that does not raise _Retry."""
        for number in range(1, ATTEMPTS + 1):
            try:
                return attempt()
            except _Retry as failure:
                if number == ATTEMPTS or (failure.after or 0) > _MAX_RETRY_AFTER:
                    raise TinyvllmError(f"{self.url}: {failure}; tried {number} times") from failure
                pause = max(failure.after or 0.0, random.uniform(0.5, 1.0) * min(_MAX_PAUSE, _FIRST_PAUSE * 2 ** (number - 1)))
                self._tell(f"{failure}: retry in {pause:.1f} s")
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _begin(self, body: bytes) -> Generator[Mapping[str, Any], None, None]:
        """The events of an answer after the first one has come. _Retry if none comes."""
        connection, response = self._request("POST", "/v1/chat/completions", body)
        events = json_events(connection, response)
        try:
            first = next(events, None)
        except (OSError, http.client.HTTPException) as error:
            raise _Retry(f"the connection broke before the answer ({reason(error)})") from error
        if first is None:
            raise _Retry("the server sent an empty answer")

        def all_events() -> Generator[Mapping[str, Any], None, None]:
            with contextlib.closing(events):
                yield first
                try:
                    yield from events
                except (OSError, http.client.HTTPException) as error:
                    raise TinyvllmError(f"{self.url}: the connection broke in the middle of the answer ({reason(error)})") from error

        return all_events()

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models", None)
        with contextlib.closing(connection):
            try:
                name = json.loads(response.read())["data"][0]["id"]
            except (ValueError, LookupError, TypeError) as error:
                raise TinyvllmError(
                    f"{self.url}: /v1/models does not give a list of models: is this an OpenAI server? If so, give --model NAME"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise _Retry(reason(error)) from error
        return str(name)

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The head of the response, whose status is 200. _Retry for what may pass, RequestError for what the server refuses."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        host, port = self._address
        connection = kind(host, port, timeout=_CONNECT_SECONDS)
        try:
            try:
                connection.connect()
                connection.sock.settimeout(_READ_SECONDS)
                connection.request(method, self._root + path, body, self._headers)
                response = connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                raise TinyvllmError(f"{self.url}: its certificate cannot be verified: {error.verify_message}") from error
            except (OSError, http.client.HTTPException) as error:
                raise _Retry(f"no answer from {self.url} ({reason(error)})") from error
            if response.status != 200:
                self._refuse(response)
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _refuse(self, response: http.client.HTTPResponse) -> None:
        try:
            text = response.read(1 << 16).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            text = ""
        message, error = f"{response.status} {response.reason}", dict[str, Any]()
        with contextlib.suppress(ValueError, LookupError, TypeError):
            error = json.loads(text)["error"]
            message = f"{message}: {error['message']}"
        if response.status in RETRY_STATUS:
            raise _Retry(message, retry_after(response.getheader("Retry-After")))
        if _is_context_full(error):
            raise ContextFull(f"{self.url}: {message}", _counts(error))
        raise RequestError(f"{self.url}: {message}")


def _counts(error: Mapping[str, Any]) -> tuple[int, int] | None:
    """The tokens of the conversation and of the context, as llama.cpp names them; None where a server does not say them."""
    tokens, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    return (tokens, context) if type(tokens) is int and type(context) is int else None


def _is_context_full(error: object) -> bool:
    """Whether a server refused a conversation for its length: OpenAI's code, llama.cpp's type, or the words of OpenAI and vLLM."""
    if not isinstance(error, dict):
        return False
    words = (error.get("code"), error.get("type"))
    return bool({"context_length_exceeded", "exceed_context_size_error"}.intersection(map(str, words))) or (
        "maximum context length" in str(error.get("message"))
    )
