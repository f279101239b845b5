"""A client for streams of server-sent events that costs little: it notes when events came and looks into few of them.

A load generator on the server's own machine takes processors from the server, so it must not parse what it only counts. Where every
event comes by itself, one costs 60 us here, nearly all of it asyncio's wake-up, and 220 us with httpx's aiter_lines and json.loads (two
EPYC cores, both busy); where 40 come together, 2.5 us against 12. `python -m benchmarks.event_stream` measures the first.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_TAIL = 4  # events at the end that are kept whole: the usage is among them


@dataclass
class Stream:
    """One answer. `times` are (seconds of perf_counter, events with text that came then); `error` is why it is not whole."""

    status: int = 0
    times: list[tuple[float, int]] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    ended: float = 0.0
    error: str | None = None

    @property
    def first(self) -> float | None:
        return self.times[0][0] if self.times else None


class _Exchange(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.stream = Stream()
        self.done: asyncio.Future[None] | None = None
        self.alive = True

    def begin(self, request: bytes) -> asyncio.Future[None]:
        self.stream = Stream()
        self.done = asyncio.get_running_loop().create_future()
        self._raw = b""  # bytes of the response that are not understood yet
        self._body = b""  # events that are not whole yet
        self._left: int | None = None  # bytes that the chunk still has; None: its head comes next
        self._chunked: bool | None = None
        self._length: int | None = None
        self._spoken = False  # whether an event with text has come
        self._tail: list[bytes] = []
        assert self.transport is not None
        self.transport.write(request)
        return self.done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        whole = self.stream.status and self._chunked is False and self._length is None
        self._end(None if whole else f"the connection broke ({error or 'closed'})")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.done is None or self.done.done():
            return
        self._raw += data
        if not self.stream.status and not self._head():
            return
        if self._chunked:
            self._chunks(now)
        else:
            self._take(self._raw, now)
            if self._length is not None:
                self._length -= len(self._raw)
                if self._length <= 0:
                    self._end(None)
            self._raw = b""

    def _head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if not found:
            return False
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.stream.status = int(lines[0].split()[1])
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._length = int(headers["content-length"]) if "content-length" in headers else None
        self.alive = self.alive and headers.get("connection", "").lower() != "close"
        self._raw = rest
        return True

    def _chunks(self, now: float) -> None:
        raw, at = self._raw, 0
        pieces: list[bytes] = []
        while at < len(raw):
            if self._left is None:
                end = raw.find(b"\r\n", at)
                if end < 0:
                    break
                self._left = int(raw[at:end].split(b";")[0], 16) + 2  # with the line end after it
                at = end + 2
                if self._left == 2:
                    self._take(b"".join(pieces), now)
                    self._end(None)
                    return
            piece = raw[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            pieces.append(piece if self._left >= 2 else piece[: len(piece) - (2 - self._left)])
            if self._left == 0:
                self._left = None
        self._raw = raw[at:]
        if pieces:
            self._take(b"".join(pieces), now)

    def _take(self, data: bytes, now: float) -> None:
        """Count the events that are whole now."""
        events = (self._body + data).split(b"\n\n")
        self._body = events.pop()
        count = 0
        for event in events:
            if event.startswith(b"data: {"):
                if not self._spoken:
                    self._spoken = _has_text(event)
                count += self._spoken
                self._tail.append(event)
        if count:
            self.stream.times.append((now, count))
        if len(self._tail) > 4 * _TAIL:
            del self._tail[:-_TAIL]

    def _end(self, error: str | None) -> None:
        if self.done is None or self.done.done():
            return
        stream, self.stream.ended = self.stream, time.perf_counter()
        try:
            _conclude(stream, self._tail[-_TAIL:] if stream.status == 200 else [self._body])
        except (ValueError, AttributeError, LookupError, TypeError) as failed:
            stream.error = f"an event that cannot be read ({failed})"
        if error is not None and stream.status in (0, 200):
            stream.error = error
        self.done.set_result(None)


def _has_text(event: bytes) -> bool:
    choices = json.loads(event[6:]).get("choices") or [{}]
    delta = choices[0].get("delta") or choices[0]
    return bool(delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


def _conclude(stream: Stream, tail: list[bytes]) -> None:
    """Usage, reason and error from the last events; those that brought no text are taken off the last count."""
    if stream.status != 200:
        body = b"".join(tail)
        try:
            stream.error = f"{stream.status}: {json.loads(body)['error']['message']}"
        except (ValueError, LookupError, TypeError):
            stream.error = f"{stream.status}: {body[:200].decode(errors='replace')}"
        return
    silent = 0
    for event in tail:
        record = json.loads(event[6:])
        if record.get("error"):
            stream.error = str(record["error"].get("message", record["error"]))
        stream.usage = record.get("usage") or stream.usage
        choices = record.get("choices") or [{}]
        stream.finish_reason = choices[0].get("finish_reason") or stream.finish_reason
        silent += not _has_text(event)
    while silent and stream.times:
        at, count = stream.times.pop()
        if count > silent:
            stream.times.append((at, count - silent))
        silent = max(0, silent - count)
    if stream.finish_reason is None and stream.error is None:
        stream.error = "the stream ended without a finish_reason"


class Client:
    """Connections to one server, each used again when its answer is over."""

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self.address = (parts.hostname or "localhost", parts.port or (443 if self._secure else 80))
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n"
        self.headers += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[_Exchange] = []

    async def post(self, path: str, body: bytes) -> Stream:
        """Send a request and read its answer to the end. Never raises for what the network or the server does: see Stream.error."""
        request = f"POST {self.root}{path} HTTP/1.1\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
        exchange = next((e for e in iter(lambda: self._idle.pop() if self._idle else None, None) if e.alive), None)
        if exchange is None:
            loop, context = asyncio.get_running_loop(), ssl.create_default_context() if self._secure else None
            try:
                _, exchange = await loop.create_connection(_Exchange, *self.address, ssl=context)
            except OSError as error:
                return Stream(error=f"no connection ({error.strerror or error})", ended=time.perf_counter())
        try:
            await exchange.begin(request)
        except asyncio.CancelledError:
            assert exchange.transport is not None
            exchange.transport.abort()
            raise
        if exchange.alive:
            self._idle.append(exchange)
        return exchange.stream

    def close(self) -> None:
        for exchange in self._idle:
            assert exchange.transport is not None
            exchange.transport.close()
        self._idle.clear()


_EVENTS = 2000


async def _speak(port: Any) -> None:
    """A server that sends its events one by one, as an engine does."""
    chunk = {"id": "cmpl-0123456789", "object": "text_completion", "created": 1, "model": "m",
             "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}]}  # fmt: skip
    event = f"data: {json.dumps(chunk)}\n\n".encode()
    last = event.replace(b'"finish_reason": null', b'"finish_reason": "stop"')
    parts = [f"{len(e):x}\r\n".encode() + e + b"\r\n" for e in [event] * _EVENTS + [last, b"data: [DONE]\n\n"]]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.0002)
            writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _cost(url: str) -> None:
    """Processor time an event, here and with httpx."""
    client = Client(url)
    for _ in range(3):
        began = time.process_time()
        stream = await client.post("/", b"{}")
        print(f"here:  {(time.process_time() - began) / _EVENTS * 1e6:.1f} us an event", stream.error or "")
    client.close()
    import httpx

    async with httpx.AsyncClient() as other:
        for _ in range(3):
            began = time.process_time()
            async with other.stream("POST", url, content=b"{}") as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        json.loads(line[6:])
            print(f"httpx: {(time.process_time() - began) / _EVENTS * 1e6:.1f} us an event")


def _serve(port: Any) -> None:
    asyncio.run(_speak(port))


def main() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    asyncio.run(_cost(f"http://127.0.0.1:{ours.recv()}"))
    server.kill()


if __name__ == "__main__":
    main()
