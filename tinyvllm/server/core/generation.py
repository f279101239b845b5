"""Runs prompts on the engine: several text prompts together, or one conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.request import RequestOptions, RequestOutput, SamplingParams
from tinyvllm.server.core.answer_format import AnswerFormat, Tools, answer_format
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import ChatPrompt
from tinyvllm.server.core.params import request_options
from tinyvllm.server.core.prompts import EncodedPrompt, check_room
from tinyvllm.server.core.usage import TokenUsage

_LENGTH_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


async def generate(
    llm: AsyncLLM, prompts: Sequence[EncodedPrompt], params: SamplingParams, options: RequestOptions, name: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the prompt, its output) as outputs arrive. Prompts run concurrently; closing the generator aborts all of them.

    max_tokens beyond the context is a default of the API: what clients ask for was checked. The rest of the context is used then.
    """
    if len(prompts) == 1:
        fitting = _within_context(llm, prompts[0], params)
        async with aclosing(llm.generate(prompts[0].engine_prompt(), fitting, name, options=options)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(maxsize=len(prompts))

    async def run(index: int) -> None:
        try:
            prompt = prompts[index]
            fitting = _within_context(llm, prompt, params)
            async with aclosing(llm.generate(prompt.engine_prompt(), fitting, f"{name}-{index}", options=options)) as outputs:
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


def _within_context(llm: AsyncLLM, prompt: EncodedPrompt, params: SamplingParams) -> SamplingParams:
    room = prompt.room(llm)
    return params if params.max_tokens is None or params.max_tokens <= room else replace(params, max_tokens=room)


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
    usage: TokenUsage = field(default_factory=TokenUsage)

    @property
    def room(self) -> int:
        """Output tokens for which the context has room."""
        return self.prompt.room(self.llm)

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs; the first one counts the prompt."""
        first = True
        options = request_options(self.context, self.body)
        async with aclosing(generate(self.llm, [self.prompt], self.params, options, self.context.unique_id)) as outputs:
            async for _, output in outputs:
                if first:
                    self.usage.add_prompt(output)
                    first = False
                yield output

    async def final_output(self) -> RequestOutput:
        """The whole output, counted and recorded."""
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                final = output
        self.usage.add_completions(final)
        self.usage.record(self.context)
        return final


def chat_run(
    context: RequestContext, body: Any, llm: AsyncLLM, model: str, prompt: ChatPrompt, tools: Tools, params: SamplingParams
) -> ChatRun:
    """A run of this conversation. Failure or RequestError for tools that cannot be called as required, or a context that is too short."""
    if (field := next((name for name in _LENGTH_FIELDS if context.data.get(name) is not None), None)) is not None:
        check_room(llm, len(prompt.encoded.token_ids), context.data[field], field)
    format, params = answer_format(llm, prompt, tools, params)
    return ChatRun(context, body, llm, model, prompt.encoded, params, format)
