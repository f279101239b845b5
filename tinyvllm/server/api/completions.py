"""POST /v1/completions: continues texts. The events of a stream are formatted by hand, since there is one for each token."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import field
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import ALL_LOGPROBS, CompletionOutput, RequestOutput, SamplingParams
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import bad_field, encode
from tinyvllm.server.core.generation import beam_search, generate
from tinyvllm.server.core.limits import MAX_CHOICES
from tinyvllm.server.core.load_report import report_load
from tinyvllm.server.core.logprobs import LogprobStyle, Position, completion_logprobs, positions_of, prompt_logprobs
from tinyvllm.server.core.params import beam_params, output_length, request_options, sampling_params
from tinyvllm.server.core.prompts import EncodedPrompt, check_room, encode_texts, truncation_of
from tinyvllm.server.core.response import DONE, ResponseWriter, quote, sse_event
from tinyvllm.server.core.schema import CompletionRequest
from tinyvllm.server.core.segment_store import prefix_of
from tinyvllm.server.core.usage import TokenUsage, extra_fields, finish_reason_of, request_metrics, usage_in_stream

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def answer(context: RequestContext, body: CompletionRequest, writer: ResponseWriter) -> None:
    """Continue one or several prompts."""
    async with context.service.models.use(body.model) as (model, llm):
        report_load(context, llm)
        prompts = await _encode(context, body, llm)
        if body.use_beam_search:
            await writer.json(await _beam_search(context, body, llm, model, prompts))
            return
        job = _job(context, body, llm, model, prompts)
        if body.stream:
            await _CompletionStream(job, writer).run_to_end()
        else:
            await writer.json(await _run_to_end(job))


async def _encode(context: RequestContext, body: CompletionRequest, llm: AsyncLLM) -> list[EncodedPrompt]:
    width = max(body.n or 1, body.best_of or 1)
    if isinstance(body.prompt, list) and len(body.prompt) * width > MAX_CHOICES and not isinstance(body.prompt[0], int):
        name = "best_of" if (body.best_of or 1) > (body.n or 1) else "n"
        raise bad_field(name, f"{name}: {width} answers to each of {len(body.prompt)} prompts exceed the limit of {MAX_CHOICES}")
    prefix = prefix_of(context.service.segments.used_by_body(context.owner, context, body, llm), body)
    special = body.add_special_tokens is not False
    prompts = await encode_texts(
        llm, body.prompt, "prompt", special=special, truncation=truncation_of(body, body.max_tokens), prefix=prefix
    )
    for prompt in prompts:
        check_room(llm, len(prompt.token_ids), body.max_tokens or 0, "max_tokens")
    return prompts


def _job(context: RequestContext, body: CompletionRequest, llm: AsyncLLM, model: str, prompts: Sequence[EncodedPrompt]) -> _Job:
    max_tokens = _DEFAULT_MAX_TOKENS if (length := output_length(body, "max_tokens")) is None else length
    if not max_tokens and not body.echo:
        raise bad_field("max_tokens", "max_tokens: 0 requires echo=true, since nothing would be returned otherwise")
    more: dict[str, Any] = {}
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = _most(body.logprobs, body.prompt_logprobs)
    if not max_tokens:
        more["min_tokens"] = 0
    params = sampling_params(llm, body, max_tokens=max(1, max_tokens), logprobs=body.logprobs, **more)
    return _Job(context, body, llm, model, params, prompts, prompt_only=not max_tokens)


def _most(echoed: int, prompt: int | None) -> int:
    """The larger of two numbers of alternatives, of which -1 means all."""
    counts = (echoed, prompt or 0)
    return ALL_LOGPROBS if ALL_LOGPROBS in counts else max(counts)


@dataclass
class _Job:
    """One request and the parts of its response. prompt_only: max_tokens is 0, so the one token that the engine samples is dropped."""

    context: RequestContext
    body: CompletionRequest
    llm: AsyncLLM
    model: str
    params: SamplingParams
    prompts: Sequence[EncodedPrompt]
    prompt_only: bool = False
    usage: TokenUsage = field(default_factory=TokenUsage)

    def head(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.context.unique_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.llm.fingerprint,
        }

    def prompt_text(self, index: int, output: RequestOutput) -> str:
        """The text of a prompt, decoded if the client sent token ids."""
        text = self.prompts[index].text
        if text is None and self.llm.tokenizer is not None:
            return self.llm.tokenizer.decode(output.prompt_token_ids, self.params.skip_special_tokens)
        return text or ""

    def count_completion(self, part: CompletionOutput) -> None:
        self.usage.completion += 0 if self.prompt_only else len(part.token_ids)

    def finish_reason(self, part: CompletionOutput) -> tuple[str | None, int | str | None]:
        return ("length", None) if self.prompt_only else finish_reason_of(part)

    def text_of(self, part: CompletionOutput) -> str:
        return "" if self.prompt_only else part.text

    def positions(self, output: RequestOutput, part: CompletionOutput | None) -> list[Position] | None:
        """The tokens with log-probabilities: those of an echoed prompt, then those of the output. None if they are not requested."""
        if self.body.logprobs is None:
            return None
        positions: list[Position] = []
        if self.body.echo:
            positions += zip(output.prompt_token_ids, output.prompt_logprobs or [None] * len(output.prompt_token_ids), strict=True)
        if part is not None:
            positions += positions_of(part)
        return positions


async def _run_to_end(job: _Job) -> dict[str, Any]:
    results: list[RequestOutput | None] = [None] * len(job.prompts)
    options = request_options(job.context, job.body)
    async with aclosing(generate(job.context, job.llm, job.prompts, job.params, options)) as outputs:
        async for index, output in outputs:
            results[index] = output
    return _completion(job, [output for output in results if output is not None])


async def _beam_search(
    context: RequestContext, body: CompletionRequest, llm: AsyncLLM, model: str, prompts: Sequence[EncodedPrompt]
) -> dict[str, Any]:
    room = min(prompt.room(llm) for prompt in prompts)
    beams = beam_params(body, min(output_length(body, "max_tokens") or _DEFAULT_MAX_TOKENS, room))
    job = _Job(context, body, llm, model, SamplingParams(n=beams.n or 1), prompts)
    outputs = await beam_search(context, llm, prompts, beams, request_options(context, body))
    return _completion(job, outputs)


def _completion(job: _Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The whole response: the n choices of the first prompt, then those of the next one."""
    choices = []
    for index, output in enumerate(outputs):
        job.usage.add_prompt(output)
        job.usage.add_energy(output)
        for part in output.outputs:
            job.count_completion(part)
            choices.append(_choice(job, index, output, part))
    job.usage.record(job.context)
    job.context.record["finish_reason"] = choices[0]["finish_reason"] if choices else None
    last = outputs[-1] if outputs else None
    extra = request_metrics(job.context.service.config, last, len(choices), job.usage)
    extra |= extra_fields(last, job.body.timings_per_token, job.usage)
    return {**job.head(), "choices": choices, "usage": job.usage.openai(), **extra}


def _choice(job: _Job, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
    reason, stop = job.finish_reason(part)
    choice: dict[str, Any] = {"index": index * job.params.n + part.index, "text": job.text_of(part), "logprobs": None}
    choice |= {"finish_reason": reason, "stop_reason": stop}
    positions = job.positions(output, None if job.prompt_only else part)
    if positions is not None:
        choice["logprobs"], _ = completion_logprobs(
            job.llm.tokenizer, positions, LogprobStyle.of(job.context.service.config, job.body, job.body.logprobs)
        )
    if job.body.echo:
        choice["text"] = job.prompt_text(index, output) + choice["text"]
    choice["prompt_logprobs"] = None if job.body.prompt_logprobs is None else prompt_logprobs(output)
    if job.body.return_token_ids:
        return {**choice, "token_ids": [] if job.prompt_only else part.token_ids, "prompt_token_ids": output.prompt_token_ids}
    return {**choice, "token_ids": None, "prompt_token_ids": None}


@dataclass
class _StreamedChoice:
    """One choice of a stream. offset: characters of its text before the next token, for text_offset."""

    index: int
    started: bool = False
    finished: bool = False
    offset: int = 0


class _CompletionStream:
    """The events of one job."""

    def __init__(self, job: _Job, writer: ResponseWriter):
        self.job, self.writer, self.body = job, writer, job.body
        self.include_usage, self.continuous_usage = usage_in_stream(job.context.service.config, job.body.stream_options, job.body.energy)
        self.style = LogprobStyle.of(job.context.service.config, job.body, job.body.logprobs)
        self.event_start = f'data: {encode(job.head()).decode()[:-1]},"choices":[{{"index":'
        self.choices = [_StreamedChoice(i) for i in range(len(job.prompts) * job.params.n)]
        self.counted: set[int] = set()  # indices of prompts whose tokens are counted

    async def run_to_end(self) -> None:
        """Run the request and write its events."""
        job, final = self.job, None
        options = request_options(job.context, job.body)
        self.writer.start_stream()
        async with aclosing(generate(job.context, job.llm, job.prompts, job.params, options)) as outputs:
            async for index, final in outputs:
                job.usage.add_energy(final)
                deltas = [*self._first_deltas(index, final), *self._step_deltas(index, final)]
                if deltas:
                    event_end = self._event_end()
                    await self.writer.write("".join(self.event_start + delta + event_end for delta in deltas).encode())
        job.usage.record(job.context)
        await self.writer.close(self._usage_event(final) + DONE)

    def _first_deltas(self, index: int, output: RequestOutput) -> list[str]:
        """Count a prompt with its first output, and echo it in each of its choices."""
        if index in self.counted:
            return []
        self.counted.add(index)
        self.job.usage.add_prompt(output)
        n = self.job.params.n
        return [self._echo_delta(choice, index, output) for choice in self.choices[index * n : (index + 1) * n]] if self.body.echo else []

    def _step_deltas(self, index: int, output: RequestOutput) -> list[str]:
        """The deltas of one engine step, each the rest of an event after event_start."""
        deltas = []
        for part in output.outputs:
            choice = self.choices[index * self.job.params.n + part.index]
            if not choice.finished and (part.token_ids or part.text or part.finish_reason):
                self.job.count_completion(part)
                deltas.append(self._delta(choice, part, output))
        return deltas

    def _usage_event(self, final: RequestOutput | None) -> bytes:
        extra = extra_fields(final, self.body.timings_per_token, self.job.usage)
        if not (self.include_usage or extra):
            return b""
        usage: dict[str, Any] = {}
        if self.include_usage:
            metrics = request_metrics(self.job.context.service.config, final, len(self.choices), self.job.usage)
            usage = {"usage": self.job.usage.openai(), **metrics}
        return sse_event({**self.job.head(), "choices": [], **usage, **extra})

    def _event_end(self) -> str:
        """The end of an event, after its choices."""
        if self.continuous_usage:
            return f',"usage":{json.dumps(self.job.usage.openai())}}}\n\n'
        return ',"usage":null}\n\n' if self.include_usage else "}\n\n"

    def _echo_delta(self, choice: _StreamedChoice, index: int, output: RequestOutput) -> str:
        """The prompt, as the first delta of a choice."""
        text = quote(self.job.prompt_text(index, output))
        logprobs = self._logprobs(choice, self.job.positions(output, None))
        return f'{choice.index},"text":{text},"logprobs":{logprobs},"finish_reason":null}}]'

    def _delta(self, choice: _StreamedChoice, part: CompletionOutput, output: RequestOutput) -> str:
        reason, more = "null", ""
        if part.finish_reason is not None:
            choice.finished = True
            finish_reason, stop = self.job.finish_reason(part)
            reason, more = quote(finish_reason or ""), f',"stop_reason":{json.dumps(stop)}'
        wants_logprobs = self.body.logprobs is not None and not self.job.prompt_only
        logprobs = self._logprobs(choice, positions_of(part) if wants_logprobs else None)
        if self.body.return_token_ids:
            more += f',"token_ids":{part.token_ids}'
            more += "" if choice.started else f',"prompt_token_ids":{output.prompt_token_ids}'
        choice.started = True
        return f'{choice.index},"text":{quote(self.job.text_of(part))},"logprobs":{logprobs},"finish_reason":{reason}{more}}}]'

    def _logprobs(self, choice: _StreamedChoice, positions: Sequence[Position] | None) -> str:
        if positions is None:
            return "null"
        lists, choice.offset = completion_logprobs(self.job.llm.tokenizer, positions, self.style, choice.offset)
        return json.dumps(lists)
