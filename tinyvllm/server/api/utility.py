"""The small endpoints that vLLM's users know: /generate, /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.request import CompletionOutput, RequestOutput
from tinyvllm.server.api.chat import conversation_of
from tinyvllm.server.api.probes import reply
from tinyvllm.server.core.chunk_store import head_of
from tinyvllm.server.core.context import CALL, Call
from tinyvllm.server.core.conversation import plain
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.logprobs import chat_logprobs, positions_of, prompt_positions
from tinyvllm.server.core.params import beam_params, request_options, sampling_params
from tinyvllm.server.core.prompts import encode_conversation, encode_texts, tokenizer_of
from tinyvllm.server.core.schema import DetokenizeRequest, GenerateRequest, TokenizeRequest
from tinyvllm.server.core.usage import Count, ended, extras, outputs_of
from tinyvllm.server.http.stream import DONE, Wire, event
from tinyvllm.text.tokenizer import Tokenizer


async def generate(call: Call, body: GenerateRequest, wire: Wire) -> None:
    """One prompt continued; the answer holds what RequestOutput holds. Streams hold what is new, an event a step."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise bad_field("prompt", "prompt: give either prompt or prompt_token_ids")
    async with call.service.models.use(body.model) as (_, llm):
        asked = body.prompt if body.prompt is not None else body.prompt_token_ids
        special = body.add_special_tokens is not False
        head = head_of(call, llm, body)
        prompts = await encode_texts(llm, asked, "prompt", special=special, keep=body.truncate_prompt_tokens, head=head)
        longest = 16 if body.max_tokens is None else body.max_tokens
        count = Count()
        if body.use_beam_search:
            final = await llm.beam_search(prompts[0].prompt(), beam_params(body, longest), options=request_options(call, body))
            await wire.json(_generated(call, body, final, count, llm.tokenizer))
            return
        params = sampling_params(llm, body, max_tokens=longest, logprobs=body.logprobs)
        if body.stream:
            wire.open()
        async with aclosing(outputs_of(llm, prompts, params, request_options(call, body), call.name)) as outputs:
            async for _, output in outputs:
                final = output
                if body.stream:
                    await wire.write(event(_generated(call, body, output, count, llm.tokenizer)))
        if body.stream:
            await wire.close(DONE)
        else:
            await wire.json(_generated(call, body, final, count, llm.tokenizer))


def _generated(call: Call, body: GenerateRequest, output: RequestOutput, count: Count, tokenizer: Any) -> dict[str, Any]:
    def continuation(part: CompletionOutput) -> dict[str, Any]:
        reason, stop = ended(part)
        said: dict[str, Any] = {"index": part.index, "text": part.text, "token_ids": part.token_ids}
        if body.logprobs is not None:
            said["logprobs"] = chat_logprobs(tokenizer, positions_of(part), body.logprobs)
        return {**said, "finish_reason": reason, "stop_reason": stop}

    if not count.prompt:
        count.add_prompt(output)
    count.completion += sum(len(part.token_ids) for part in output.outputs)
    count.note(call)
    parts = [continuation(part) for part in output.outputs]
    said: dict[str, Any] = {"request_id": call.request_id, "text": [part["text"] for part in parts], "outputs": parts}
    said |= {"prompt_token_ids": output.prompt_token_ids, "finished": output.finished, "usage": count.usage(), **extras(output)}
    if body.prompt_logprobs is not None:
        said["prompt_logprobs"] = prompt_positions(output)
    return said


async def tokenize(call: Call, body: TokenizeRequest, wire: Wire) -> None:
    """Token ids of a text or a conversation."""
    async with call.service.models.use(body.model) as (_, llm):
        tokenizer = tokenizer_of(llm)
        if body.messages is not None:
            conversation = conversation_of(call, call.data, body.chat_template_kwargs or {})
            conversation = plain(conversation, call.data.get("tools") or None)
            ids = (await encode_conversation(llm, conversation)).token_ids
        elif body.prompt:
            ids = (await encode_texts(llm, body.prompt, "prompt", special=body.add_special_tokens is not False, limit=False))[0].token_ids
        else:
            ids = tokenizer.encode("", body.add_special_tokens is not False)
        said: dict[str, Any] = {"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids}
        said["token_strs"] = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        await wire.json(said)


async def detokenize(call: Call, body: DetokenizeRequest, wire: Wire) -> None:
    """The text of token ids, special tokens and all."""
    async with call.service.models.use(body.model) as (_, llm):
        tokenizer = tokenizer_of(llm)
        if wrong := next((i for i in body.tokens if i >= tokenizer.vocab_size), None):
            raise bad_field("tokens", f"tokens: {wrong} is outside the vocabulary of {tokenizer.vocab_size}")
        await wire.json({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def tokenizer_info(request: Request) -> Response:
    """What the tokenizer of the first model, or of ?model=NAME, is."""
    call: Call = request.scope[CALL]
    async with call.service.models.use(request.query_params.get("model")) as (model, llm):
        tokenizer = tokenizer_of(llm)
        return reply(
            {
                "model": model,
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": tokenizer.vocab_size,
                "max_model_len": llm.max_model_len,
                "bos_token_id": tokenizer.bos_id,
                "eos_token_ids": list(tokenizer.eos_ids),
                **_marks(tokenizer),
                "special_tokens": tokenizer.special_tokens,
                "chat_template": call.service.config.chat_template or tokenizer.chat_templates.get("default"),
                "chat_templates": sorted(tokenizer.chat_templates),
            }
        )


def _marks(tokenizer: Tokenizer) -> dict[str, str | None]:
    """The texts of the tokens at the ends, under the names by which lm-evaluation-harness knows a tokenizer that it can ask over HTTP."""
    ends = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    named = {name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {name: text or (None if (i := ends.get(name)) is None else tokenizer.token_text(i)) for name, text in named.items()}
