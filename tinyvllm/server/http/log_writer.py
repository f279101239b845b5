"""Lines for people and machines to read, written by a thread of their own: whoever does not read our stdout must not hold up the server."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from typing import TextIO

_MOST = 20_000  # lines that may wait; more are dropped, and counted


class Lines:
    """One stream. `write` never waits."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """A line without its end. The thread is started by the first."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tinyvllm-lines", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits, as far as it is read within some seconds."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=seconds)
                self._thread.join(seconds)
            self._thread = None

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            lines = [line]
            if self._dropped:
                lines.append(f'{{"dropped_lines": {self._dropped}}}')
                self._dropped = 0
            with contextlib.suppress(OSError, ValueError):  # nobody reads, or the stream is closed: requests go on
                self._stream.write("\n".join(lines) + "\n")
                if self._waiting.empty():
                    self._stream.flush()


class LinesHandler(logging.Handler):
    """Log records as lines."""

    def __init__(self, lines: Lines):
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.write(self.format(record))


def log_to(stream: TextIO | None = None) -> Lines:
    """Let what the server and uvicorn report go to a stream (stderr) without ever waiting for it. Close what is returned."""
    lines = Lines(sys.stderr if stream is None else stream)
    handler = LinesHandler(lines)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("tinyvllm.server", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    return lines
