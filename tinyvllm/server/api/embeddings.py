"""POST /v1/embeddings: texts to vectors, the mean or the last of the final hidden states."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.prompts import encode_texts, truncation_of
from tinyvllm.server.core.response import ResponseWriter
from tinyvllm.server.core.schema import EmbeddingRequest
from tinyvllm.server.core.usage import TokenUsage


async def answer(context: RequestContext, body: EmbeddingRequest, writer: ResponseWriter) -> None:
    """Embed one or several texts."""
    async with context.service.models.use(body.model) as (model, llm):
        special = body.add_special_tokens is not False
        prompts = await encode_texts(llm, body.input, "input", special=special, truncation=truncation_of(body))
        ids = [prompt.token_ids for prompt in prompts]
        context.reserve(sum(map(len, ids)), 0)
        vectors = await llm.embed(ids, pooling=body.pooling or "mean", normalize=body.normalize is not False)  # [N, E]
        usage = TokenUsage(prompt=sum(map(len, ids)))
        usage.record(context)
        data = [{"object": "embedding", "index": i, "embedding": _encode(v, body.encoding_format)} for i, v in enumerate(vectors)]
        counts = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        await writer.json({"object": "list", "model": model, "data": data, "usage": counts})


def _encode(vector: np.ndarray, encoding: str | None) -> Any:
    """float32 [E] as numbers, or as base64 of its little-endian bytes, which OpenAI's clients request by default."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float32).tolist()
