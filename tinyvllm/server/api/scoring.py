"""/score and /rerank: how well texts belong together, by a generative model that was not trained for it.

likelihood  how probable the model finds the query after the document: the geometric mean of the probabilities of the query's tokens, above
            0 and at most 1. Query likelihood as in UPR (Sachan et al., arXiv:2204.07496). The default.
embedding   the cosine of the two texts' embeddings, from -1 to 1: what vLLM computes with embedding models

Scores order the texts of one query and are no probabilities of relevance; models that were trained as rerankers do better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tinyvllm.engine.api import AsyncLLM, encode_piece
from tinyvllm.request import RequestOutput, SamplingParams
from tinyvllm.server.core.body import Body, honoured, limited, refused
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.generation import generate
from tinyvllm.server.core.limits import MAX_COUNT, MAX_DOCUMENTS, MAX_NAME
from tinyvllm.server.core.params import request_options
from tinyvllm.server.core.prompts import EncodedPrompt, check_length, check_size, encode_texts, extra_size, require_tokenizer, run_aside
from tinyvllm.server.core.response import ResponseWriter
from tinyvllm.server.core.schema import ACCESS_LOG_ONLY, DEFAULT_MODEL, Name
from tinyvllm.server.core.usage import TokenUsage, finish_reason_of

_DOCUMENT, _QUERY = "Document: {}\nQuery:", " {}"
_NO_CUT = "texts are scored whole; shorten them"
_METHOD = "likelihood (of the query after the document; if unset) or embedding (cosine)"
_Text = Annotated[str, Field(min_length=1)]


class TextDocument(Body):
    """A document as Jina's and Cohere's clients send it."""

    text: _Text


class _Scoring(Body):
    """The fields of both."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    method: Literal["likelihood", "embedding"] | None = honoured(example="embedding", says=_METHOD)
    priority: int | None = honoured(example=1, ge=-(2**31), le=2**31)
    cache_salt: Name | None = honoured(example="mine")
    user: Annotated[str, Field(max_length=MAX_NAME)] | None = limited(says=ACCESS_LOG_ONLY, example="user-1")
    truncate_prompt_tokens: int | None = refused(_NO_CUT, example=8)


_Texts = _Text | Annotated[list[_Text], Field(min_length=1, max_length=MAX_DOCUMENTS)]
_FIRST, _SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
_FIRST_NOTE, _SECOND_NOTE = "another name of text_1", "another name of text_2"


class ScoreRequest(_Scoring):
    """POST /score, in vLLM's form: one text_1 for all texts of text_2, or lists of equal length. Each has vLLM's other names."""

    text_1: _Texts | None = honoured(example="a query", says="required, under one of its names")
    text_2: _Texts | None = honoured(example=["a text", "another"], says="required, under one of its names")
    queries: _Texts | None = honoured(example="a query", says=_FIRST_NOTE)
    data_1: _Texts | None = honoured(example="a query", says=_FIRST_NOTE)
    documents: _Texts | None = honoured(example=["a text", "another"], says=_SECOND_NOTE)
    items: _Texts | None = honoured(example=["a text", "another"], says=_SECOND_NOTE)
    data_2: _Texts | None = honoured(example=["a text", "another"], says=_SECOND_NOTE)

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        for names in (_FIRST, _SECOND):
            if len(present := [name for name in names if getattr(self, name) is not None]) != 1:
                text = f"{names[0]}: send one of {', '.join(names)}, got {' and '.join(present) or 'none'}"
                raise PydanticCustomError(names[0], text)
        first, second = self.first, self.second
        if len(first) not in (1, len(second)):
            raise PydanticCustomError("text_1", f"text_1: {len(first)} texts cannot be paired with {len(second)} of text_2")
        return self

    @property
    def first(self) -> list[str]:
        """The texts of the first side, under whichever name they came."""
        return self._side(_FIRST)

    @property
    def second(self) -> list[str]:
        return self._side(_SECOND)

    def _side(self, names: Sequence[str]) -> list[str]:
        return _listed(next(texts for name in names if (texts := getattr(self, name)) is not None))


class RerankRequest(_Scoring):
    """POST /rerank, in the form of Jina, Cohere and vLLM."""

    query: _Text = honoured(..., example="a query")
    documents: Annotated[list[_Text | TextDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)] = honoured(..., example=["a", "b"])
    top_n: int | None = honoured(example=1, ge=0, le=MAX_COUNT, says="number of results; 0 or unset gives all")
    return_documents: bool | None = honoured(example=False, says="true if unset")
    max_tokens_per_doc: int | None = refused(_NO_CUT, example=8)


async def score(context: RequestContext, body: ScoreRequest, writer: ResponseWriter) -> None:
    """The score of each pair of texts, in their order."""
    first, second = body.first, body.second
    if len(first) == 1:
        first = first * len(second)
    model, scores, usage = await _scores(context, body, list(zip(first, second, strict=True)))
    data = [{"object": "score", "index": i, "score": one} for i, one in enumerate(scores)]
    response = {"id": f"score-{context.unique_id}", "object": "list", "created": context.service.started, "model": model}
    await writer.json({**response, "data": data, "usage": _counts(usage)})


async def rerank(context: RequestContext, body: RerankRequest, writer: ResponseWriter) -> None:
    """The documents with their scores, the best first."""
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    model, scores, usage = await _scores(context, body, [(body.query, text) for text in texts])
    order = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: body.top_n or len(texts)]
    shown = body.return_documents is not False
    results = [{"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if shown else {})} for i in order]
    await writer.json({"id": f"rerank-{context.unique_id}", "model": model, "results": results, "usage": _counts(usage)})


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _counts(usage: TokenUsage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt + usage.completion, "completion_tokens": usage.completion}


async def _scores(context: RequestContext, body: _Scoring, pairs: list[tuple[str, str]]) -> tuple[str, list[float], TokenUsage]:
    """(model, the score of each (query, document), usage)."""
    usage = TokenUsage()
    if body.method == "embedding":
        context.service.models.refuse_adapter(body.model, "embeddings are computed")
    async with context.service.models.use(body.model) as (model, llm):
        by_method = _cosines if body.method == "embedding" else _likelihoods
        scores = await by_method(context, body, llm, pairs, usage)
    usage.record(context)
    return model, scores, usage


async def _cosines(context: RequestContext, body: _Scoring, llm: AsyncLLM, pairs: list[tuple[str, str]], usage: TokenUsage) -> list[float]:
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    prompts = await encode_texts(llm, texts, "documents")
    usage.prompt += sum(len(prompt.token_ids) for prompt in prompts)
    context.reserve(usage.prompt, 0)
    vectors = dict(zip(texts, await llm.embed([prompt.token_ids for prompt in prompts]), strict=True))  # of length 1
    return [float(np.dot(vectors[first], vectors[second])) for first, second in pairs]


async def _likelihoods(
    context: RequestContext, body: _Scoring, llm: AsyncLLM, pairs: list[tuple[str, str]], usage: TokenUsage
) -> list[float]:
    size = sum(len(text) for pair in pairs for text in pair) + extra_size(llm.tokenizer)
    encoded = await run_aside(size, lambda: [_encode(llm, *pair) for pair in pairs])
    prompts = [EncodedPrompt(document + query) for document, query in encoded]
    for index, prompt in enumerate(prompts):
        check_length(llm, prompt.token_ids, "documents" if len(prompts) == 1 else f"documents[{index}]")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind="final_only")
    scores = [0.0] * len(pairs)
    options = request_options(context, body)
    async with aclosing(generate(context, llm, prompts, params, options)) as outputs:
        async for index, output in outputs:
            if output.finished:
                usage.add_prompt(output)
                usage.add_completions(output)
                scores[index] = _likelihood(output, len(encoded[index][1]))
    return scores


def _encode(llm: AsyncLLM, query: str, document: str) -> tuple[list[int], list[int]]:
    """Token ids of the document with its frame, and of the query."""
    check_size(llm, query, "query")
    check_size(llm, document, "documents")
    tokenizer = require_tokenizer(llm)
    return tokenizer.encode(_DOCUMENT.format(document)), encode_piece(tokenizer, _QUERY.format(query), begins=False)[1]


def _likelihood(output: RequestOutput, num_query: int) -> float:
    """The geometric mean of the probabilities of the last `num_query` tokens of the prompt."""
    finish_reason_of(output.outputs[0])  # raises for a request that failed
    logprobs = output.prompt_logprobs
    if logprobs is None:
        raise Failure(500, "the engine returned no log-probabilities of the prompt", code="engine_error")
    positions = zip(output.prompt_token_ids[-num_query:], logprobs[-num_query:], strict=True)
    values = [at[token].logprob for token, at in positions if at is not None]
    return math.exp(max(-700.0, sum(values) / max(1, len(values))))
