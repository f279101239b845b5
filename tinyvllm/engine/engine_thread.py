"""The thread that owns an engine: it builds it, runs what callers want done between steps, and hands its outputs to their event loops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tinyvllm.engine.frontend import submit
from tinyvllm.engine.mailbox import Delivery, Mailbox, deliver
from tinyvllm.engine.prompt import Encoded
from tinyvllm.errors import TinyvllmError
from tinyvllm.request import BeamSearchParams, RequestOptions, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tinyvllm.engine.engine import Engine

log = logging.getLogger("tinyvllm")

STATUS_INTERVAL = 0.1  # seconds between two snapshots of the engine's state


class EngineThread:
    """One engine and its thread. Callers hand commands over under a condition variable, so nothing polls.

    `build` makes the engine of this object, in the thread: tinygrad's state belongs to the thread that created it. `on_end` is called
    there with the engine and what ended it, None for `close`, before the engine is closed.
    """

    def __init__(self, build: Callable[[EngineThread], Engine], on_end: Callable[[Engine, BaseException | None], None]):
        """Waits until the engine is built; errors of `build`."""
        self._on_end = on_end
        self._wake = threading.Condition()
        self._commands: list[Callable[[Engine], None]] = []  # guarded by _wake
        self._closing = False  # guarded by _wake
        self._failure: BaseException | None = None  # why the thread ended, written before _closing
        self._lost: BaseException | None = None  # why it is to end; guarded by _wake
        self._on_failure: Callable[[BaseException], None] | None = None  # guarded by _wake
        self.mailboxes: dict[str, Mailbox] = {}  # by the engine's key; guarded by _wake
        self._keys: dict[str, str] = {}  # the engine's keys of the request ids in use; guarded by _wake
        built: Future[Engine] = Future()
        self.thread = threading.Thread(target=self._run, args=(build, built), name="tinyvllm-engine", daemon=True)
        self.thread.start()
        self.engine = built.result()  # for this thread only while nothing runs
        self.status = self.engine.status()  # at most about STATUS_INTERVAL old while it works

    @property
    def alive(self) -> bool:
        return not self._closing

    def __contains__(self, name: str) -> bool:
        """Whether a request of this id is running."""
        return name in self._keys

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Have `on_failure` called, from any thread, with the exception that ends the engine; at once if one has. `close` is none."""
        with self._wake:
            self._on_failure = on_failure
            failure = self._failure if self._closing else None
        if failure is not None:
            on_failure(failure)

    def check_open(self) -> None:
        """TinyvllmError if the engine has ended."""
        if self._closing:
            raise TinyvllmError(f"AsyncLLM: the engine has ended{f' ({self._failure})' if self._failure else ''}") from self._failure

    def run_soon(self, command: Callable[[], None]) -> None:
        """Run a function between two steps, if there is another one."""
        with self._wake:
            if not self._closing:
                self._commands.append(lambda engine: command())
                self._wake.notify()

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """The result of a function that the thread runs between two steps."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result(result) if error is None else answer.set_exception(error)

        def command(engine: Engine) -> None:
            try:
                result, error = function(engine), None
            except Exception as failed:
                result, error = None, failed
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its callers are gone
                loop.call_soon_threadsafe(settle, result, error)

        with self._wake:
            self.check_open()
            self._commands.append(command)
            self._wake.notify()
        return await answer

    async def outputs(
        self, mailbox: Mailbox, encoded: Encoded, params: SamplingParams | BeamSearchParams, options: RequestOptions | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, until the last one. Leaving them aborts it. Its id must not be in use."""
        self._submit(mailbox, encoded, params, options)
        try:
            async for output in mailbox.outputs():
                yield output
        finally:
            self._drop(mailbox)

    def abort(self, name: str) -> None:
        """End a request, if one of this id is running."""
        with self._wake:
            if (key := self._keys.get(name)) is not None:
                self._commands.append(lambda engine: engine.abort(key))
                self._wake.notify()

    def end_with(self, error: BaseException) -> None:
        """End the engine as if a step had raised this."""
        with self._wake:
            self._lost = error
            self._wake.notify()

    def close(self) -> None:
        """End the engine and the thread. Requests that still run get a TinyvllmError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self.thread.join()

    def _submit(
        self, mailbox: Mailbox, encoded: Encoded, params: SamplingParams | BeamSearchParams, options: RequestOptions | None
    ) -> None:
        def add(engine: Engine) -> None:
            try:
                submit(engine, mailbox.key, encoded, params, options)
            except TinyvllmError as error:
                self._deliver([(mailbox, mailbox.in_callers_words(error))])

        with self._wake:
            self.check_open()
            self.mailboxes[mailbox.key] = mailbox
            self._keys[mailbox.name] = mailbox.key
            self._commands.append(add)
            self._wake.notify()

    def _drop(self, mailbox: Mailbox) -> None:
        """The caller does not wait any more: the request id is free again, and a request that still runs is aborted."""
        with self._wake:
            if self.mailboxes.pop(mailbox.key, None) is not None:
                del self._keys[mailbox.name]
            if not mailbox.over:
                self._commands.append(lambda engine: engine.abort(mailbox.key))
                self._wake.notify()

    def _run(self, build: Callable[[EngineThread], Engine], built: Future[Engine]) -> None:
        try:
            engine = build(self)
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(engine)
        last_status = 0.0
        failure: BaseException = TinyvllmError("AsyncLLM: the engine was closed while the request ran")
        try:
            while self._run_commands(engine):
                self.publish(engine.step())
                engine.between_steps()
                if (now := time.monotonic()) > last_status + STATUS_INTERVAL or not engine.has_work():
                    self.status, last_status = engine.status(), now
        except BaseException as error:
            log.critical("the engine ends: %s", type(error).__name__, exc_info=error)
            failure = self._failure = error
        finally:
            with self._wake:
                self._closing = True
                mailboxes, self.mailboxes, self._keys = list(self.mailboxes.values()), {}, {}
                on_failure = self._on_failure
            if self._failure is not None and on_failure is not None:
                on_failure(self._failure)  # first: a caller that has its error finds the server in the state that follows from it
            self._deliver([(mailbox, failure) for mailbox in mailboxes])
            try:
                self._on_end(engine, self._failure)
                engine.close()
            except Exception as error:
                log.error("the engine could not be closed", exc_info=error)

    def _run_commands(self, engine: Engine) -> bool:
        """Wait for work and run the callers' commands; False when it is time to end. An idle engine does its background work meanwhile."""
        pause: float | None = 0.0
        while True:
            with self._wake:
                if not (self._commands or self._closing or self._lost or engine.has_work()):
                    self._wake.wait(pause)
                if self._lost is not None:
                    raise self._lost
                if self._closing:
                    return False
                commands, self._commands = self._commands, []
            for command in commands:
                try:
                    command(engine)
                except Exception as error:  # none should raise: what concerns a caller is delivered to it
                    log.error("a command failed; the engine continues", exc_info=error)
            if engine.has_work():
                return True
            pause = engine.on_idle()

    def publish(self, outputs: list[RequestOutput]) -> None:
        """Hand the outputs of a step to their callers."""
        with self._wake:
            mailboxes = [(self.mailboxes.get(output.request_id), output) for output in outputs]
        self._deliver([(mailbox, mailbox.result(output)) for mailbox, output in mailboxes if mailbox is not None])

    def _deliver(self, results: Sequence[Delivery]) -> None:
        """One wake-up per event loop and step, for any number of requests."""
        for mailbox in deliver(results):
            self._drop(mailbox)
