"""Bad input and bad clients by the thousand, while a few good clients stream: those must not be affected, and no resources may leak.

    python -m tests.server.soak_faults [--clients 1000] [--rounds 3] [--only vanish,bombs]

Every phase sends one kind of fault. Errors must come in the API's shape, the good clients' tokens must be the offline ones, and the process
must hold no sockets and no blocks more than before. The first rounds make it grow: programs for batches of new sizes, what allocators
and compilers of grammars keep; the last one may not. Exit code 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server.soak_client import Connection, Held, Reply, Server, gather_all, head, percentile, read_reply, serving
from tests.server.soak_work import Asked, Tally, keep_asking, known

KEY = "sk-soak-0123456789"
AUTH = f"Authorization: Bearer {KEY}\r\n"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
_GROWTH = 16  # MiB of allowed growth of the process in the last of several rounds


@dataclass
class Sent:
    """The responses to the faults of one phase."""

    port: int
    clients: int
    seen: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, reply: Reply, statuses: Sequence[int]) -> None:
        """Count a response, which must have one of these statuses and, if it is an error, the API's shape."""
        self.seen[str(reply.status)] += 1
        if not reply.whole or reply.status not in statuses:
            self.wrong[f"{what}: status {reply.status}, whole {reply.whole}: {reply.body[:160]!r}"] += 1
        elif reply.status >= 400 and reply.error is None:
            self.wrong[f"{what}: status {reply.status}, not in the API's shape: {reply.body[:160]!r}"] += 1

    async def ask(self, what: str, body: Any, *statuses: int, path: str = CHAT, more: str = AUTH) -> Reply:
        """One request on a separate connection."""
        connection = Connection(self.port)
        reply = await connection.ask(path, body, more)
        connection.close()
        self.note(what, reply, statuses)
        return reply

    async def raw(self, what: str, data: bytes, *statuses: int, half_close: bool = False, seconds: float = 30.0) -> Reply:
        """These bytes on a separate connection."""
        reply = Reply()
        with contextlib.suppress(OSError, EOFError, ValueError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(data)
                if half_close:
                    writer.write_eof()
                await asyncio.wait_for(read_reply(reader, reply, time.perf_counter()), seconds)
            finally:
                writer.close()
        if statuses:
            self.note(what, reply, statuses)
        return reply


def whole(body: Any, path: str = COMPLETIONS, more: str = AUTH) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, len(raw), more) + raw


async def vanish(sent: Sent) -> None:
    """Clients that disconnect: some before the response, most mid-stream, some from a response in one piece."""

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", sent.port)
        body = {**LONG, "prompt": f"Once there were {number} kites", "stream": number % 5 != 0, "n": 3 if number % 7 == 0 else 1}
        writer.write(whole(body))
        if number % 5 == 1:
            await asyncio.sleep(0.002)
        elif number % 5 == 0:
            await asyncio.sleep(0.1)
        else:
            heard = await reader.read(300)
            sent.seen["heard"] += bool(heard)
        writer.transport.abort()
        sent.seen["left"] += 1

    await gather_all(sent.clients, one, 40)


async def slow(sent: Sent) -> None:
    """Heads and bodies sent a byte at a time, or never completed."""

    async def one(number: int) -> None:
        data = whole({"prompt": "a" * 200, "max_tokens": 1})
        cut = data.index(b"\r\n\r\n") + 4
        sooner = 0 if number % 2 else cut  # whole head, or none of it
        reader, writer = await asyncio.open_connection("127.0.0.1", sent.port)
        writer.write(data[:sooner])
        reply = Reply()
        answer = asyncio.create_task(read_reply(reader, reply, time.perf_counter()))
        for at in range(sooner, len(data) - 1):
            if answer.done():
                break
            with contextlib.suppress(OSError):
                writer.write(data[at : at + 1])
            await asyncio.sleep(0.1)
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            await asyncio.wait_for(answer, 30)
        sent.note("slow sender", reply, (408,))
        writer.close()

    await gather_all(min(200, sent.clients), one, 100)


async def unread(sent: Sent) -> None:
    """Streams that the client does not read: the server must not keep them in memory forever."""

    async def one(number: int) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", sent.port))
            await loop.sock_sendall(sock, whole({**LONG, "n": 4, "logprobs": 20}))
            await asyncio.sleep(12)
            sent.seen["left unread"] += 1

    await gather_all(4, one, 4)


async def half_closed(sent: Sent) -> None:
    """Half-closed sockets: after a whole request, mid-body, mid-head, and without data."""

    async def one(number: int) -> None:
        data = whole({**LONG, "max_tokens": 30})
        cut = (len(data), len(data) - 9, 60, 0)[number % 4]
        reply = await sent.raw("half closed", data[:cut], half_close=True)
        sent.seen[f"cut at {('end', 'body', 'head', 'begin')[number % 4]}: {reply.status or 'closed'}"] += 1

    await gather_all(min(400, sent.clients), one, 50)


async def huge(sent: Sent) -> None:
    """Endless bodies and heads, and huge numbers of fields."""
    announced = head(COMPLETIONS, 10**11, AUTH) + b"{"
    chunks = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\n".encode()
    chunks += (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 20
    for _ in range(20):
        await sent.raw("announced", announced, 413)
        await sent.raw("chunked", chunks, 413)
        await sent.ask("long prompt", {"prompt": "word " * 190_000}, 400, path=COMPLETIONS)
        await sent.raw("endless head", b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 20000, 431)
        await sent.raw("long line", b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", 400, 404, 431)
    many = {f"field{i}": i for i in range(50_000)}
    await sent.ask("fields", {**ASK, **many}, 400)
    await sent.ask("stops", {**ASK, "stop": [f"w{i}" for i in range(50_000)]}, 200, 400)
    await sent.ask("bad words", {**ASK, "bad_words": [f"w{i}" for i in range(30_000)]}, 200, 400)
    await sent.ask("biases", {**ASK, "logit_bias": {str(i): 1.0 for i in range(60_000)}}, 200, 400)
    await sent.ask("messages", {**ASK, "messages": [{"role": "user", "content": "a"}] * 10_000}, 200, 400)
    await sent.ask("prompts", {"prompt": ["a"] * 60_000, "max_tokens": 1}, 400, path=COMPLETIONS)
    await sent.ask("embeddings", {"input": "word " * 190_000}, 400, path="/v1/embeddings")


async def malformed(sent: Sent) -> None:
    """Invalid JSON, and bodies with random bytes changed, cut or doubled."""
    fixed = [b"", b"{", b"[]", b'"a"', b"null", b"[" * 200_000, b'{"a":' * 50_000, b'{"a": NaN}', b"\xff\xfe{\x00}\x00", b"\x00" * 1000]
    fixed += [b'{"messages": [{"role": "user", "content": "\xff\xc0"}]}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}']
    fixed += [b'{"messages": [{"role": "\\udfff\\ud800", "content": "a"}]}', b'{"prompt": "\\ud800", "messages": []}', b'{"\\ud800": 1}']
    fixed += [b'{"messages": [{"role": "user", "content": "a"}], "stop": "\\udc00", "n": 1e400}', b'{"n": ' + b"9" * 100_000 + b"}"]
    for raw in fixed:
        for path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/generate", "/tokenize"):
            await sent.ask(f"{path} {raw[:40]!r}", raw, 400, path=path)
    chance = random.Random(5)
    seeds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {**ASK, "stop": ["a"], "logit_bias": {"5": 1.5}, "response_format": {"type": "text"}, "tools": []}),
        (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0.5, "seed": 3, "stream_options": None}),
        ("/v1/messages", {**ASK, "model": "tinyvllm", "system": "a"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ]

    async def one(number: int) -> None:
        path, body = seeds[number % len(seeds)]
        raw = bytearray(json.dumps(body).encode())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(raw))
            kind = chance.randrange(4)
            if kind == 0:
                raw[at] = chance.randrange(256)
            elif kind == 1:
                del raw[at : at + chance.randint(1, 20)]
            elif kind == 2:
                raw[at:at] = raw[at : at + chance.randint(1, 20)]
            else:
                raw[at:at] = chance.choice((b'"', b"{", b"null", b"-1", b"1e999", b"\\u0000", b"\\ud83d", b"[[]]"))
            raw = raw or bytearray(b" ")
        await sent.ask(f"{path} {bytes(raw)!r:.300}", bytes(raw), 200, 400, 404, path=path)

    await gather_all(sent.clients, one, 16)


async def bombs(sent: Sent) -> None:
    """Grammars, expressions and schemas that are small to send and large to build."""
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    nested = {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(30)}, "$ref": "#/$defs/d0"}
    nested["$defs"]["d30"] = {"type": "null"}
    structures: list[dict[str, Any]] = [
        {"regex": "(a{1,1000}){1,1000}"}, {"regex": "(a+)+b"}, {"regex": "(" * 5000}, {"regex": "a{1000000}"}, {"regex": "(?=a)b"},
        {"regex": "(a|aa|aaa|aaaa){1,5000}$"}, {"regex": "[\\s\\S]{60000}"}, {"regex": "\\p{L}" * 5000},
        {"grammar": "start: start start | start"}, {"grammar": "start: a\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40))},
        {"grammar": 'start: ("a"?)~1..1000000'}, {"grammar": "x" * 100_000}, {"grammar": 'root ::= root "a" | root root'},
        {"json": {"$ref": "#"}}, {"json": nested}, {"json": {"type": "array", "minItems": 10**9}}, {"json": {"enum": list(range(50_000))}},
        {"json": {"type": "string", "pattern": "(a*)*(b*)*(c|d)*$", "maxLength": 10**9}}, {"json": {"type": "integer", "minimum": -1e99}},
        {"json": {"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 10000} for i in range(2000)}}},
        {"json": "[" * 50_000}, {"choice": ["a" * 30_000]}, {"choice": [f"choice {i}" for i in range(20_000)]}, {"choice": []},
    ]  # fmt: skip
    for structure in structures:
        began = time.perf_counter()
        what = json.dumps(structure)[:80]
        await sent.ask(what, {**ASK, "structured_outputs": structure}, 200, 400)
        if (took := time.perf_counter() - began) > 20:
            sent.wrong[f"{what}: took {took:.0f} s"] += 1
    await sent.ask("deep schema", {**ASK, "structured_outputs": {"json": deep}}, 200, 400)

    async def one(number: int) -> None:
        structure = structures[number % len(structures)]
        await sent.ask(json.dumps(structure)[:80], {**ASK, "structured_outputs": structure}, 200, 400)

    await gather_all(2 * len(structures), one, 8)


async def injections(sent: Sent) -> None:
    """Templates in requests and messages, newlines in values that return as headers, requests inside requests."""
    for template in ("{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}a{% endfor %}", "{% include '/etc/passwd' %}"):
        await sent.ask("chat_template", {**ASK, "chat_template": template}, 400)
        await sent.ask("chat_template", {"messages": ASK["messages"], "chat_template": template}, 400, path="/tokenize")
    said = "{{ 7*191 }}{% set x = cycler.__init__.__globals__ %}{{ x.os.popen('id').read() }}"
    tokens = await sent.ask("jinja in a message", {"messages": [{"role": "user", "content": said}]}, 200, path="/tokenize")
    text = await sent.ask("detokenize", {"tokens": tokens.json()["tokens"]}, 200, path="/detokenize")
    if said not in text.json()["prompt"]:
        sent.wrong[f"a message was rendered: {text.json()['prompt']!r}"] += 1
    kwargs = {"messages": [], "add_generation_prompt": "{{ 1 }}", "chat_template": "{{ 7*7 }}", "bos_token": "\r\nX: 1"}
    await sent.ask("chat_template_kwargs", {**ASK, "chat_template_kwargs": kwargs}, 200, 400)
    for value in ("a\r\nX-Evil: 1", "a\nX-Evil: 1", "\u2028X-Evil", "x" * 5000):
        for field_ in ("request_id", "model", "user"):
            reply = await sent.ask(field_, {**ASK, field_: value}, 200, 400, 404)
            if "x-evil" in reply.headers:
                sent.wrong[f"{field_} got into a header"] += 1
    for more in ("X-Request-Id: a\x0bb\r\n", "X-Request-Id: \xff\xfe\r\n", "X-Deadline-Ms: 1e999\r\n", "X-Deadline-Ms: -1\r\n"):
        await sent.ask(repr(more), ASK, 200, 400, more=AUTH + more)
    inner = whole(ASK, CHAT)
    both = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{AUTH}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
    await sent.raw("two lengths", both + inner, 400)
    await sent.raw("two lengths", head(CHAT, 2, AUTH + "Content-Length: 30\r\n") + b"{}" + inner, 400)
    await sent.raw("folded", head(CHAT, 2, AUTH + "X-A: b\r\n  c\r\n") + b"{}", 400)
    await sent.raw("zero byte", head(CHAT, 2, AUTH + "X-A: b\x00c\r\n") + b"{}", 400)
    for path in ("/page/../../../etc/passwd", "/page/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/page//etc/passwd", "/v1/models/%0d%0aX:1", "/%00"):
        await sent.raw(path, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{AUTH}\r\n".encode(), 400, 404)


async def wrong_keys(sent: Sent) -> None:
    """Wrong keys of all forms."""
    lines = ["", "Authorization: Bearer sk-wrong\r\n", "Authorization: Bearer\r\n", f"Authorization: Basic {KEY}\r\n"]
    lines += ["x-api-key: \xe9\xff\r\n", f"x-api-key: {'a' * 50_000}\r\n"]
    lines += [f"Authorization: Bearer {KEY[:-1]}\r\n", f"Authorization: Bearer {KEY}0\r\n"]

    async def one(number: int) -> None:
        path = (CHAT, COMPLETIONS, "/v1/messages", "/v1/embeddings", "/metrics", "/status")[number % 6]
        data = head(path, 0, lines[number % len(lines)], "GET") if number % 6 > 3 else whole(ASK, path, lines[number % len(lines)])
        await sent.raw("wrong key", data, 401)

    await gather_all(sent.clients, one, 32)


async def idle_connections(sent: Sent) -> None:
    """Idle connections, and pipelined requests."""
    idle = [await asyncio.open_connection("127.0.0.1", sent.port) for _ in range(min(400, sent.clients))]
    for _ in range(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", sent.port)
        writer.write(whole(ASK, CHAT) * 8)
        for _ in range(8):
            reply = Reply()
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                await asyncio.wait_for(read_reply(reader, reply, time.perf_counter()), 60)
            sent.note("pipelined", reply, (200,))
        writer.close()
    for _, writer in idle:
        writer.close()


async def limits(sent: Sent) -> None:
    """Prompts longer than the context, answers larger than the memory, values above every limit."""
    for _ in range(20):
        await sent.ask("beyond the context", {"prompt": [5] * 5000}, 400, path=COMPLETIONS)
        await sent.ask("beyond the vocabulary", {"prompt": [2**31 - 1]}, 400, path=COMPLETIONS)
        await sent.ask("n", {**ASK, "n": 129}, 400)
    capped = {"prompt": [5] * 1000, "max_tokens": 10**9, "ignore_eos": True}
    await sent.ask("beyond the memory", capped, 200, path=COMPLETIONS)

    async def one(number: int) -> None:
        await sent.ask("all at once", {**capped, "prompt": [5 + number] * 700, "n": 4}, 200, 503, path=COMPLETIONS)

    await gather_all(12, one, 12)
    await sent.ask("many", {"prompt": "a", "n": 128, "max_tokens": 3}, 200, path=COMPLETIONS)
    await sent.ask("deadline", {**LONG, "stream": False, "deadline_ms": 20}, 200, 429, path=COMPLETIONS)


PHASES: tuple[Callable[[Sent], Awaitable[None]], ...] = (
    vanish, slow, unread, half_closed, huge, malformed, bombs, injections, wrong_keys, idle_connections, limits,
)  # fmt: skip


async def phase(server: Server, faults: Callable[[Sent], Awaitable[None]], clients: int, work: list[Asked], good: int) -> bool:
    """Send one kind of fault while good clients stream; whether no check failed."""
    sent, tally, began = Sent(server.port, clients), Tally(), time.monotonic()
    stop = asyncio.Event()

    async def stream(seed: int) -> None:
        while not stop.is_set():
            await keep_asking(server.port, work, tally, time.monotonic() + 0.2, seed + tally.requests, AUTH)

    tasks = [asyncio.create_task(stream(seed * 1000)) for seed in range(good)]
    try:
        await faults(sent)
    finally:
        stop.set()
        await asyncio.gather(*tasks)
    first = f"{percentile(tally.firsts, 0.5) * 1000:.0f} / {percentile(tally.firsts, 1.0) * 1000:.0f} ms"
    print(f"{faults.__name__}: {time.monotonic() - began:.1f} s, {dict(sent.seen)}", flush=True)
    print(f"    good: {tally.requests} answers, {tally.tokens} tokens, first token {first} (median, worst)", flush=True)
    for what, count in (sent.wrong + tally.faults).most_common(8):
        print(f"    FAULT {count} x {what}", flush=True)
    return not (sent.wrong or tally.faults)


def main() -> int:
    names = [one.__name__ for one in PHASES]
    parser = argparse.ArgumentParser(description="faults, while good clients stream")
    parser.add_argument("--clients", type=int, default=1000, help="bad ones in a phase that counts them")
    parser.add_argument("--good", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(names), help=f"phases, of {', '.join(names)}")
    options = parser.parse_args()
    chosen = [one for one in PHASES if one.__name__ in options.only.split(",")]
    work = known(36, seed=1)
    limits_ = ("--head-seconds", "3", "--body-seconds", "3", "--write-seconds", "4", "--beat-seconds", "1", "--max-body", "1MiB")
    with serving("--max-num-seqs", "16", "--num-blocks", "768", "--api-key", KEY, *limits_) as server:
        server.key = KEY
        print(f"warm-up: {asyncio.run(warm(server, work))}", flush=True)
        server.calm()
        good = True
        for number in range(options.rounds):
            before = server.held()
            for faults in chosen:
                good = asyncio.run(phase(server, faults, options.clients, work, options.good)) and good
                server.calm()
                print(f"    then: {server.held()}", flush=True)
            time.sleep(1)
            after = server.held()
            print(f"round {number}\n    before: {before}\n    after:  {after}")
            good = not _leaked(before, after, 0 < number == options.rounds - 1) and good
        complaints = server.complaints()
    if complaints:
        good = False
        print(f"FAULT the server wrote: {complaints[:4000]}")
    print("all as it must be" if good else "not as it must be")
    return not good


def _leaked(before: Held, after: Held, judged: bool) -> bool:
    """Whether a round has leaked resources, which is printed; memory only if `judged`. One socket belongs to the measurement itself."""
    if after.blocks > before.blocks or after.requests > before.requests or after.sockets > before.sockets + 1 or after.files > before.files:
        print("FAULT resources leaked")
        return True
    if judged and after.rss_mib > before.rss_mib + _GROWTH:
        print(f"FAULT the process grew by {after.rss_mib - before.rss_mib:.0f} MiB")
        return True
    return False


async def warm(server: Server, work: list[Asked]) -> str:
    """Batches of every size and every kind of request, so that everything that is created on first use exists."""
    tally = Tally()
    for clients in (1, 2, 4, 8, 16, 16):
        until = time.monotonic() + 4
        await asyncio.gather(*(keep_asking(server.port, work, tally, until, clients * 100 + i, AUTH) for i in range(clients)))
    sent = Sent(server.port, 1)
    kinds = [{**LONG, "n": 4, "logprobs": 20, "max_tokens": 40}, {"prompt": [5] * 700, "n": 4, "max_tokens": 20}, {"prompt": "a", "n": 128}]
    await gather_all(9, lambda i: sent.raw("warm", whole(kinds[i % 3]), 200), 9)
    return f"{tally.requests} answers, {len(tally.faults)} wrong; {dict(sent.seen)}"


if __name__ == "__main__":
    sys.exit(main())
