"""AsyncLLM: the front door for many callers at once. One thread owns the engine; callers are coroutines, of one event loop or several.

Knows no HTTP. Callers hand over commands under a condition variable and get outputs through their own event loop, so nobody polls.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinyvllm.config import EngineConfig, resolve
from tinyvllm.engine.prompt import Encoded, Message, Prompt, default_sampling_params, encode_piece, encode_prompt, is_conversation, spread
from tinyvllm.engine.segments import MAX_TRIES, PREFILL_PARAMS, Segment, eviction_error, output_token_ids, raise_if_failed
from tinyvllm.errors import ArgumentError, TinyvllmError
from tinyvllm.request import BeamSearchParams, RequestOptions, RequestOutput, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from tinyvllm.engine.engine import Engine
    from tinyvllm.metrics import EngineMetrics, NoMetrics
    from tinyvllm.text.tokenizer import Tokenizer


_STATUS_EVERY = 0.1  # seconds between two pictures of the engine's state


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
        engine.segments.submit = self._post
        self.metrics: EngineMetrics | NoMetrics = engine.metrics
        self._status = engine.status()
        self._compile = engine.constraints.compile
        self.config: EngineConfig = engine.config
        self.max_model_len: int = engine.max_model_len
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.default_params = default_sampling_params(engine.model_folder)
        atexit.register(self.close)  # a daemon thread that is still in native code when the interpreter goes would crash it

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing output of one prompt or conversation; the last one is finished. `output_kind` says what each holds.

        A caller slower than the engine misses intermediate outputs, never the last; of deltas it gets several as one. Leaving the
        iteration, or being cancelled, aborts the request. Raises RequestError for what cannot be served, BusyError for what the queue
        refuses, and whatever ended the engine if it ended.
        """
        params = spread(sampling_params, self.default_params, 1)[0]
        async with contextlib.aclosing(self._outputs(await self.encode(prompt), params, request_id, options)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt | Sequence[Message],
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        """The best continuations of one prompt by beam search, the best first."""
        async with contextlib.aclosing(self._outputs(await self.encode(prompt), params, request_id, options)) as outputs:
            return [output async for output in outputs][-1]

    async def encode(self, prompt: Prompt | Sequence[Message]) -> Encoded:
        """The token ids of a prompt or conversation, and its text, in a thread: a long one must not hold up the other callers."""
        item: Prompt = {"messages": prompt} if is_conversation(prompt) else prompt  # type: ignore[assignment]
        return await asyncio.to_thread(encode_prompt, self.tokenizer, item)

    async def embed(self, prompts: list[list[int]], pooling: str = "mean", normalize: bool = True) -> np.ndarray:
        """Embeddings float32 [N, E] of N prompts of token ids: of the hidden states the mean, or the last, made of length 1 or not."""
        import numpy as np

        return np.stack([await self._ask(functools.partial(_embed, ids, pooling, normalize)) for ids in prompts])

    async def segment(
        self,
        piece: str | Sequence[int],
        after: Segment | None = None,
        *,
        cache_salt: str | None = None,
        options: RequestOptions | None = None,
    ) -> Segment:
        """LLM.segment, computed beside whatever runs, on the priority and key of `terms`."""
        head, token_ids = await asyncio.to_thread(encode_piece, self.tokenizer, piece, after is None)
        return await self._hold(token_ids, head, after, cache_salt, options)

    async def segment_of(
        self, output: RequestOutput, index: int = 0, after: Segment | None = None, *, cache_salt: str | None = None
    ) -> Segment:
        """LLM.segment_of; the output must be a whole one, not a delta."""
        return await self._hold(output_token_ids(output, index, after), [], after, cache_salt)

    async def segments(self) -> list[Segment]:
        """Those that are held, the oldest first."""
        return list(await self._ask(lambda engine: list(engine.segments)))

    async def _hold(
        self, token_ids: list[int], head: list[int], after: Segment | None, cache_salt: str | None, options: RequestOptions | None = None
    ) -> Segment:
        segment: Segment = await self._ask(lambda engine: engine.segments.new(token_ids, head, after, cache_salt))
        on = (
            RequestOptions(cache_salt=segment.cache_salt)
            if options is None
            else RequestOptions(options.priority, key=options.key, cache_salt=segment.cache_salt)
        )
        try:
            for _ in range(MAX_TRIES):
                if await self._ask(lambda engine: engine.segments.hold(segment)):
                    return segment
                async with contextlib.aclosing(
                    self._outputs(Encoded(None, segment.block_aligned_ids), PREFILL_PARAMS, None, on)
                ) as outputs:
                    async for output in outputs:
                        raise_if_failed(output)
        except asyncio.CancelledError:
            segment.release()  # it may be held by now, and nobody would know it
            raise
        raise eviction_error(segment)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self._closing:
                self._commands.append(lambda engine: command())
                self._wake.notify()

    @property
    def alive(self) -> bool:
        """Whether the engine still serves; what ended it is raised to whoever asks it for something."""
        return not self._closing

    def status(self) -> dict[str, Any]:
        """A picture of the engine not much older than a tenth of a second while it works; see Engine.status."""
        return self._status

    def predicted_wait(self) -> float:
        """Seconds until a short prompt would get its first token, by the rates of the last steps."""
        wait: float = self._status["predicted_wait"]
        return wait

    async def _ask(self, question: Callable[[Engine], Any]) -> Any:
        """What the engine's thread answers between two steps."""
        loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result(result) if error is None else answer.set_exception(error)

        def ask(engine: Engine) -> None:
            try:
                result, error = question(engine), None
            except Exception as failed:
                result, error = None, failed
            with contextlib.suppress(RuntimeError):  # the loop was closed, and with it went who asked
                loop.call_soon_threadsafe(settle, result, error)

        with self._wake:
            self._refuse_closed()
            self._commands.append(ask)
            self._wake.notify()
        return await answer

    async def _outputs(
        self, encoded: Encoded, params: SamplingParams | BeamSearchParams, request_id: str | None, options: RequestOptions | None
    ) -> AsyncGenerator[RequestOutput, None]:
        number = next(self._ids)
        name = f"async-{number}" if request_id is None else request_id
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await asyncio.to_thread(self._compile, params)  # some take half a second, in which the engine's thread would stand still
        joins = isinstance(params, SamplingParams) and params.output_kind == "delta"
        mailbox = _Mailbox(name, f"{name}#{number}", joins)
        self._submit(mailbox, encoded, params, options)
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

    def _refuse_closed(self) -> None:
        if self._closing:
            raise TinyvllmError(f"AsyncLLM: the engine has ended{f' ({self._failure})' if self._failure else ''}") from self._failure

    def _submit(
        self, mailbox: _Mailbox, encoded: Encoded, params: SamplingParams | BeamSearchParams, options: RequestOptions | None
    ) -> None:
        def add(engine: Engine) -> None:
            try:
                engine.segments.check_use(encoded.segments, options)
                engine.add(mailbox.key, encoded.token_ids, params, encoded.text, options)
            except TinyvllmError as error:
                # the caller knows no keys
                error.args = (str(error).replace(mailbox.key, mailbox.name),)
                self._deliver([(mailbox, error)])

        with self._wake:
            self._refuse_closed()
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
        pictured = 0.0
        failure: BaseException = TinyvllmError("AsyncLLM: the engine was closed while the request ran")
        try:
            while self._obey(engine):
                self._publish(engine.step())
                engine.tend(busy=True)
                if (now := time.monotonic()) > pictured + _STATUS_EVERY or not engine.has_work():
                    self._status, pictured = engine.status(), now
        except BaseException as error:
            failure = self._failure = error
        finally:
            with self._wake:
                self._closing = True
                waiting, self._waiting, self._keys = list(self._waiting.values()), {}, {}
            self._deliver([(mailbox, failure) for mailbox in waiting])
            engine.close()

    def _obey(self, engine: Engine) -> bool:
        """Sleep until there is something to do, carry out the commands; False when it is time to end. What has time is done meanwhile."""
        pause: float | None = 0.0
        while True:
            with self._wake:
                if not (self._commands or self._closing or engine.has_work()):
                    self._wake.wait(pause)
                if self._closing:
                    return False
                commands, self._commands = self._commands, []
            for command in commands:
                command(engine)
            if engine.has_work():
                return True
            pause = engine.tend(busy=False)

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

    A slot rather than a queue: outputs are cumulative or can be joined, and a caller that reads slowly must not make them pile up. The
    engine knows the request by `key`, which is never used again: `name` is the caller's, who may give it anew while the engine still ends
    the old request.
    """

    def __init__(self, name: str, key: str, joins: bool) -> None:
        self.name = name
        self.key = key
        self._joins = joins  # outputs are deltas, of which none may be lost
        self.loop = asyncio.get_running_loop()
        self.over = False
        self._arrived = asyncio.Event()
        self._newest: RequestOutput | BaseException | None = None

    def put(self, letter: RequestOutput | BaseException) -> None:
        if not self.over:
            before = self._newest
            if self._joins and isinstance(letter, RequestOutput) and isinstance(before, RequestOutput):
                letter = before.joined(letter)
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


def _embed(token_ids: list[int], pooling: str, normalize: bool, engine: Engine) -> np.ndarray:
    return engine.embed(token_ids, pooling, normalize)
