"""The small endpoints that vLLM users know: /generate, /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.request import CompletionOutput, RequestOutput
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import conversation_of, encode_conversation
from tinyvllm.server.core.failures import bad_field, encode
from tinyvllm.server.core.generation import beam_search
from tinyvllm.server.core.generation import generate as run_prompts
from tinyvllm.server.core.logprobs import LogprobStyle, chat_logprobs, positions_of, prompt_logprobs
from tinyvllm.server.core.params import beam_params, output_length, request_options, sampling_params
from tinyvllm.server.core.prompts import EncodedPrompt, check_room, encode_texts, require_tokenizer, run_aside, truncation_of
from tinyvllm.server.core.response import DONE, ResponseWriter, json_response, sse_event
from tinyvllm.server.core.schema import DetokenizeRequest, GenerateRequest, TokenizeRequest
from tinyvllm.server.core.segment_store import prefix_of
from tinyvllm.server.core.usage import TokenUsage, extra_fields, finish_reason_of
from tinyvllm.text.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16


async def generate(context: RequestContext, body: GenerateRequest, writer: ResponseWriter) -> None:
    """Continue one prompt. The response has the fields of RequestOutput; a stream has one event with new text for each engine step."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise bad_field("prompt", "prompt: send either prompt or prompt_token_ids")
    async with context.service.models.use(body.model) as (_, llm):
        prompt = body.prompt if body.prompt is not None else body.prompt_token_ids
        prefix = prefix_of(context.service.segments.used_by_body(context.owner, context, body, llm), body)
        special = body.add_special_tokens is not False
        prompts = await encode_texts(llm, prompt, "prompt", special=special, truncation=truncation_of(body, body.max_tokens), prefix=prefix)
        check_room(llm, len(prompts[0].token_ids), body.max_tokens or 0, "max_tokens")
        length = output_length(body, "max_tokens")
        max_tokens = min(_DEFAULT_MAX_TOKENS if length is None else length, prompts[0].room(llm))
        usage = TokenUsage()
        if body.use_beam_search:
            beams = beam_params(body, max_tokens)
            (final,) = await beam_search(context, llm, prompts[:1], beams, request_options(context, body))
            await writer.json(_output(context, body, final, usage, llm.tokenizer))
        else:
            await _run(context, body, writer, llm, prompts, max_tokens, usage)


async def _run(
    context: RequestContext,
    body: GenerateRequest,
    writer: ResponseWriter,
    llm: AsyncLLM,
    prompts: list[EncodedPrompt],
    max_tokens: int,
    usage: TokenUsage,
) -> None:
    params = sampling_params(llm, body, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.stream:
        writer.start_stream()
    async with aclosing(run_prompts(context, llm, prompts, params, request_options(context, body))) as outputs:
        async for _, final in outputs:
            if body.stream:
                await writer.write(sse_event(_output(context, body, final, usage, llm.tokenizer)))
    if body.stream:
        await writer.close(DONE)
    else:
        await writer.json(_output(context, body, final, usage, llm.tokenizer))


def _output(
    context: RequestContext, body: GenerateRequest, output: RequestOutput, usage: TokenUsage, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    if not usage.prompt:
        usage.add_prompt(output)
    usage.add_completions(output)
    usage.add_energy(output)
    usage.record(context)
    parts = [_continuation(context, body, part, tokenizer) for part in output.outputs]
    response: dict[str, Any] = {"request_id": context.request_id, "text": [part["text"] for part in parts], "outputs": parts}
    response |= {"prompt_token_ids": output.prompt_token_ids, "finished": output.finished, "usage": usage.openai()}
    response |= extra_fields(output, body.timings_per_token and output.finished, usage)
    if body.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(output)
    return response


def _continuation(context: RequestContext, body: GenerateRequest, part: CompletionOutput, tokenizer: Tokenizer | None) -> dict[str, Any]:
    reason, stop = finish_reason_of(part)
    fields: dict[str, Any] = {"index": part.index, "text": part.text, "token_ids": part.token_ids}
    if body.logprobs is not None:
        fields["logprobs"] = chat_logprobs(tokenizer, positions_of(part), LogprobStyle.of(context.service.config, body, body.logprobs))
    return {**fields, "finish_reason": reason, "stop_reason": stop}


async def tokenize(context: RequestContext, body: TokenizeRequest, writer: ResponseWriter) -> None:
    """Token ids of a text or a conversation."""
    async with context.service.models.use(body.model) as (_, llm):
        tokenizer = require_tokenizer(llm)
        special = bool(body.add_special) if body.content is not None else body.add_special_tokens is not False
        text = body.prompt if body.content is None else body.content
        if body.messages is not None:
            conversation = conversation_of(context.service.config, context.data, body.chat_template_kwargs or {})
            prompt = await encode_conversation(llm, conversation, context.data.get("tools") or None)
            ids = prompt.encoded.token_ids
        elif text:
            ids = (await encode_texts(llm, text, "prompt", special=special, limit=False))[0].token_ids
        else:
            ids = tokenizer.encode("", special)

        def response() -> bytes:
            texts = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
            tokens = [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids] if body.with_pieces else ids
            return encode({"count": len(ids), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": texts})

        await writer.json(await run_aside(len(ids), response))


def _piece(raw: bytes) -> str | list[int]:
    """The bytes of a token as llama.cpp shows them: a text, or numbers if they are none."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(context: RequestContext, body: DetokenizeRequest, writer: ResponseWriter) -> None:
    """The text of token ids, including special tokens."""
    async with context.service.models.use(body.model) as (_, llm):
        tokenizer = require_tokenizer(llm)
        if invalid := next((i for i in body.tokens if i >= tokenizer.vocab_size), None):
            raise bad_field("tokens", f"tokens: id {invalid} is out of vocabulary, which has {tokenizer.vocab_size} tokens")

        def response() -> bytes:
            text = tokenizer.decode(body.tokens, False)
            if body.model is not None:  # llama.cpp's clients name no model, and vLLM's compare the whole answer
                return encode({"prompt": text})
            return encode({"prompt": text, "content": text})

        await writer.json(await run_aside(len(body.tokens), response))


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer of the first model, or of ?model=NAME."""
    context = RequestContext.of(request)
    async with context.service.models.use(request.query_params.get("model")) as (model, llm):
        tokenizer = require_tokenizer(llm)
        return json_response(
            {
                "model": model,
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": tokenizer.vocab_size,
                "max_model_len": llm.max_model_len,
                "bos_token_id": tokenizer.bos_id,
                "eos_token_ids": list(tokenizer.eos_ids),
                **_special_token_texts(tokenizer),
                "special_tokens": tokenizer.special_tokens,
                "chat_template": context.service.config.chat_template or tokenizer.chat_templates.get("default"),
                "chat_templates": sorted(tokenizer.chat_templates),
            }
        )


def _special_token_texts(tokenizer: Tokenizer) -> dict[str, str | None]:
    """Texts of special tokens, under the names that lm-evaluation-harness uses for remote tokenizers."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    named = {name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {name: text or (None if (i := ids.get(name)) is None else tokenizer.token_text(i)) for name, text in named.items()}
