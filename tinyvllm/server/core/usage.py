"""What the engine gives for a request, and what every API says of it in its own words: usage, ends, receipts. Knows no API's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOptions, RequestOutput, SamplingParams
from tinyvllm.server.core.context import Call
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.prompts import Encoded


@dataclass
class Count:
    """What an answer has used, in tokens."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def add_prompt(self, output: RequestOutput) -> None:
        self.prompt += len(output.prompt_token_ids)
        self.cached += output.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        """As OpenAI's completions and chat completions say it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **({"completion_tokens_details": {"reasoning_tokens": self.reasoning}} if self.reasoning else {}),
        }

    def note(self, call: Call) -> None:
        """For the access log and the key's allowance."""
        call.record |= {"prompt_tokens": self.prompt, "cached_tokens": self.cached, "completion_tokens": self.completion}
        call.tokens = self.prompt + self.completion


def ended(part: CompletionOutput) -> tuple[str | None, int | str | None]:
    """(OpenAI's finish_reason, vLLM's stop_reason); Failure for an end that is none. A deadline is a length that the clock has set."""
    if part.finish_reason == "error" and (part.error or "").startswith("structured_outputs:"):
        raise Failure(400, part.error or "", param="structured_outputs", code="invalid_value")  # a grammar that grew beyond every limit
    if part.finish_reason == "error":
        raise Failure(500, part.error or "the model's numbers broke at this request", code="generation_failed")
    if part.finish_reason == "abort":
        raise Failure(503, "the request was ended by the server", code="aborted")
    return ("length", "deadline") if part.finish_reason == "deadline" else (part.finish_reason, part.stop_reason)


async def outputs_of(
    llm: AsyncLLM, prompts: Sequence[Encoded], params: SamplingParams, on: RequestOptions, name: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the prompt, its output), as they come. Several prompts run at the same time; leaving ends all of them."""
    if len(prompts) == 1:
        async with aclosing(llm.generate(prompts[0].prompt(), params, name, options=on)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(maxsize=len(prompts))

    async def follow(index: int) -> None:
        try:
            async with aclosing(llm.generate(prompts[index].prompt(), params, f"{name}-{index}", options=on)) as outputs:
                async for output in outputs:
                    await news.put((index, output))
            await news.put(None)
        except Exception as error:  # noqa: BLE001  handed on below
            await news.put(error)

    tasks = [asyncio.create_task(follow(index)) for index in range(len(prompts))]
    running = len(tasks)
    try:
        while running:
            item = await news.get()
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


def extras(output: RequestOutput | None) -> dict[str, Any]:
    """The receipt and the explanation where they were asked for."""
    found: dict[str, Any] = {}
    if output is not None and output.receipt is not None:
        found["receipt"] = asdict(output.receipt)
    if output is not None and output.explanation is not None:
        found["explanation"] = output.explanation
    return found
