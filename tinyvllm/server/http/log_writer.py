"""Writes log lines in a separate thread: a reader of stdout that stalls must not block the server."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from typing import TextIO

_MAX_WAITING = 20_000  # lines; further lines are dropped and counted


class LogWriter:
    """One output stream. `write` never blocks."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Queue a line, without its newline. The first line starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tinyvllm-log", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, seconds: float = 2.0) -> None:
        """Write the queued lines, as far as the stream accepts them within this time."""
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
            with contextlib.suppress(OSError, ValueError):  # the stream is broken or closed: requests continue without a log
                self._stream.write("\n".join(lines) + "\n")
                if self._waiting.empty():
                    self._stream.flush()


class LogWriterHandler(logging.Handler):
    """Passes log records to a LogWriter."""

    def __init__(self, writer: LogWriter):
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(self.format(record))


def redirect_logs(stream: TextIO | None = None) -> LogWriter:
    """Send the logs of the server and of uvicorn to a stream (stderr by default) through a LogWriter. The caller closes it."""
    writer = LogWriter(sys.stderr if stream is None else stream)
    handler = LogWriterHandler(writer)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("tinyvllm.server", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    return writer
