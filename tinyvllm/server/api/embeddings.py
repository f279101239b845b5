"""POST /v1/embeddings: texts to vectors, the mean or the last of the final hidden states."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from tinyvllm.server.core.context import Call
from tinyvllm.server.core.prompts import encode_texts
from tinyvllm.server.core.schema import EmbeddingRequest
from tinyvllm.server.core.usage import Count
from tinyvllm.server.http.stream import Wire


async def answer(call: Call, body: EmbeddingRequest, wire: Wire) -> None:
    """The work of the endpoint."""
    async with call.service.models.use(body.model) as (model, llm):
        special = body.add_special_tokens is not False
        prompts = await encode_texts(llm, body.input, "input", special=special, keep=body.truncate_prompt_tokens)
        ids = [prompt.token_ids for prompt in prompts]
        vectors = await llm.embed(ids, pooling=body.pooling or "mean", normalize=body.normalize is not False)  # [N, E]
        count = Count(prompt=sum(map(len, ids)))
        count.note(call)
        data = [{"object": "embedding", "index": i, "embedding": _spelled(v, body.encoding_format)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": count.prompt, "total_tokens": count.prompt}
        await wire.json({"object": "list", "model": model, "data": data, "usage": usage})


def _spelled(vector: np.ndarray, spelling: str | None) -> Any:
    """float32 [E] as numbers, or as base64 of its little-endian bytes, which is what OpenAI's clients ask for by themselves."""
    if spelling == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float32).tolist()
