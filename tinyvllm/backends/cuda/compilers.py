"""NVRTC in processes of its own, so that several texts compile at once whatever it locks (decision 29: whether threads do is open).

A message in either direction is its length, 8 bytes, and JSON or machine code. A compiler process ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from types import TracebackType
from typing import IO

from tinyvllm.backends.cuda import nvrtc
from tinyvllm.errors import KernelError

_MAIN = "from tinyvllm.backends.cuda.compilers import serve; serve()"
MAX_MESSAGE = 1 << 30  # bytes
_CODE, _ERROR = b"c", b"e"  # the first byte of an answer


class CompilerProcess:
    """One process with NVRTC, started by its first compilation. Used by one thread, and ended with the context."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = False

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
        """Machine code; in this process, if there can be no other. KernelError with the compiler's words."""
        if not self._lost:
            try:
                return self._compile(text, name, options)
            except OSError:  # it cannot be started, or it was killed
                self._lost = True
        return nvrtc.compile_here(text, name, options)

    def _compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
        process = self._process = self._process or _started()
        assert process.stdin is not None and process.stdout is not None
        _send(process.stdin, json.dumps([text, name, options]).encode())
        answer = _receive(process.stdout)
        if answer[:1] == _ERROR:
            raise KernelError(answer[1:].decode())
        if answer[:1] != _CODE:
            raise OSError("the compiler process ended")
        return answer[1:]

    def __enter__(self) -> CompilerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.communicate()  # closes its input, and waits


def _started() -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if not sys.executable:
        raise FileNotFoundError("no Python to start")
    # a session of its own: Ctrl-C in a terminal is for the server, whose end also ends this process
    command = [sys.executable, "-c", _MAIN]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """A message; empty at the end of the stream, and where it is cut or longer than MAX_MESSAGE."""
    size = int.from_bytes(stream.read(8), "little")
    message = stream.read(size) if 0 < size <= MAX_MESSAGE else b""
    return message if len(message) == size else b""


def serve() -> None:
    """The compiler process: answers each message on its input, until that ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with answers
    while message := _receive(sys.stdin.buffer):
        text, name, options = json.loads(message)
        try:
            answer = _CODE + nvrtc.compile_here(text, name, tuple(options))
        except KernelError as error:
            answer = _ERROR + str(error).encode()
        _send(answers, answer)
