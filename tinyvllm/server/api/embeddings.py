"""POST /v1/embeddings: texts or a conversation to vectors, the mean or the last of the final hidden states."""

from __future__ import annotations

import base64
import time
from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import conversation_of, encode_conversation
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.prompts import EncodedPrompt, encode_texts, truncation_of
from tinyvllm.server.core.response import ResponseWriter
from tinyvllm.server.core.schema import EmbeddingRequest
from tinyvllm.server.core.usage import TokenUsage

_MIN_LENGTH = 1e-12  # of a vector that is divided by its length


async def answer(context: RequestContext, body: EmbeddingRequest, writer: ResponseWriter) -> None:
    """Embed one or several texts."""
    context.service.models.refuse_adapter(body.model, "embeddings are computed")
    async with context.service.models.use(body.model) as (model, llm):
        ids = [prompt.token_ids for prompt in await _encode_input(context, body, llm)]
        context.reserve(sum(map(len, ids)), 0)
        vectors = _shortened(await llm.embed(ids, pooling=body.pooling or "mean", normalize=False), body)
        usage = TokenUsage(prompt=sum(map(len, ids)))
        usage.record(context)
        data = [{"object": "embedding", "index": i, "embedding": _encode(v, body.encoding_format)} for i, v in enumerate(vectors)]
        head = {"id": f"embd-{context.unique_id}", "object": "list", "created": int(time.time()), "model": model}
        counts = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt, "completion_tokens": 0}
        await writer.json({**head, "data": data, "usage": counts})


async def _encode_input(context: RequestContext, body: EmbeddingRequest, llm: AsyncLLM) -> list[EncodedPrompt]:
    """The texts, or the conversation as one text."""
    truncation = truncation_of(body)
    if truncation is not None:
        truncation = replace(truncation, reserved=0)  # there is no output
    if body.messages is None:
        special = body.add_special_tokens is not False
        return await encode_texts(llm, body.input, "input", special=special, truncation=truncation, output=False)
    conversation = conversation_of(context.service.config, context.data, body.chat_template_kwargs or {})
    conversation = replace(conversation, add_generation_prompt=bool(body.add_generation_prompt))
    return [(await encode_conversation(llm, conversation, None, truncation, output=False)).encoded]


def _shortened(vectors: np.ndarray, body: EmbeddingRequest) -> np.ndarray:
    """The first `dimensions` numbers of float32 [N, E], of length 1 unless the body forbids it. Failure for more than there are."""
    if body.dimensions is not None and body.dimensions > vectors.shape[1]:
        text = f"dimensions: must be at most {vectors.shape[1]}, the hidden size of this model, got {body.dimensions}"
        raise bad_field("dimensions", text)
    vectors = vectors[:, : body.dimensions]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors if body.normalize is False or body.use_activation is False else vectors / np.maximum(lengths, _MIN_LENGTH)


def _encode(vector: np.ndarray, encoding: str | None) -> Any:
    """float32 [E] as numbers, or as base64 of its little-endian bytes, which OpenAI's clients request by default."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float32).tolist()
