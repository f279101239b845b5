"""POST /v1/completions: texts continued. Chunks of a stream are put together by hand, since there is one a token."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams
from tinyvllm.server.core.chunk_store import head_of
from tinyvllm.server.core.context import Call
from tinyvllm.server.core.failures import bad_field, encode
from tinyvllm.server.core.logprobs import Position, completion_logprobs, prompt_positions
from tinyvllm.server.core.params import beam_params, request_options, sampling_params
from tinyvllm.server.core.prompts import Encoded, encode_texts
from tinyvllm.server.core.schema import CompletionRequest
from tinyvllm.server.core.usage import Count, ended, extras, outputs_of
from tinyvllm.server.http.stream import DONE, Wire, event, quote


async def answer(call: Call, body: CompletionRequest, wire: Wire) -> None:
    """The work of the endpoint."""
    async with call.service.models.use(body.model) as (model, llm):
        special = body.add_special_tokens is not False
        if not isinstance(body.prompt, str) and len(body.prompt) * (body.n or 1) > 1024 and not isinstance(body.prompt[0], int):
            raise bad_field("n", f"n: {body.n or 1} answers to {len(body.prompt)} prompts are more than 1024")
        head = head_of(call, llm, body)
        prompts = await encode_texts(llm, body.prompt, "prompt", special=special, keep=body.truncate_prompt_tokens, head=head)
        if body.use_beam_search:
            beams = beam_params(body, 16 if body.max_tokens is None else body.max_tokens)
            job = _Job(call, body, llm, model, SamplingParams(n=beams.n or 1), prompts)
            await wire.json(job.whole([await llm.beam_search(p.prompt(), beams, options=request_options(call, body)) for p in prompts]))
            return
        job = _job(call, body, llm, model, prompts)
        if body.stream:
            await _stream(call, body, wire, job, llm, prompts)
        else:
            results: list[RequestOutput | None] = [None] * len(prompts)
            async with aclosing(outputs_of(llm, prompts, job.params, request_options(call, body), call.name)) as stream:
                async for index, output in stream:
                    results[index] = output
            await wire.json(job.whole([output for output in results if output is not None]))


def _job(call: Call, body: CompletionRequest, llm: AsyncLLM, model: str, prompts: Sequence[Encoded]) -> _Job:
    wanted = 16 if body.max_tokens is None else body.max_tokens
    if not wanted and not body.echo:
        raise bad_field("max_tokens", "max_tokens: 0 asks for nothing, unless echo gives the prompt back")
    more: dict[str, Any] = {}
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if not wanted:
        more["min_tokens"] = 0
    params = sampling_params(llm, body, max_tokens=max(1, wanted), logprobs=body.logprobs, **more)
    return _Job(call, body, llm, model, params, prompts, drop=not wanted)


@dataclass
class _Job:
    """One request and what its answer is made of. `drop`: nothing was to be generated, the one token there is does not count."""

    call: Call
    body: CompletionRequest
    llm: AsyncLLM
    model: str
    params: SamplingParams
    prompts: Sequence[Encoded]
    drop: bool = False
    count: Count = field(default_factory=Count)

    def head(self) -> dict[str, Any]:
        return {"id": f"cmpl-{self.call.name}", "object": "text_completion", "created": int(time.time()), "model": self.model}

    def echoed(self, index: int, output: RequestOutput) -> str:
        """The prompt's text, also of one that came as token ids."""
        text = self.prompts[index].text
        skip = self.params.skip_special_tokens
        if text is None and self.llm.tokenizer is not None:
            return self.llm.tokenizer.decode(output.prompt_token_ids, skip)
        return text or ""

    def choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        """One whole continuation, in the order of the prompts and then of their n."""
        reason, stop = ("length", None) if self.drop else ended(part)
        text = "" if self.drop else part.text
        choice: dict[str, Any] = {"index": index * self.params.n + part.index, "text": text, "logprobs": None}
        choice |= {"finish_reason": reason, "stop_reason": stop}
        positions = self.positions(output, None if self.drop else part)
        if positions is not None:
            choice["logprobs"] = completion_logprobs(positions, self.body.logprobs or 0)
        if self.body.echo:
            choice["text"] = self.echoed(index, output) + text
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_positions(output)
        if self.body.return_token_ids:
            choice |= {"token_ids": [] if self.drop else part.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice

    def positions(self, output: RequestOutput, part: CompletionOutput | None) -> list[Position] | None:
        """The tokens whose log-probabilities are told: the prompt's where it is echoed, and those of a continuation."""
        if self.body.logprobs is None:
            return None
        found: list[Position] = []
        if self.body.echo:
            found += zip(output.prompt_token_ids, output.prompt_logprobs or [None] * len(output.prompt_token_ids), strict=True)
        if part is not None:
            found += zip(part.token_ids, part.logprobs or [], strict=False)
        return found

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            self.count.add_prompt(output)
            for part in output.outputs:
                self.count.completion += 0 if self.drop else len(part.token_ids)
                choices.append(self.choice(index, output, part))
        self.count.note(self.call)
        self.call.record["finish_reason"] = choices[0]["finish_reason"] if choices else None
        return {**self.head(), "choices": choices, "usage": self.count.usage(), **extras(outputs[-1] if outputs else None)}


async def _stream(call: Call, body: CompletionRequest, wire: Wire, job: _Job, llm: AsyncLLM, prompts: Sequence[Encoded]) -> None:
    options = body.stream_options
    include, continuous = bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
    head = encode(job.head()).decode()[:-1]
    front, back = f'data: {head},"choices":[{{"index":', ',"usage":null}\n\n' if include else "}\n\n"
    begun: set[int] = set()
    known: set[int] = set()
    over: set[int] = set()
    offsets: dict[int, int] = {}
    last: RequestOutput | None = None
    wire.open()
    async with aclosing(outputs_of(llm, prompts, job.params, request_options(call, body), call.name)) as outputs:
        async for index, output in outputs:
            chunks: list[str] = []
            last = output
            if index not in begun:
                begun.add(index)
                job.count.add_prompt(output)
                if body.echo:
                    chunks += [front + _echo(job, index, output, i, offsets) for i in range(job.params.n)]
            for part in output.outputs:
                choice = index * job.params.n + part.index
                if choice in over or not (part.token_ids or part.text or part.finish_reason):
                    continue
                job.count.completion += 0 if job.drop else len(part.token_ids)
                first = "" if choice in known or not body.return_token_ids else f',"prompt_token_ids":{output.prompt_token_ids}'
                known.add(choice)
                chunks.append(front + _chunk(job, choice, part, offsets, first))
                if part.finish_reason is not None:
                    over.add(choice)
            if chunks:
                closing = f',"usage":{json.dumps(job.count.usage())}}}\n\n' if continuous else back
                await wire.write("".join(chunk + closing for chunk in chunks).encode())
    job.count.note(call)
    tail = b""
    if include or body.receipt or body.explain:
        tail = event({**job.head(), "choices": [], "usage": job.count.usage(), **extras(last)})
    await wire.close(tail + DONE)


def _echo(job: _Job, index: int, output: RequestOutput, i: int, offsets: dict[int, int]) -> str:
    """The prompt as the first chunk of a choice."""
    choice = index * job.params.n + i
    text = job.echoed(index, output)
    positions = job.positions(output, None)
    logprobs = "null"
    if positions is not None:
        lists = completion_logprobs(positions, job.body.logprobs or 0)
        offsets[choice] = sum(map(len, lists["tokens"]))
        logprobs = json.dumps(lists)
    return f'{choice},"text":{quote(text)},"logprobs":{logprobs},"finish_reason":null}}]'


def _chunk(job: _Job, choice: int, part: CompletionOutput, offsets: dict[int, int], more: str) -> str:
    if part.finish_reason is None:
        reason, stop = "null", ""
    else:
        why, at = ("length", None) if job.drop else ended(part)
        reason, stop = quote(why or ""), f',"stop_reason":{json.dumps(at)}'
    logprobs = "null"
    if job.body.logprobs is not None and not job.drop:
        lists = completion_logprobs(list(zip(part.token_ids, part.logprobs or [], strict=False)), job.body.logprobs, offsets.get(choice, 0))
        offsets[choice] = offsets.get(choice, 0) + sum(map(len, lists["tokens"]))
        logprobs = json.dumps(lists)
    ids = f',"token_ids":{part.token_ids}' if job.body.return_token_ids else ""
    text = quote("" if job.drop else part.text)
    return f'{choice},"text":{text},"logprobs":{logprobs},"finish_reason":{reason}{stop}{ids}{more}}}]'
