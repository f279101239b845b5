"""AsyncLLM: the front door for many callers at once. One thread owns the engine; callers are coroutines, of one event loop or several.

Knows no HTTP. Callers hand over commands under a condition variable and get outputs through their own event loop, so nobody polls.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinyvllm.config import EngineConfig, resolve
from tinyvllm.engine.prompt import Encoded, Message, Prompt, default_sampling_params, encode_prompt, is_conversation, spread
from tinyvllm.errors import ArgumentError, TinyvllmError
from tinyvllm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tinyvllm.engine.engine import Engine
    from tinyvllm.text.tokenizer import Tokenizer


class AsyncLLM:
    """A loaded model that serves concurrent requests. Arguments and errors are those of LLM; the call returns when the model is loaded."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Callable[[int, int, str], None] | None = None,
        **options: Any,
    ):
        config = resolve(model, **options)
        self._ids = itertools.count()
        self._wake = threading.Condition()
        self._commands: list[Callable[[Engine], None]] = []  # guarded by _wake
        self._closing = False  # guarded by _wake
        self._failure: BaseException | None = None  # why the thread ended, written before _closing
        self._waiting: dict[str, _Mailbox] = {}  # by the engine's key; guarded by _wake
        self._keys: dict[str, str] = {}  # of the names that are in use; guarded by _wake
        loaded: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._serve, args=(config, progress, loaded), name="tinyvllm-engine", daemon=True)
        self._thread.start()
        engine = loaded.result()
        self.config: EngineConfig = engine.config
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.default_params = default_sampling_params(engine.model_folder)
        atexit.register(self.close)  # a daemon thread that is still in native code when the interpreter goes would crash it

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing output of one prompt or conversation, each complete up to now; the last one is finished.

        A caller slower than the engine misses intermediate outputs, never the last. Leaving the iteration, or being cancelled, aborts
        the request. Raises RequestError for what cannot be served, and whatever ended the engine if it ended.
        """
        number = next(self._ids)
        name = f"async-{number}" if request_id is None else request_id
        params = spread(sampling_params, self.default_params, 1)[0]
        item: Prompt = {"messages": prompt} if is_conversation(prompt) else prompt  # type: ignore[assignment]
        encoded = await asyncio.to_thread(encode_prompt, self.tokenizer, item)  # a long prompt must not hold up the other callers
        mailbox = _Mailbox(name, f"{name}#{number}")
        self._submit(mailbox, encoded, params)
        finished = False
        try:
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            self._drop(mailbox)

    def abort(self, request_id: str) -> None:
        """End a request; whoever iterates over it gets its last output, with finish_reason "abort". Unknown ids are already over."""
        with self._wake:
            if (key := self._keys.get(request_id)) is not None:
                self._commands.append(lambda engine: engine.abort(key))
                self._wake.notify()

    def close(self) -> None:
        """End the engine and its thread. Requests still running get a TinyvllmError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def _submit(self, mailbox: _Mailbox, encoded: Encoded, params: SamplingParams) -> None:
        def add(engine: Engine) -> None:
            try:
                engine.add(mailbox.key, encoded.token_ids, params, encoded.text)
            except TinyvllmError as error:
                # the caller knows no keys
                error.args = (str(error).replace(mailbox.key, mailbox.name),)
                self._deliver([(mailbox, error)])

        with self._wake:
            if self._closing:
                raise TinyvllmError(f"AsyncLLM: the engine has ended{f' ({self._failure})' if self._failure else ''}") from self._failure
            if mailbox.name in self._keys:
                raise ArgumentError(f"AsyncLLM: request_id {mailbox.name!r} is in use")
            self._waiting[mailbox.key] = mailbox
            self._keys[mailbox.name] = mailbox.key
            self._commands.append(add)
            self._wake.notify()

    def _drop(self, mailbox: _Mailbox) -> None:
        """Nobody waits for this request any more: its name is free, and if it still runs the engine ends it."""
        with self._wake:
            if self._waiting.pop(mailbox.key, None) is not None:
                del self._keys[mailbox.name]
            if not mailbox.over:
                self._commands.append(lambda engine: engine.abort(mailbox.key))
                self._wake.notify()

    def _serve(self, config: EngineConfig, progress: Callable[[int, int, str], None] | None, loaded: Future[Engine]) -> None:
        """The engine's thread. The engine is also built here: tinygrad's state belongs to the thread that made it."""
        try:
            from tinyvllm.engine.engine import Engine  # tinygrad comes with it

            engine = Engine(config, progress)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(engine)
        failure: BaseException = TinyvllmError("AsyncLLM: the engine was closed while the request ran")
        try:
            while self._obey(engine):
                self._publish(engine.step())
        except BaseException as error:
            failure = self._failure = error
        finally:
            with self._wake:
                self._closing = True
                waiting, self._waiting, self._keys = list(self._waiting.values()), {}, {}
            self._deliver([(mailbox, failure) for mailbox in waiting])
            engine.close()

    def _obey(self, engine: Engine) -> bool:
        """Sleep until there is something to do, carry out the commands; False when it is time to end."""
        while True:
            with self._wake:
                while not (self._commands or self._closing or engine.has_work()):
                    self._wake.wait()
                if self._closing:
                    return False
                commands, self._commands = self._commands, []
            for command in commands:
                command(engine)
            if engine.has_work():
                return True

    def _publish(self, outputs: list[RequestOutput]) -> None:
        with self._wake:
            mailboxes = [(self._waiting.get(output.request_id), output) for output in outputs]
        self._deliver([(mailbox, replace(output, request_id=mailbox.name)) for mailbox, output in mailboxes if mailbox is not None])

    def _deliver(self, letters: Sequence[tuple[_Mailbox, RequestOutput | BaseException]]) -> None:
        """One wake-up per event loop and step, however many of its requests have news."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, RequestOutput | BaseException]]] = {}
        for mailbox, letter in letters:
            loops.setdefault(mailbox.loop, []).append((mailbox, letter))
        for loop, own in loops.items():
            try:
                loop.call_soon_threadsafe(_put_all, own)
            except RuntimeError:  # that event loop was closed, and its callers are gone with it
                for mailbox, _ in own:
                    self._drop(mailbox)


class _Mailbox:
    """The newest output of one request, on its way from the engine's thread to the coroutine that waits. Lives in the event loop.

    A slot rather than a queue: outputs are cumulative, and a caller that reads slowly must not make them pile up. The engine knows the
    request by `key`, which is never used again: `name` is the caller's, who may give it anew while the engine still ends the old request.
    """

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.key = key
        self.loop = asyncio.get_running_loop()
        self.over = False
        self._arrived = asyncio.Event()
        self._newest: RequestOutput | BaseException | None = None

    def put(self, letter: RequestOutput | BaseException) -> None:
        if not self.over:
            self._newest = letter
            self.over = isinstance(letter, BaseException) or letter.finished
            self._arrived.set()

    async def take(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        letter, self._newest = self._newest, None
        assert letter is not None, "a mailbox woke its reader without a letter"
        if isinstance(letter, BaseException):
            raise letter
        return letter


def _put_all(letters: Sequence[tuple[_Mailbox, RequestOutput | BaseException]]) -> None:
    for mailbox, letter in letters:
        mailbox.put(letter)
