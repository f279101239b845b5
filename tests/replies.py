"""A server that answers as a test wants, for tests of clients of OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Reply = tuple[int, dict[str, str], bytes]  # status, headers, body


class ReplyServer:
    """Answers POSTs with `replies` in turn, the last one for ever; "close" ends the connection instead.

    `paths`, `headers` and `bodies` are those of the POSTs so far.
    """

    models = ("first",)

    def __init__(self, *replies: Reply):
        self.replies: list[Any] = [*replies]
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def page(self, path: str) -> Reply:
        """The answer to a GET: the list of models, whatever the path."""
        return 200, {}, json.dumps({"data": [{"id": model} for model in self.models]}).encode()

    def note_sent(self, body: bytes) -> None:
        """Called after a reply, with its body."""

    def take(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
        """Keep a POST; its reply."""
        with self._lock:
            self.paths.append(path)
            self.headers.append(headers)
            self.bodies.append(body)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        """Serve in a thread."""
        thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.http.shutdown()
            thread.join()
            self.http.server_close()


def _handler(server: ReplyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*server.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = server.take(self.path, dict(self.headers), body)
            if reply == "close":
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self._reply(*reply)

        def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            server.note_sent(body)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler
