"""Compilers in the background: their order and number, and what becomes of failures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from tinyvllm.backends import ahead as module
from tinyvllm.backends.ahead import CompileAhead


class Compiler:
    """Notes what it compiles, and how many at a time; waits for `go`."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.most = self._running = 0
        self.go = threading.Event()
        self._lock = threading.Lock()

    def compile(self, key: str) -> bytes:
        with self._lock:
            self.begun.append(key)
            self._running += 1
            self.most = max(self.most, self._running)
        assert self.go.wait(60)
        with self._lock:
            self._running -= 1
        if key == "broken":
            raise ValueError(key)
        return key.encode()

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], bytes]]:
        yield self.compile


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: SimpleNamespace(processes=2))


def test_later_keys_wait_for_the_same_compilers() -> None:
    compiler = Compiler()
    made = CompileAhead[str](compiler.opened)
    made.start("abc")
    made.start("cde")  # c once
    made.start([])
    compiler.go.set()
    assert [made.result(key) for key in "abcde"] == [b"a", b"b", b"c", b"d", b"e"]
    assert sorted(compiler.begun) == list("abcde") and compiler.begun[:2] in (["a", "b"], ["b", "a"]) and compiler.most <= 2
    assert made.result("a") is None
    made.start("f")  # by a new thread: the others have ended
    assert made.result("f") == b"f"


def test_failures_are_raised_where_the_result_is_needed() -> None:
    compiler = Compiler()
    compiler.go.set()
    made = CompileAhead[str](compiler.opened)
    made.start(["broken", "a"])
    with pytest.raises(ValueError, match="broken"):
        made.result("broken")
    assert made.result("a") == b"a"

    @contextlib.contextmanager
    def missing() -> Iterator[Callable[[str], bytes]]:
        raise OSError("no compiler")
        yield compiler.compile

    without = CompileAhead[str](missing)
    without.start("ab")
    for key in "ab":
        with pytest.raises(OSError, match="no compiler"):
            without.result(key)
    without.start("c")
    without.clear()


def test_without_threads_nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = CompileAhead[str](Compiler().opened)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        made.start("abc")
    assert [made.result(key) for key in "abc"] == [None, None, None]
