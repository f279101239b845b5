"""AsyncLLM: the interface for concurrent callers. One thread owns the engine; callers are coroutines of one event loop or several.

Knows no HTTP. Callers hand commands over under a condition variable and get outputs through their own event loop, so nothing polls.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinyvllm.config.engine import EngineConfig, resolve
from tinyvllm.engine.engine_thread import EngineThread
from tinyvllm.engine.fingerprint import Fingerprint
from tinyvllm.engine.frontend import prefill_options, start_engine, with_adapter
from tinyvllm.engine.mailbox import Mailbox
from tinyvllm.engine.prompt import Encoded, Message, Prompt, default_sampling_params, encode_piece, encode_prompt, is_conversation, spread
from tinyvllm.engine.segments import MAX_TRIES, PREFILL_PARAMS, Segment, eviction_error, output_token_ids, raise_if_failed
from tinyvllm.engine.tools.trace_output import TraceMemory
from tinyvllm.errors import ArgumentError
from tinyvllm.request import BeamSearchParams, LoRARequest, RequestOptions, RequestOutput, SamplingParams
from tinyvllm.request.adapter import Adapter, check_adapter_name

if TYPE_CHECKING:
    import numpy as np

    from tinyvllm.engine.engine import Engine
    from tinyvllm.engine.replica import Replicas
    from tinyvllm.metrics import EnergyTotals, EngineMetrics, NoMetrics
    from tinyvllm.text.tokenizer import Tokenizer


MAX_SHORT_STOPS = 500  # characters of stop strings that the engine's thread prepares itself, in half a millisecond


class AsyncLLM:
    """A loaded model that serves concurrent requests. Arguments and errors are those of LLM; the constructor waits until it is loaded."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Callable[[int, int, str], None] | None = None,
        **options: Any,
    ):
        self._open(resolve(model, **options), progress)

    @classmethod
    def of_config(cls, config: EngineConfig) -> AsyncLLM:
        """An AsyncLLM of a configuration that was resolved before."""
        llm = cls.__new__(cls)
        llm._open(config, None)
        return llm

    def _open(self, config: EngineConfig, progress: Callable[[int, int, str], None] | None) -> None:
        self._ids = itertools.count()
        self.profile_table: str | None = None  # of the option `profile`, once the engine has ended
        self._replicas: Replicas | None = None  # the others, where there are several
        self._own = EngineThread(lambda thread: self._build(thread, config, progress), self._on_end)
        engine = self._own.engine
        engine.segments.submit = self._own.run_soon
        self.metrics: EngineMetrics | NoMetrics = engine.metrics
        self._prepare, self._compile = engine.constraints.prepare, engine.constraints.compile
        self.config: EngineConfig = engine.config
        self.max_model_len: int = engine.max_model_len
        self.packed_types: dict[str, list[str]] = engine.runner.packed_types
        self.weight_formats: list[str] = sorted(engine.runner.weight_formats)
        self._adapters = engine.adapters
        self._fingerprint = Fingerprint(engine)
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.default_params = default_sampling_params(engine.model_folder)
        del self._own.engine  # it is the thread's
        atexit.register(self.close)  # a daemon thread in native code crashes an interpreter that exits

    def _build(self, thread: EngineThread, config: EngineConfig, progress: Callable[[int, int, str], None] | None) -> Engine:
        """The engine, with the other replicas where there are several. These end with the thread that starts them (end_with_parent)."""
        if not config.starts_replicas:
            return start_engine(config, progress)
        from tinyvllm.engine.replica import Replicas
        from tinyvllm.runner.device import unbound_cores
        from tinyvllm.runner.grid import replica_environments

        environments = replica_environments(config)
        engine = start_engine(config, progress)
        try:
            with unbound_cores():
                self._replicas = Replicas(engine.config, engine.scheduler.pool.num_blocks, environments, thread.end_with)
        except BaseException:
            engine.close()
            raise
        return engine

    def _on_end(self, engine: Engine, failure: BaseException | None) -> None:
        """In the engine's thread, before it closes the engine."""
        if engine.config.profile is not None and engine.trace is not None:
            self.profile_table = engine.trace.table.text()
        if self._replicas is not None:
            self._replicas.close() if failure is None else self._replicas.kill(failure)

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing output of one prompt or conversation; the last one is finished. `output_kind` decides what each contains.

        A caller slower than the engine misses intermediate outputs, never the last; several deltas are joined into one. Breaking out of the
        loop, or cancelling the task, aborts the request. Raises RequestError for a request that cannot be served, BusyError if the queue
        refuses it, InternalError (or what a step raised) for a request that failed alone,
        and the error that ended the engine if it has ended.
        """
        params = spread(sampling_params, self.default_params, 1)[0]
        if lora_request is not None:
            options = await self.options_with(options, lora_request)
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

    async def options_with(self, options: RequestOptions | None, lora_request: LoRARequest) -> RequestOptions | None:
        """The options of a request that wants an adapter, which is loaded if it was not."""
        changed: RequestOptions | None = await self._own.call(lambda engine: with_adapter(engine, options, lora_request))
        return changed

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may use now, by name; from any thread."""
        loaded: Mapping[str, Adapter] = self._adapters.loaded
        return loaded

    async def load_lora(self, name: str, path: str) -> None:
        """LLM.load_lora while requests run: the files are read in a thread of their own. Other replicas load it for their first request."""
        check_adapter_name(name)
        prepared = await asyncio.to_thread(self._adapters.read, path)
        await self._own.call(lambda engine: engine.adapters.load(name, path, prepared))

    async def unload_lora(self, name: str) -> None:
        """LLM.unload_lora."""
        await self._own.call(lambda engine: engine.adapters.unload(name))
        if self._replicas is not None:
            await self._replicas.forget_lora(name)

    async def encode(self, prompt: Prompt | Sequence[Message]) -> Encoded:
        """The token ids of a prompt or conversation, and its text, in a thread: a long one must not stall the other callers."""
        item: Prompt = {"messages": prompt} if is_conversation(prompt) else prompt  # type: ignore[assignment]
        return await asyncio.to_thread(encode_prompt, self.tokenizer, item)

    async def embed(self, prompts: list[list[int]], pooling: str = "mean", normalize: bool = True) -> np.ndarray:
        """Embeddings float32 [N, E] of token ids: the mean of their hidden states, or the last one; of length 1 with `normalize`."""
        import numpy as np

        if self._replicas is None:
            return await self._embed(prompts, pooling, normalize)
        shares = [prompts[number :: self.config.data_parallel_size] for number in range(self.config.data_parallel_size)]
        others = self._replicas.embed(shares[1:], pooling, normalize)
        own, parts = await asyncio.gather(self._embed(shares[0], pooling, normalize), others)
        together = np.empty((len(prompts), own.shape[1]), np.float32)
        for number, part in enumerate([own, *parts]):
            together[number :: self.config.data_parallel_size] = part
        return together

    async def _embed(self, prompts: list[list[int]], pooling: str, normalize: bool) -> np.ndarray:
        """By this engine, one prompt between two steps."""
        import numpy as np

        return np.stack([await self._own.call(functools.partial(_embed, ids, pooling, normalize)) for ids in prompts])

    async def segment(
        self,
        piece: str | Sequence[int],
        after: Segment | None = None,
        *,
        cache_salt: str | None = None,
        options: RequestOptions | None = None,
    ) -> Segment:
        """LLM.segment, computed while other requests run, with the priority and key of `options`."""
        leading_ids, token_ids = await asyncio.to_thread(encode_piece, self.tokenizer, piece, after is None)
        return await self._hold(token_ids, leading_ids, after, cache_salt, options)

    async def segment_of(
        self, output: RequestOutput, index: int = 0, after: Segment | None = None, *, cache_salt: str | None = None
    ) -> Segment:
        """LLM.segment_of; the output must be cumulative or final, not a delta."""
        return await self._hold(output_token_ids(output, index, after), [], after, cache_salt)

    async def segments(self) -> list[Segment]:
        """The segments that are held, the oldest first."""
        return list(await self._own.call(lambda engine: list(engine.segments)))

    async def _hold(
        self,
        token_ids: list[int],
        leading_ids: list[int],
        after: Segment | None,
        cache_salt: str | None,
        options: RequestOptions | None = None,
    ) -> Segment:
        segment: Segment = await self._own.call(lambda engine: engine.segments.new(token_ids, leading_ids, after, cache_salt))
        prefill = prefill_options(segment, options)
        try:
            for _ in range(MAX_TRIES):
                if await self._own.call(lambda engine: engine.segments.hold(segment)):
                    return segment
                async with contextlib.aclosing(
                    self.own_outputs(Encoded(None, segment.block_aligned_ids), PREFILL_PARAMS, None, prefill)
                ) as outputs:
                    async for output in outputs:
                        raise_if_failed(output)
        except asyncio.CancelledError:
            segment.release()  # it may be held by now, and no caller would have it
            raise
        raise eviction_error(segment)

    @property
    def alive(self) -> bool:
        """Whether the engine still serves. If it does not, each call raises the error that ended it."""
        return self._own.alive

    @property
    def fingerprint(self) -> str | None:
        """`system_fingerprint` of answers; None while a large model is read for the first time, in the background."""
        return self._fingerprint.value

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Have `on_failure` called, from any thread, with the exception that ends the engine; at once if one has. `close` is none."""
        self._own.watch(on_failure)

    def status(self) -> dict[str, Any]:
        """A snapshot of the engine, at most about a tenth of a second old while it works; see Engine.status. Counts of all replicas are
        added, and `replicas` has each.
        """
        return self._own.status if self._replicas is None else self._replicas.together(self._own.status)

    async def all_metrics(self) -> list[EngineMetrics | NoMetrics]:
        """The metrics of each replica, this one's first."""
        return [self.metrics, *(await self._replicas.metrics() if self._replicas is not None else [])]

    def predicted_wait(self) -> float:
        """Seconds until a short prompt would get its first token, predicted from the rates of the last steps."""
        wait: float = self._own.status["predicted_wait"]
        return wait if self._replicas is None else self._replicas.predicted_wait(wait)

    async def between_steps(self, function: Callable[[Engine], Any]) -> Any:
        """The result of a function that the engine's thread runs between two steps."""
        return await self._own.call(function)

    async def _outputs(
        self, encoded: Encoded, params: SamplingParams | BeamSearchParams, request_id: str | None, options: RequestOptions | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, by the replica that is to have it."""
        replicas = self._replicas
        replica = None if replicas is None else replicas.choose(encoded, params, options, len(self._own.mailboxes))
        if replicas is None or replica is None:
            outputs = self.own_outputs(encoded, params, request_id, options)
        else:
            self._own.check_open()
            outputs = replicas.outputs(replica, self._new_mailbox(request_id, params), encoded, params, options)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def own_outputs(
        self, encoded: Encoded, params: SamplingParams | BeamSearchParams, request_id: str | None, options: RequestOptions | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of an encoded request that this engine computes; see `generate`."""
        if isinstance(params, SamplingParams) and _takes_preparation(params):
            await asyncio.to_thread(self._prepare, params)  # neither the event loop nor the engine's thread may wait for it
        async with contextlib.aclosing(self._own.outputs(self._new_mailbox(request_id, params), encoded, params, options)) as outputs:
            async for output in outputs:
                yield output

    def _new_mailbox(self, request_id: str | None, params: SamplingParams | BeamSearchParams) -> Mailbox:
        """ArgumentError if a request of this id is running."""
        number = next(self._ids)
        name = f"async-{number}" if request_id is None else request_id
        if name in self._own or (self._replicas is not None and name in self._replicas):
            raise ArgumentError(f"AsyncLLM: request_id {name!r} is in use")
        return Mailbox(name, f"{name}#{number}", isinstance(params, SamplingParams) and params.output_kind == "delta")

    async def energy(self) -> EnergyTotals | None:
        """The joules of all steps up to now; None without the option `energy`."""
        totals: EnergyTotals | None = await self._own.call(lambda engine: None if engine.energy is None else engine.energy.read())
        return totals

    async def trace(self, steps: int, seconds: float) -> str:
        """The next `steps` steps as JSON for Perfetto (engine/tools/trace.py), or those that run within `seconds`. BusyError while another
        trace runs."""
        from tinyvllm.engine.tracing import start_trace, stop_trace  # tinygrad comes with it

        loop, ended, output = asyncio.get_running_loop(), asyncio.Event(), TraceMemory()

        def on_end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(ended.set)

        trace = await self._own.call(lambda engine: start_trace(engine, output, steps, on_end))
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), seconds)
        finally:
            await asyncio.shield(self._own.call(lambda engine: stop_trace(engine, trace)))
        return output.text()

    async def ignored_keywords(self, params: SamplingParams) -> tuple[str, ...]:
        """The places in the JSON schemas of a request that its grammar does not hold. The grammar is kept for the request.

        RequestError if it cannot be enforced.
        """
        if params.structured_outputs is None:
            return ()
        compiled = await asyncio.to_thread(self._compile, params)
        return () if compiled is None else compiled.ignored

    def abort(self, request_id: str) -> None:
        """End a request; its caller gets the last output, with finish_reason "abort". Unknown ids have finished: ignored."""
        self._own.abort(request_id)
        if self._replicas is not None:
            self._replicas.abort(request_id)

    def close(self) -> None:
        """End the engine and its thread. Requests that still run get a TinyvllmError."""
        self._own.close()
        self._fingerprint.close()
        atexit.unregister(self.close)


def _takes_preparation(params: SamplingParams) -> bool:
    """Whether the constraints of a request may take longer to prepare than a thread takes to do it."""
    return params.structured_outputs is not None or bool(params.bad_words) or sum(map(len, params.stop or ())) > MAX_SHORT_STOPS


def _embed(token_ids: list[int], pooling: str, normalize: bool, engine: Engine) -> np.ndarray:
    from tinyvllm.engine.tools import one_off

    return one_off.embed(engine, token_ids, pooling, normalize)
