"""Runs prompts on the engine: several text prompts together, or one conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field, replace
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import BeamSearchParams, RequestOptions, RequestOutput, SamplingParams, StructuredOutputsParams
from tinyvllm.server.core.answer_format import AnswerFormat, Tools, answer_format
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import ChatPrompt
from tinyvllm.server.core.limits import RESERVED_TOKENS
from tinyvllm.server.core.params import request_options
from tinyvllm.server.core.prompts import EncodedPrompt, check_room
from tinyvllm.server.core.usage import TokenUsage

_STRUCTURE_FIELDS = ("structured_outputs", "response_format", "text", "output_config")
_OWN_FORMATS = ("structured_outputs", "grammar", "json_schema")  # of the whole answer
_CONTENT_FORMATS = ("response_format", "text", "output_config")  # of the content, if there is any
_LENGTH_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


async def generate(
    context: RequestContext,
    llm: AsyncLLM,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the prompt, its output) as outputs arrive. Prompts run concurrently; closing the generator aborts all of them.

    params: those of all prompts, or of each prompt its own.
    max_tokens beyond the context is a default of the API: what clients ask for was checked. The rest of the context is used then.
    """
    of_each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    fitting = [_within_context(llm, prompt, one) for prompt, one in zip(prompts, of_each, strict=True)]
    reserve_tokens(context, llm, prompts, fitting)
    fitting = await _read_structures(context, llm, fitting)
    context.streams = all(one.output_kind == "delta" for one in fitting)
    async with aclosing(_run(llm, prompts, fitting, options, context.unique_id)) as outputs:
        async for index, output in outputs:
            context.count_tokens(sum(len(part.token_ids) for part in output.outputs))
            yield index, output


async def _run(
    llm: AsyncLLM, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams], options: RequestOptions, name: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    if len(prompts) == 1:
        async with aclosing(llm.generate(prompts[0].engine_prompt(), params[0], name, options=options)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(maxsize=len(prompts))

    async def run(index: int) -> None:
        try:
            prompt = prompts[index].engine_prompt()
            async with aclosing(llm.generate(prompt, params[index], f"{name}-{index}", options=options)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001  raised below, in the task of the request
            await queue.put(error)

    tasks = [asyncio.create_task(run(index)) for index in range(len(prompts))]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reserve_tokens(
    context: RequestContext, llm: AsyncLLM, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams | BeamSearchParams]
) -> None:
    """Take the tokens of these prompts and of their longest answers from the key's limit; Failure 429 if they are not available."""
    output = 0
    for prompt, one in zip(prompts, params):
        width = one.beam_width if isinstance(one, BeamSearchParams) else max(one.n, one.best_of or 1)
        output += width * min(RESERVED_TOKENS if one.max_tokens is None else one.max_tokens, prompt.room(llm))
    context.reserve(sum(len(prompt.token_ids) for prompt in prompts), output)


async def beam_search(
    context: RequestContext, llm: AsyncLLM, prompts: Sequence[EncodedPrompt], params: BeamSearchParams, options: RequestOptions
) -> list[RequestOutput]:
    """The beams of each prompt."""
    reserve_tokens(context, llm, prompts, [params] * len(prompts))
    results = []
    for prompt in prompts:
        output = await llm.beam_search(prompt.engine_prompt(), params, options=options)
        context.count_tokens(sum(len(part.token_ids) for part in output.outputs))
        results.append(output)
    return results


def _within_context(llm: AsyncLLM, prompt: EncodedPrompt, params: SamplingParams) -> SamplingParams:
    room = prompt.room(llm)
    return params if params.max_tokens is None or params.max_tokens <= room else replace(params, max_tokens=room)


async def _read_structures(context: RequestContext, llm: AsyncLLM, params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The params with their constraints as `_read_structure` reads them; prompts that share one read it once."""
    by_id: dict[int, StructuredOutputsParams | None] = {}
    results = []
    for one in params:
        if (structure := one.structured_outputs) is not None:
            if id(structure) not in by_id:
                by_id[id(structure)] = await _read_structure(context, llm, one)
            one = replace(one, structured_outputs=by_id[id(structure)])
        results.append(one)
    return results


async def _read_structure(context: RequestContext, llm: AsyncLLM, params: SamplingParams) -> StructuredOutputsParams | None:
    """The constraint of the answer, read leniently if the server does. What it does not hold is named in the header X-Ignored-Fields."""
    structure = params.structured_outputs
    if structure is None:
        return None
    if context.service.config.lenient:
        structure = replace(structure, lenient=True)
    if ignored := await llm.ignored_keywords(replace(params, structured_outputs=structure)):
        names = ("tools",) if structure.kind == "grammar" else ()
        field = next((name for name in (*_STRUCTURE_FIELDS, *names) if context.data.get(name) is not None), "schema")
        context.add_ignored(field + place for place in ignored)
    return structure


@dataclass
class ChatRun:
    """A conversation that is ready to run: the encoded prompt, the params, and how its answer is parsed."""

    context: RequestContext
    body: Any
    llm: AsyncLLM
    model: str
    prompt: EncodedPrompt
    params: SamplingParams
    format: AnswerFormat
    last_message: Mapping[str, Any]
    usage: TokenUsage = field(default_factory=TokenUsage)

    @property
    def room(self) -> int:
        """Output tokens for which the context has room."""
        return self.prompt.room(self.llm)

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs; the first one counts the prompt."""
        first = True
        options = request_options(self.context, self.body)
        async with aclosing(generate(self.context, self.llm, [self.prompt], self.params, options)) as outputs:
            async for _, output in outputs:
                if first:
                    self.usage.add_prompt(output)
                    first = False
                self.usage.add_energy(output)
                yield output

    async def final_output(self) -> RequestOutput:
        """The whole output, counted and recorded."""
        (output,) = await final_outputs([self])
        return output


async def final_outputs(runs: Sequence[ChatRun]) -> list[RequestOutput]:
    """The whole outputs of the conversations of one request. They run concurrently and share the recorded usage of the first."""
    first = runs[0]
    finals: dict[int, RequestOutput] = {}
    options = request_options(first.context, first.body)
    prompts, params = [run.prompt for run in runs], [run.params for run in runs]
    async with aclosing(generate(first.context, first.llm, prompts, params, options)) as outputs:
        async for index, output in outputs:
            finals[index] = output
    for index, run in enumerate(runs):
        run.usage = first.usage
        first.usage.add_prompt(finals[index])
        first.usage.add_completions(finals[index])
        first.usage.add_energy(finals[index])
    first.usage.record(first.context)
    return [finals[index] for index in range(len(runs))]


def _without_content_format(context: RequestContext, params: SamplingParams) -> SamplingParams:
    """The params without the format of the content, which a required call does not have; X-Ignored-Fields names the field."""
    if params.structured_outputs is None or any(context.data.get(name) for name in _OWN_FORMATS):
        return params
    context.add_ignored(name for name in _CONTENT_FORMATS if context.data.get(name))
    return replace(params, structured_outputs=None)


def chat_run(
    context: RequestContext, body: Any, llm: AsyncLLM, model: str, prompt: ChatPrompt, tools: Tools, params: SamplingParams
) -> ChatRun:
    """A run of this conversation. Failure or RequestError for tools that cannot be called as required, or a context that is too short."""
    if (field := next((name for name in _LENGTH_FIELDS if context.data.get(name) is not None), None)) is not None:
        check_room(llm, len(prompt.encoded.token_ids), context.data[field], field)
    if tools.choice == "required":
        params = _without_content_format(context, params)
    format, params = answer_format(llm, prompt, tools, params)
    return ChatRun(context, body, llm, model, prompt.encoded, params, format, prompt.conversation.messages[-1])
