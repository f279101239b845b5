"""LLM: the synchronous interface. Prompts go in, finished or streamed outputs come out; the caller's thread runs the engine.

Knows no scheduling and no tensors. One LLM belongs to one thread; a service uses AsyncLLM.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tinyvllm.config.engine import EngineConfig, resolve
from tinyvllm.config.values import parse_size
from tinyvllm.engine.frontend import plan_engine, prefill_options, start_engine, submit, with_adapter
from tinyvllm.engine.prompt import (
    Encoded,
    Message,
    Prompt,
    PromptError,
    default_sampling_params,
    encode_all,
    encode_piece,
    is_conversation,
    spread,
)
from tinyvllm.engine.segments import MAX_TRIES, PREFILL_PARAMS, Segment, eviction_error, output_token_ids, raise_if_failed
from tinyvllm.errors import ArgumentError, BusyError, FormatError, ModelError, RequestError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import BeamSearchParams, LoRARequest, RequestOptions, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tinyvllm.engine.engine import Engine
    from tinyvllm.engine.tools.plan import Plan

Outputs = Generator[RequestOutput, None, None]


@dataclass(frozen=True)
class StreamDelta:
    """The new text and tokens of continuation `index` since its last delta. `finish_reason` is set on its last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0

    def __str__(self) -> str:
        return self.text


class LLM:
    """A loaded model. `model` is a folder, a GGUF file or a hub name (None: the bundled one); options are the fields of EngineConfig.

    `progress(done, total, what)` is called while the weights load, with bytes. Raises ArgumentError for an invalid option before anything
    is loaded, and ModelError, TokenizerError or OutOfMemoryError while loading.

    With plan=True nothing is loaded: the attribute `plan` (None otherwise) says what this LLM would take in memory, what fits, its
    kernels and predicted speed, and whatever needs the model is an ArgumentError. `memory` then replaces the free memory of the
    device: bytes, or a size such as "16G". `speed` may measure the machine for a few seconds, once. Errors of options and of headers are
    the same; too little memory is part of the plan.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Callable[[int, int, str], None] | None = None,
        plan: bool = False,
        memory: int | str | None = None,
        speed: bool = True,
        **options: Any,
    ):
        config = resolve(model, **options)
        if not plan and (memory is not None or not speed):
            raise ArgumentError("memory and speed belong to plan=True; the options of an engine are kv_memory and num_blocks")
        self._engine: Engine | None = None
        self.plan: Plan | None = None
        self.default_params = SamplingParams()
        self._ids = itertools.count()
        self._open: dict[str, RequestOutput | None] = {}  # the newest output of every request that a caller waits for
        if plan:
            self.plan = plan_engine(config, parse_size("memory", memory) if isinstance(memory, str) else memory, speed)
            return
        config.require_one_engine()
        self._engine = start_engine(config, progress)
        self.settle()
        self.default_params = default_sampling_params(self.engine.model_folder)

    @property
    def engine(self) -> Engine:
        """The engine. ArgumentError with plan=True, which loads none."""
        if self._engine is None:
            raise ArgumentError("this LLM was made with plan=True, which loads no model; make one without it")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        """The options of the engine, its device resolved."""
        return self.engine.config

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer in tokens: the option of this name, or what the model and the memory allow."""
        return self.engine.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """The default of `generate`: the model's own recommendation, else SamplingParams()."""
        return self.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        options: RequestOptions | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The finished outputs of all prompts, in their order, run together, with `options` (priority, deadlines, ...) for all of them.
        `lora_request` is the adapter of all prompts, or a list of those of each (docs/lora.md).

        A prompt is a text, {"prompt": text}, {"prompt_token_ids": ids}, {"messages": conversation} or {"segments": segments, "prompt":
        text}. A dict may have a "cache_salt": cached prefixes are shared only with prompts of the same salt, as with that of `options`.
        If one of them cannot be served nothing runs: RequestError (or ArgumentError, TokenizerError) for a single prompt; for several
        PromptError, which has the index of the prompt. A prompt that fails while it runs has finish_reason "error" and a `failure`; if
        all do, it is raised.
        """
        items: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else _listed("prompts", prompts)  # type: ignore[list-item]
        each = spread(sampling_params, self.default_params, len(items))
        return self._complete(encode_all(self.engine.tokenizer, items), each, use_tqdm, options, lora_request)

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load an adapter, which requests then name: `LoRARequest(name)`.

        ArgumentError without `enable_lora`, for a name that is loaded, and where there is no room; BusyError while requests use what was
        unloaded; ModelError or FormatError for files that are damaged or do not fit the model.
        """
        self.engine.adapters.load(name, os.fspath(path))

    def unload_lora(self, name: str) -> None:
        """Unload an adapter; requests that use it run to their end. ArgumentError if there is none of this name."""
        self.engine.adapters.unload(name)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The best continuations of each prompt by beam search, the best first; `cumulative_logprob` sums their log-probabilities."""
        items: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else _listed("prompts", prompts)  # type: ignore[list-item]
        return self._complete(encode_all(self.engine.tokenizer, items), [params] * len(items), use_tqdm, None, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them, rendered by the model's chat template."""
        conversations = [messages] if not messages or is_conversation(messages) else _listed("messages", messages)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = [{"messages": conversation, **options} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def follow(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Outputs:
        """The growing output of one prompt or conversation: each item is the cumulative output so far, the last one is finished.

        The request starts with the first `next`. Closing the iterator early aborts it.
        """
        item: Prompt = {"messages": prompt} if is_conversation(prompt) else prompt  # type: ignore[assignment]
        params = [replace(one, output_kind="cumulative") for one in spread(sampling_params, self.default_params, 1)]
        return self._follow(encode_all(self.engine.tokenizer, [item]), params, lora_request)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[StreamDelta]:
        """The answer to one prompt or conversation as deltas; closing the iterator early aborts the request.

        The text of a delta may be empty: half of a character, or a possible beginning of a stop string, is held back.
        """
        outputs = self.follow(
            prompt, sampling_params, lora_request=lora_request
        )  # invalid prompts and parameters are refused here, not at the first `next`
        return _deltas(outputs)

    def segment(self, piece: str | Sequence[int], after: Segment | None = None, *, cache_salt: str | None = None) -> Segment:
        """Compute a text (or token ids) once, at the beginning or after another segment, and keep it in the cache until it is released.

        Segments are tokenised one by one: no token crosses a border, and special tokens come only before a text at the beginning.
        RequestError if segments would hold too many blocks, OutOfMemoryError if running requests leave it no room.
        """
        leading_ids, token_ids = encode_piece(self.engine.tokenizer, piece, begins=after is None)
        return self._hold(self.engine.segments.new(token_ids, leading_ids, after, cache_salt))

    def segment_of(self, output: RequestOutput, index: int = 0, after: Segment | None = None, *, cache_salt: str | None = None) -> Segment:
        """A finished prompt and its answer `index` as a segment, without the context of `after`, which they must begin with."""
        return self._hold(self.engine.segments.new(output_token_ids(output, index, after), [], after, cache_salt))

    def segments(self) -> list[Segment]:
        """The segments that are held, the oldest first; each has num_tokens, blocks and bytes."""
        return list(self.engine.segments)

    def _hold(self, segment: Segment) -> Segment:
        for _ in range(MAX_TRIES):
            if self.engine.segments.hold(segment):
                return segment
            (output,) = self._complete([Encoded(None, segment.block_aligned_ids)], [PREFILL_PARAMS], False, prefill_options(segment))
            raise_if_failed(output)
        raise eviction_error(segment)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str = "mean", normalize: bool = True) -> np.ndarray:
        """Embeddings float32 [N, E] of prompts: the mean of their hidden states, or the last one; of length 1 with `normalize`."""
        items: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else _listed("prompts", prompts)  # type: ignore[list-item]
        from tinyvllm.engine.tools import one_off

        encoded = encode_all(self.engine.tokenizer, items)
        return np.stack([one_off.embed(self.engine, one.token_ids, pooling, normalize) for one in encoded])

    def prompt_logits(self, token_ids: list[int]) -> np.ndarray:
        """Float32 logits [T, V] of every position of one prompt."""
        from tinyvllm.engine.tools import one_off

        return one_off.prompt_logits(self.engine, token_ids)

    def settle(self) -> None:
        """Do what a server does while it is idle: capture common steps, if `warm_up` is set, and time kernels that earlier calls have used.

        The latter is for Metal: two seconds a process at most, and figures are kept for all later ones. No token depends on it.
        """
        while self.engine.warmup():
            pass

    def close(self) -> None:
        """Free the device's memory. The LLM cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _complete(
        self,
        encoded: list[Encoded],
        params: Sequence[SamplingParams | BeamSearchParams],
        use_tqdm: bool,
        options: RequestOptions | None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        # only final outputs are read, so the engine builds no others
        final = [replace(one, output_kind="final_only") if isinstance(one, SamplingParams) else one for one in params]
        ids = self._add(encoded, final, options, lora)
        try:
            with _bar(len(ids), use_tqdm) as advance:
                running = set(ids)
                while running:
                    finished = running.intersection(output.request_id for output in self._step() if output.finished)
                    running -= finished
                    advance(len(finished))
            return _unless_all_failed([output for i in ids if (output := self._open[i]) is not None])
        finally:
            self._forget(ids)

    def _follow(self, encoded: list[Encoded], params: list[SamplingParams], lora: LoRARequest | None) -> Outputs:
        ids = self._add(encoded, params, None, lora)
        seen: RequestOutput | None = None
        try:
            while seen is None or not seen.finished:
                if self._open[ids[0]] is seen:  # unless a step of another stream has changed it
                    self._step()
                newest = self._open[ids[0]]
                if newest is not None and newest is not seen:
                    (seen,) = _unless_all_failed([newest])
                    yield newest
        finally:
            self._forget(ids)

    def _add(
        self,
        encoded: list[Encoded],
        params: Sequence[SamplingParams | BeamSearchParams],
        options: RequestOptions | None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[str]:
        """Queue all requests, or none of them."""
        ids: list[str] = []
        adapters = _adapters_of(lora, len(encoded))
        for index, (prompt, one, adapter) in enumerate(zip(encoded, params, adapters, strict=True)):
            request_id = f"llm-{next(self._ids)}"
            try:
                submit(self.engine, request_id, prompt, one, with_adapter(self.engine, options, adapter))
            except (RequestError, ArgumentError, BusyError, ModelError, FormatError) as error:
                self._forget(ids)
                if len(encoded) == 1:
                    raise
                raise PromptError(index, str(error)) from error
            ids.append(request_id)
            self._open[request_id] = None
        return ids

    def _step(self) -> list[RequestOutput]:
        """One step of the engine; its outputs also go to the other streams that are open."""
        assert self.engine.has_work(), "the engine lost a request"
        outputs = self.engine.step()
        self.engine.between_steps()
        for output in outputs:
            if output.request_id in self._open:
                self._open[output.request_id] = output
        return outputs

    def _forget(self, ids: list[str]) -> None:
        for request_id in ids:
            newest = self._open.pop(request_id, None)
            if newest is None or not newest.finished:
                self.engine.abort(request_id)


def _unless_all_failed(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """The outputs; raises the first failure if no request has succeeded: what is wrong is then not the fault of one prompt."""
    failures = [output.failure for output in outputs if output.failure is not None]
    if failures and len(failures) == len(outputs):
        raise failures[0]
    return outputs


def _adapters_of(lora: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[LoRARequest | None]:
    """The adapter of each prompt."""
    if lora is None or isinstance(lora, LoRARequest):
        return [lora] * count
    each = _listed("lora_request", lora)
    if len(each) != count or not all(one is None or isinstance(one, LoRARequest) for one in each):
        raise ArgumentError(f"lora_request must be a LoRARequest, or a list of one or None for each of {count} prompts, got {each!r:.80}")
    return each


def _listed(name: str, values: object) -> list[Any]:
    if not isinstance(values, Iterable):
        raise ArgumentError(f"{name} must be a single one or a list, got {type(values).__name__}")
    return list(values)


def _deltas(outputs: Outputs) -> Iterator[StreamDelta]:
    """The difference of each cumulative output of one request to the one before, per continuation."""
    sent: dict[int, tuple[int, int]] = {}  # characters and tokens that were sent, by index
    done: set[int] = set()
    with contextlib.closing(outputs):
        for output in outputs:
            for part in output.outputs:
                characters, tokens = sent.get(part.index, (0, 0))
                if part.index in done or (len(part.token_ids) == tokens and part.finish_reason is None):
                    continue
                sent[part.index] = len(part.text), len(part.token_ids)
                if part.finish_reason is not None:
                    done.add(part.index)
                yield StreamDelta(part.text[characters:], part.token_ids[tokens:], part.finish_reason, part.index)


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[int], object]]:
    """The function that advances a tqdm bar over `total` requests, or one that does nothing."""
    if not wanted:
        yield lambda finished: None
        return
    from tqdm import tqdm  # an import of 20 ms, only for calls with a bar

    with tqdm(total=total, desc="prompts", unit="prompt", dynamic_ncols=True) as bar:
        yield bar.update
