"""POST /completion: llama.cpp's own form of a completion, for its clients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import field, replace
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import CompletionOutput, RequestOutput, SamplingParams
from tinyvllm.server.api.llamacpp_body import NativeCompletionRequest, biases_of, generation_settings, prompts_of
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.generation import generate
from tinyvllm.server.core.limits import MAX_CHOICES, MAX_COUNT
from tinyvllm.server.core.logprobs import LogprobStyle, Position, positions_of, token_probabilities
from tinyvllm.server.core.params import check_logprob_token_ids, llamacpp_structure, output_kind, request_options, same_fields
from tinyvllm.server.core.prompts import EncodedPrompt, encode_texts, require_tokenizer
from tinyvllm.server.core.response import ResponseWriter, sse_event
from tinyvllm.server.core.usage import TokenUsage, finish_reason_of, timings

_RANDOM_SEEDS = (-1, 2**32 - 1)  # llama.cpp's way to ask for no particular one


async def answer(context: RequestContext, body: NativeCompletionRequest, writer: ResponseWriter) -> None:
    """Continue one or several prompts."""
    async with context.service.models.use(body.model) as (model, llm):
        prompts, several = await _encode(llm, body)
        run = _Run(context, body, llm, model, prompts, await _params(llm, body))
        if body.stream:
            await run.stream(writer)
        else:
            results = await run.results()
            await writer.json(results if several or run.params.n > 1 else results[0])


async def _encode(llm: AsyncLLM, body: NativeCompletionRequest) -> tuple[list[EncodedPrompt], bool]:
    """(the prompts, whether the body has a list of them)."""
    prompts = await prompts_of(llm, body.prompt)
    if len(prompts) * (body.n_cmpl or 1) > MAX_CHOICES:
        raise bad_field("n_cmpl", f"n_cmpl: {body.n_cmpl} answers to each of {len(prompts)} prompts exceed the limit of {MAX_CHOICES}")
    several = isinstance(body.prompt, list) and not any(isinstance(one, int) for one in body.prompt)
    return await encode_texts(llm, prompts, "prompt"), several


async def _params(llm: AsyncLLM, body: NativeCompletionRequest) -> SamplingParams:
    fields = same_fields(body)
    check_logprob_token_ids(body, body.n_probs or None)
    if body.seed in _RANDOM_SEEDS:
        fields["seed"] = None
    if (structure := llamacpp_structure(body)) is not None:
        fields["structured_outputs"] = structure
    fields["logit_bias"] = await biases_of(llm, body.logit_bias or [])
    length = MAX_COUNT if body.longest_answer is None else body.longest_answer
    fields |= {"n": body.n_cmpl or 1, "max_tokens": length, "logprobs": body.n_probs or None, "output_kind": output_kind(body.stream)}
    return replace(llm.default_params, **fields)


@dataclass
class _Answer:
    """One of the answers so far."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)

    def add(self, part: CompletionOutput) -> None:
        self.text.append(part.text)
        self.token_ids += part.token_ids
        self.positions += positions_of(part)


@dataclass
class _Run:
    """One request and the objects of its answers."""

    context: RequestContext
    body: NativeCompletionRequest
    llm: AsyncLLM
    model: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    usage: TokenUsage = field(default_factory=TokenUsage)

    def __post_init__(self) -> None:
        self._answers = [_Answer(index) for index in range(len(self.prompts) * self.params.n)]
        self._counted: set[int] = set()
        self._settings = generation_settings(self.llm, self.params, self.body)

    async def results(self) -> list[dict[str, Any]]:
        """The finished answers."""
        results: dict[int, dict[str, Any]] = {}
        async with aclosing(self._outputs()) as outputs:
            async for answer, part, output in outputs:
                results[answer.index] = self._result(answer, part, output)
        self.usage.record(self.context)
        return [results[answer.index] for answer in self._answers]

    async def stream(self, writer: ResponseWriter) -> None:
        """An event for each step, and one with all fields at the end of each answer. llama.cpp ends such a stream without [DONE]."""
        writer.start_stream()
        async with aclosing(self._outputs()) as outputs:
            async for answer, part, output in outputs:
                events = [sse_event(self._step(answer, part, output))] if part.token_ids or part.text else []
                if part.finish_reason is not None:
                    events.append(sse_event({**self._result(answer, part, output), "content": "", "tokens": []}))
                await writer.write(b"".join(events))
        self.usage.record(self.context)
        await writer.close()

    async def _outputs(self) -> Any:
        """(answer, its new part, output of its prompt) as the engine makes them."""
        options = request_options(self.context, self.body)
        async with aclosing(generate(self.context, self.llm, self.prompts, self.params, options)) as outputs:
            async for index, output in outputs:
                if index not in self._counted:
                    self._counted.add(index)
                    self.usage.add_prompt(output)
                self.usage.add_completions(output)
                for part in output.outputs:
                    answer = self._answers[index * self.params.n + part.index]
                    answer.add(part)
                    yield answer, part, output

    def _step(self, answer: _Answer, part: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        event = {"index": answer.index, "content": part.text, "tokens": part.token_ids, "stop": False, **self._counts(answer, output)}
        if self.body.timings_per_token:
            event["timings"] = timings(output, len(answer.token_ids))
        return {**event, **self._probabilities(positions_of(part))}

    def _counts(self, answer: _Answer, output: RequestOutput) -> dict[str, Any]:
        return {"id_slot": -1, "tokens_predicted": len(answer.token_ids), "tokens_evaluated": len(output.prompt_token_ids)}

    def _probabilities(self, positions: Sequence[Position]) -> dict[str, Any]:
        if not self.body.n_probs:
            return {}
        style = LogprobStyle.of(self.context.service.config, self.body, self.body.n_probs)
        return {"completion_probabilities": token_probabilities(self.llm.tokenizer, positions, style)}

    def _result(self, answer: _Answer, part: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """A finished answer with all its fields, or those of response_fields."""
        reason, stop = finish_reason_of(part)
        self.context.record["finish_reason"] = reason
        text, tokens = "".join(answer.text), answer.token_ids
        full = len(output.prompt_token_ids) + len(tokens) >= self.llm.max_model_len
        result = {
            "index": answer.index,
            "content": text,
            "tokens": tokens if self.body.return_tokens else [],
            "stop": True,
            **self._counts(answer, output),
            "model": self.model,
            "created": int(time.time()),
            "system_fingerprint": self.llm.fingerprint,
            "generation_settings": self._settings,
            "prompt": require_tokenizer(self.llm).decode(output.prompt_token_ids, False),
            "has_new_line": "\n" in text,
            "truncated": reason == "length" and full and len(tokens) < (self.params.max_tokens or 0),
            "stop_type": "limit" if reason == "length" else "word" if isinstance(stop, str) else "eos",
            "stopping_word": stop if isinstance(stop, str) else "",
            "tokens_cached": output.num_cached_tokens,
            "timings": timings(output, len(tokens)),
            **self._probabilities(answer.positions),
        }
        return _selected(result, self.body.response_fields) if self.body.response_fields else result


def _selected(result: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """These fields of a result; `a/b` is the field b of a. Missing ones are left out, as llama.cpp does."""
    selected = {}
    for name in names:
        value: Any = result
        for step in name.split("/"):
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None:
            selected[name] = value
    return selected
