"""A client for streams of server-sent events that costs little: it notes when events came and looks into few of them.

A load generator on the server's own machine takes processors from the server, so it must not parse what it only counts. Where every
event comes by itself, one costs 60 us here, nearly all of it asyncio's wake-up, and 220 us with httpx's aiter_lines and json.loads (two
EPYC cores, both busy); where 40 come together, 2.5 us against 12. Heads, events and bodies are bounded, and every request ends in time.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyvllm.errors import one_line
from tinyvllm.foreign import quoted
from tinyvllm.http_client import MAX_EVENT, authorization, reason, server_address

ANSWER_SECONDS = 600.0  # default for one answer, from its connection to its end
MAX_HEAD = 64 << 10  # bytes of the head of a response
MAX_BODY = 4 << 20  # bytes of a body that is no stream: an error, a list of models
MAX_STREAM = 1 << 30  # bytes of a stream
MAX_COUNT = 2**40  # tokens in a usage
_TAIL = 4  # events at the end that are kept whole: the usage is among them
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")  # of a chunk
_MAX_SIZE_LINE = 1 << 10


class _Malformed(Exception):
    """What the server sent is not HTTP, no stream of events, or beyond a limit."""


@dataclass
class Stream:
    """One answer. `times` are (seconds of perf_counter, events with text that came then); `error` is why it is not whole.

    `body` is that of an answer that is no stream, and of an error.
    """

    status: int = 0
    times: list[tuple[float, int]] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    ended: float = 0.0
    error: str | None = None
    body: bytes = b""

    @property
    def first(self) -> float | None:
        return self.times[0][0] if self.times else None


class _Events:
    """The events of a stream: counted as they come, the last ones kept."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._rest = b""  # of an event that is not whole yet
        self._has_text = False  # whether an event with text has come
        self.tail: deque[tuple[bytes, bool]] = deque(maxlen=_TAIL)  # an event, and whether it was counted

    def take(self, data: bytes, now: float) -> None:
        """Count the events that are whole now. _Malformed for one beyond MAX_EVENT, and for what is neither JSON nor a comment."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > MAX_EVENT:
            raise _Malformed(f"an event of more than {MAX_EVENT >> 20} MiB: is this an OpenAI server?")
        count, keep = 0, self.tail.append
        for event in events:
            if self._has_text and event.startswith(b"data: {") and event.endswith(b"}"):  # the usual case: no line is looked for
                keep((event[6:], True))
                count += 1
            else:
                count += sum(self._counted(line[5:].strip()) for line in event.split(b"\n") if line.startswith(b"data:"))
        if count:
            self._stream.times.append((now, count))

    def _counted(self, data: bytes) -> bool:
        """Keep the data of an event; whether it counts as one with text. Those before the first text are looked into."""
        if data == b"[DONE]":
            return False
        if not (data.startswith(b"{") and data.rstrip().endswith(b"}")):
            raise _Malformed(f"an event that is not JSON: {quoted(data)}")
        self._has_text = self._has_text or _has_text(_parsed(data))
        self.tail.append((data, self._has_text))
        return self._has_text


class _Exchange(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.stream = Stream()
        self.done: asyncio.Future[None] | None = None
        self.alive = True

    def begin(self, request: bytes, streams: bool) -> asyncio.Future[None]:
        """Send a request, whose answer is a stream of events or a body; the future is done when `stream` is whole or has an error."""
        self.stream, self._streams = Stream(), streams
        self.done = asyncio.get_running_loop().create_future()
        self._events = _Events(self.stream)
        self._raw = b""  # bytes of the response that are not understood yet
        self._size: int | None = None  # bytes that the chunk still has; None: its head comes next
        self._in_trailer = False
        self._chunked: bool | None = None
        self._length: int | None = None
        self._total = 0  # bytes of the body
        assert self.transport is not None
        self.transport.write(request)
        return self.done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        whole = self.stream.status and self._chunked is False and self._length is None
        self._end(None if whole else f"the connection broke ({reason(error) if error else 'closed'})")

    def data_received(self, data: bytes) -> None:
        if self.done is None or self.done.done():
            return
        now = time.perf_counter()
        self._raw += data
        try:
            if self.stream.status or self._read_head():
                self._read_body(now)
        except _Malformed as error:
            self.abort(f"the server sent {error}")

    def abort(self, error: str) -> None:
        """End the request with an error, and the connection with it."""
        self.alive = False
        self._end(error)
        if self.transport is not None:
            self.transport.abort()

    def _read_head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD:
            raise _Malformed(f"a head of more than {MAX_HEAD >> 10} KiB")
        if not found:
            return False
        first, *lines = head.split(b"\r\n")
        status = _STATUS.fullmatch(first)
        if status is None:
            raise _Malformed(f"no HTTP: {quoted(first)}")
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(b":") for line in lines)}
        length = headers.get(b"content-length")
        if length is not None and not (length.isdigit() and len(length) < 16):
            raise _Malformed(f"a Content-Length of {quoted(length)}")
        self.stream.status = int(status[1])
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        self._length = None if length is None or self._chunked else int(length)
        self.alive = self.alive and headers.get(b"connection") != b"close"
        self._raw = rest
        return True

    def _read_body(self, now: float) -> None:
        if self._chunked:
            self._read_chunks(now)
            return
        data, self._raw = self._raw, b""
        self._take(data, now)
        if self._length is not None and self._total >= self._length:
            self._end(None)

    def _read_chunks(self, now: float) -> None:
        raw, at = self._raw, 0
        pieces: list[bytes] = []
        while at < len(raw) and not self._in_trailer:
            if self._size is None:
                end = raw.find(b"\r\n", at)
                size = _SIZE.fullmatch(raw, at, end) if end >= 0 else None
                if size is None:
                    if end >= 0 or len(raw) - at > _MAX_SIZE_LINE:
                        raise _Malformed(f"a chunk with the head {quoted(raw[at : at + _MAX_SIZE_LINE])}")
                    break
                self._size = int(size[1], 16) + 2  # with the line end after it
                self._in_trailer = self._size == 2
                at = end + (0 if self._in_trailer else 2)
                continue
            piece = raw[at : at + self._size]
            at += len(piece)
            self._size -= len(piece)
            pieces.append(piece if self._size >= 2 else piece[: len(piece) - (2 - self._size)])
            if self._size == 0:
                self._size = None
        self._raw = raw[at:]
        if pieces:
            self._take(b"".join(pieces), now)
        if self._in_trailer and b"\r\n\r\n" in self._raw:  # the end of the last chunk's head, trailers, an empty line
            self._end(None)
        elif len(self._raw) > MAX_HEAD:
            raise _Malformed(f"trailers of more than {MAX_HEAD >> 10} KiB")

    def _take(self, data: bytes, now: float) -> None:
        self._total += len(data)
        if self._total > MAX_STREAM:
            raise _Malformed(f"an answer of more than {MAX_STREAM >> 20} MiB: does it know max_tokens?")
        if self._streams and self.stream.status == 200:
            self._events.take(data, now)
        else:
            self.stream.body = (self.stream.body + data)[:MAX_BODY]

    def _end(self, error: str | None) -> None:
        if self.done is None or self.done.done():
            return
        stream, self.stream.ended = self.stream, time.perf_counter()
        try:
            _conclude(stream, self._events.tail, self._streams)
        except _Malformed as malformed:
            stream.error = f"the server sent {malformed}"
        if error is not None and stream.status in (0, 200):
            stream.error = error
        self.done.set_result(None)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise _Malformed(f"an event that is not JSON: {quoted(data)}")
    return event


def _choice(event: Mapping[str, Any]) -> dict[str, Any]:
    """The first choice of an event, {} where there is none."""
    choices = event.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _has_text(event: Mapping[str, Any]) -> bool:
    choice = _choice(event)
    delta = choice["delta"] if isinstance(choice.get("delta"), dict) else choice
    return any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls"))


def _conclude(stream: Stream, tail: Sequence[tuple[bytes, bool]], streams: bool) -> None:
    """Usage, reason and error from the last events; those counted that brought no text are taken off again. _Malformed for wrong JSON."""
    if stream.status != 200:
        stream.error = f"{stream.status}: {_message(stream.body)}" if stream.status else None
        return
    if not streams:
        return
    silent = 0
    for event, counted in ((_parsed(data), counted) for data, counted in tail):
        if event.get("error"):
            stream.error = _error_text(event["error"])
        stream.usage = _usage(event) or stream.usage
        stream.finish_reason = str(_choice(event).get("finish_reason") or "")[:64] or stream.finish_reason
        silent += counted and not _has_text(event)
    _without_silent(stream.times, silent)
    if stream.finish_reason is None and stream.error is None:
        stream.error = "the stream ended without a finish_reason" if tail else "the answer has no events: it is no stream"


def _without_silent(times: list[tuple[float, int]], silent: int) -> None:
    """Take events without text off the end."""
    while silent and times:
        at, count = times.pop()
        if count > silent:
            times.append((at, count - silent))
        silent = max(0, silent - count)


def _usage(event: Mapping[str, Any]) -> dict[str, int] | None:
    """The counts of tokens in an event, None where it has none. _Malformed for counts that are none."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if usage.get(name) is not None}
    if not all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts.values()):
        raise _Malformed(f"a usage of {quoted(usage)}")
    return counts


def _message(body: bytes) -> str:
    """The message of an error's body: OpenAI's field, or the text."""
    try:
        return _error_text(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return one_line(body[:400].decode("utf-8", "replace"), 200)


def _error_text(error: Any) -> str:
    return one_line(str(error.get("message", error) if isinstance(error, dict) else error)[:400], 200)


class Client:
    """Connections to one server, each used again when its answer is over.

    option  what names the URL in an error; seconds limits every answer, from its connection to its end
    """

    def __init__(self, url: str, api_key: str | None = None, option: str = "--base-url", seconds: float = ANSWER_SECONDS):
        address = server_address(url, option)
        self.url, self._root, self._seconds = url, address.root, seconds
        self._context = ssl.create_default_context() if address.secure else None
        self._host, self._port = address.host, address.port or (443 if address.secure else 80)
        name = f"[{address.host}]" if ":" in address.host else address.host.encode("idna").decode()
        fields = {"Host": name if address.port is None else f"{name}:{address.port}", "Content-Type": "application/json"}
        fields |= {"Accept": "text/event-stream, application/json", **authorization(api_key)}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[_Exchange] = []

    async def post(self, path: str, body: bytes) -> Stream:
        """Send a request and read its stream to the end. Never raises for what the network or the server does: see Stream.error."""
        return await self._answer(f"POST {self._root}{path}", body, streams=True)

    async def get(self, path: str) -> Stream:
        """The answer to a GET, with its body."""
        return await self._answer(f"GET {self._root}{path}", b"", streams=False)

    async def _answer(self, what: str, body: bytes, streams: bool) -> Stream:
        request = f"{what} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
        exchange: _Exchange | None = None
        try:
            async with asyncio.timeout(self._seconds):
                while exchange := self._idle_exchange():  # the server may have closed it meanwhile: then nothing of an answer comes
                    await asyncio.shield(exchange.begin(request, streams))
                    if exchange.stream.status or exchange.stream.error is None:
                        return self._kept(exchange)
                _, exchange = await asyncio.get_running_loop().create_connection(_Exchange, self._host, self._port, ssl=self._context)
                await asyncio.shield(exchange.begin(request, streams))
                return self._kept(exchange)
        except TimeoutError:
            if exchange is None:
                return Stream(error=f"no connection within {self._seconds:g} s", ended=time.perf_counter())
            exchange.abort(f"no end of the answer within {self._seconds:g} s")
            return exchange.stream
        except OSError as error:
            return Stream(error=f"no connection ({reason(error)})", ended=time.perf_counter())
        except asyncio.CancelledError:
            if exchange is not None:
                exchange.abort("cancelled")
            raise

    def _idle_exchange(self) -> _Exchange | None:
        while self._idle:
            exchange = self._idle.pop()
            if exchange.alive:
                return exchange
        return None

    def _kept(self, exchange: _Exchange) -> Stream:
        if exchange.alive:
            self._idle.append(exchange)
        return exchange.stream

    def close(self) -> None:
        for exchange in self._idle:
            assert exchange.transport is not None
            exchange.transport.close()
        self._idle.clear()
