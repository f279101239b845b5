"""Runs prompts on the engine: several text prompts together, or one conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.request import RequestOptions, RequestOutput, SamplingParams
from tinyvllm.server.core.answer_format import AnswerFormat, Tools, answer_format
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import ChatPrompt
from tinyvllm.server.core.params import request_options
from tinyvllm.server.core.prompts import EncodedPrompt
from tinyvllm.server.core.usage import TokenUsage


async def generate(
    llm: AsyncLLM, prompts: Sequence[EncodedPrompt], params: SamplingParams, options: RequestOptions, name: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the prompt, its output) as outputs arrive. Prompts run concurrently; closing the generator aborts all of them."""
    if len(prompts) == 1:
        async with aclosing(llm.generate(prompts[0].engine_prompt(), params, name, options=options)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(maxsize=len(prompts))

    async def run(index: int) -> None:
        try:
            async with aclosing(llm.generate(prompts[index].engine_prompt(), params, f"{name}-{index}", options=options)) as outputs:
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
    """A run of this conversation. Failure or RequestError for tools that cannot be called as required."""
    format, params = answer_format(llm, prompt, tools, params)
    return ChatRun(context, body, llm, model, prompt.encoded, params, format)
