"""The other ranks of an engine, as rank 0 sees them: processes that it starts, what it sends, and how it notices that one ended."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from tinyvllm.distributed.memory import SharedMemory
from tinyvllm.errors import RankError

STEP_SECONDS = 60.0  # after which a step counts as hanging, though all ranks send heartbeats; its first run compiles
SILENT_SECONDS = 10.0  # without a heartbeat, after which a rank counts as hanging
START_SECONDS = 600.0  # to load the weights
BEAT_SECONDS = 0.5  # from one heartbeat of a rank to the next
ASK_SECONDS = 60.0  # for an answer
PROGRAM = "tinyvllm.runner.rank"  # of a rank's process
DONE, REFUSED = b"+", b"-"  # answers, between heartbeats


class Ranks:
    """All ranks but rank 0. A rank sends rank 0 a byte when it is ready, then one every BEAT_SECONDS.

    A message is a line of JSON. It goes to the ranks of the first stage; each rank passes it on to its neighbour in the next stage once it
    has done what it says. The ranks of the last stage take what comes to them in the order in which rank 0 does, which sends them that.
    What `ask` sends each rank also answers, with a byte.
    """

    def __init__(self, memory: SharedMemory, start: dict[str, Any], threads: int, environments: Sequence[dict[str, str]] = ()):
        """`environments` has what each rank has in its environment in addition to this process."""
        self._memory, self._closing, self._since = memory, False, 0.0
        self.failure: str | None = None
        self._noticed = threading.Event()  # that there is a failure
        self._answered, self._answers = threading.Condition(), b""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        layout = memory.layout
        links = [socket.socketpair() for _ in range(layout.ranks - layout.world_size)]  # (of rank r + world_size, of rank r)
        for rank in range(1, layout.ranks):
            sends = links[rank - layout.world_size][0] if rank >= layout.world_size else None
            receives = links[rank][1] if rank < len(links) else None
            own = {"TINYVLLM_THREADS": str(threads)} | (environments[rank] if environments else {})
            self._start(rank, start, own, sends, receives)
        self._messages = links[0][1].makefile("rb") if links else None
        for link in links:
            link[0].close()  # or the end of a rank would not be seen by its neighbour
            link[1].close()
        self._watcher = threading.Thread(target=self._watch, name="tinyvllm-ranks", daemon=True)
        self._wait_until_ready()
        memory.close_file()
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def _start(
        self, rank: int, start: dict[str, Any], own: dict[str, str], sends: socket.socket | None, receives: socket.socket | None
    ) -> None:
        """Start the process of a rank, with its ends of the links to the next stage and from the one before."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", PROGRAM, str(theirs.fileno()), str(self._memory.fd)]
        links = {name: link.fileno() for name, link in (("sends", sends), ("receives", receives)) if link is not None}
        files, environment = (theirs.fileno(), self._memory.fd, *links.values()), os.environ | own
        process = subprocess.Popen(command, pass_fds=files, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self._processes.append(process)
        self._sockets.append(ours)
        ours.sendall(json.dumps(start | {"rank": rank, "links": links}).encode() + b"\n")

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        for rank, link in enumerate(self._sockets, start=1):
            link.settimeout(max(0.1, end - time.monotonic()))
            try:
                answer = link.recv(1)
            except TimeoutError:
                answer = b""
            if answer != b"+":
                self.close()
                raise RankError(f"engine: rank {rank} of {len(self._sockets) + 1} did not start; its message is above")
            link.settimeout(None)

    def send(self, **message: Any) -> None:
        """To the ranks of the first stage. RankError if one has ended."""
        layout = self._memory.layout
        self._send(range(max(1, layout.ranks - layout.world_size), layout.ranks), message)

    def send_last(self, **message: Any) -> None:
        """To the other ranks of the last of several stages."""
        self._send(range(1, self._memory.layout.world_size), message)

    def _send(self, ranks: range, message: dict[str, Any]) -> None:
        self.check()
        line = json.dumps(message).encode() + b"\n"
        for rank in ranks:
            try:
                self._sockets[rank - 1].sendall(line)
            except OSError as error:
                self._fail(self._ended(rank))
                raise RankError(self._text()) from error

    def ask(self, **message: Any) -> bool:
        """`send`, and wait for the answers; whether all ranks have done it. RankError also if one does not answer."""
        with self._answered:
            self._answers = b""
        self.send(**message)
        if self._memory.layout.stages > 1:
            self.send_last(**message)  # which have it in its turn, too, but must answer now
        with self._answered:
            wanted = len(self._sockets)
            self._answered.wait_for(lambda: len(self._answers) == wanted or self.failure is not None, ASK_SECONDS)
            answers = self._answers
        if len(answers) < wanted:
            self._fail(f"a rank hangs: it has not answered for {ASK_SECONDS:.0f} s")
        self.check()
        return REFUSED not in answers

    def receive(self) -> dict[str, Any]:
        """The next message that has passed all stages before rank 0's. RankError if a rank has ended or hangs."""
        assert self._messages is not None
        try:
            line = self._messages.readline()
        except OSError:
            line = b""
        if not line:  # the neighbour has ended; which rank was first, and why, is noticed by its heartbeats
            self._noticed.wait(SILENT_SECONDS)
            self.check()
            raise RankError("engine: a rank has closed its link, so no step can run; the engine has ended: start it again")
        message: dict[str, Any] = json.loads(line)
        return message

    def check(self) -> None:
        if self.failure is not None:
            raise RankError(self._text())

    def step_started(self) -> None:
        self._since = self._since or time.monotonic()

    def step_ended(self, in_flight: int = 0) -> None:
        """`in_flight` others run. RankError if the step was given up: its results are undefined."""
        self._since = time.monotonic() if in_flight else 0.0
        self.check()

    def abandon(self) -> None:
        """A step that was announced does not run in rank 0."""
        self._fail("a step failed in rank 0")

    def _text(self) -> str:
        return f"engine: {self.failure}, so no step can run; the engine has ended: start it again"

    def _fail(self, reason: str) -> None:
        if self.failure is None and not self._closing:
            self.failure = reason
        self._noticed.set()
        with self._answered:
            self._answered.notify_all()
        self._memory.give_up()
        for process in self._processes:
            process.kill()

    def _ended(self, rank: int) -> str:
        """What to say of a rank that has closed its socket, which it does just before it has ended."""
        process = self._processes[rank - 1]
        try:
            return f"rank {rank} (process {process.pid}) ended with code {process.wait(1)}"
        except subprocess.TimeoutExpired:
            return f"rank {rank} (process {process.pid}) ended its work"

    def _watch(self) -> None:
        """Notice a rank that ends, stops or waits for ever. Time in which this process did not run itself does not count as silence."""
        silent = dict.fromkeys(range(1, len(self._sockets) + 1), 0.0)
        with selectors.DefaultSelector() as selector:
            try:
                for rank, link in enumerate(self._sockets, start=1):
                    selector.register(link, selectors.EVENT_READ, rank)
            except ValueError:  # `close` was faster than the start of this thread
                return
            while not self._closing and self.failure is None:
                start = time.monotonic()
                alive = {key.data for key, _ in selector.select(BEAT_SECONDS) if self._receives(key.data)}
                passed = min(time.monotonic() - start, BEAT_SECONDS)
                silent = {rank: 0.0 if rank in alive else seconds + passed for rank, seconds in silent.items()}
                self._check_progress(silent)

    def _receives(self, rank: int) -> bool:
        """Whether a rank whose socket is readable has sent heartbeats; it has ended otherwise."""
        try:
            sent = self._sockets[rank - 1].recv(4096)
        except OSError:
            sent = b""
        alive = bool(sent)
        if answers := sent.replace(b".", b""):
            with self._answered:
                self._answers += answers
                self._answered.notify_all()
        if not alive and not self._closing:
            self._fail(self._ended(rank))
        return alive

    def _check_progress(self, silent: dict[int, float]) -> None:
        for rank, seconds in silent.items():
            if seconds > SILENT_SECONDS and not self._closing:
                self._fail(f"rank {rank} (process {self._processes[rank - 1].pid}) hangs: no heartbeat for {seconds:.0f} s")
        if self._since and time.monotonic() - self._since > STEP_SECONDS:
            self._fail(f"a rank hangs: a step took more than {STEP_SECONDS:.0f} s (if it only is slow, lower --max-num-batched-tokens)")

    def close(self) -> None:
        """End the ranks. Again: nothing."""
        self._closing = True
        self._memory.give_up()
        for process in self._processes:
            process.kill()
        for process, link in zip(self._processes, self._sockets, strict=True):
            process.wait()
            link.close()
        if self._messages is not None:
            self._messages.close()
