"""The route tables of all APIs: every path, and the function that answers it. http/app.py mounts them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.server.api import (
    adapters,
    anthropic,
    batches,
    chat,
    completions,
    debug,
    embeddings,
    files,
    invocations,
    llamacpp,
    llamacpp_completion,
    probes,
    responses,
    scoring,
    segments,
    utility,
)
from tinyvllm.server.api.anthropic_body import CountRequest, MessagesRequest
from tinyvllm.server.api.capabilities import capabilities
from tinyvllm.server.api.llamacpp_body import NativeCompletionRequest
from tinyvllm.server.api.responses_body import InputTokensRequest, ResponsesRequest
from tinyvllm.server.api.scoring import RerankRequest, ScoreRequest
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.endpoint import Endpoint, Resource
from tinyvllm.server.core.response import json_response
from tinyvllm.server.core.schema import (
    BatchChatRequest,
    ChatRequest,
    ChatTokensRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    TokenizeRequest,
)

ENDPOINTS = (
    Endpoint("/v1/completions", CompletionRequest, completions.answer, "Continue texts"),
    Endpoint("/v1/chat/completions", ChatRequest, chat.answer, "Continue a conversation"),
    Endpoint("/v1/chat/completions/batch", BatchChatRequest, chat.answer_all, "Continue several conversations, in vLLM's form"),
    Endpoint("/v1/chat/completions/input_tokens", ChatTokensRequest, chat.input_tokens, "Count the tokens of a conversation"),
    Endpoint("/completion", NativeCompletionRequest, llamacpp_completion.answer, "Continue texts, in the form of llama.cpp"),
    Endpoint("/v1/responses", ResponsesRequest, responses.answer, "Continue a conversation, in the form of OpenAI's Responses API"),
    Endpoint("/v1/responses/input_tokens", InputTokensRequest, responses.input_tokens, "Count the tokens of a conversation"),
    Endpoint("/v1/messages", MessagesRequest, anthropic.answer, "Continue a conversation, in Anthropic's form"),
    Endpoint("/v1/messages/count_tokens", CountRequest, anthropic.count_tokens, "Count the tokens of a conversation"),
    Endpoint("/v1/segments", segments.SegmentRequest, segments.register, "Compute a piece of context once and keep it"),
    Endpoint("/v1/load_lora_adapter", adapters.LoadAdapterRequest, adapters.load, "Load an adapter, in vLLM's form"),
    Endpoint("/v1/unload_lora_adapter", adapters.UnloadAdapterRequest, adapters.unload, "Unload an adapter, in vLLM's form"),
    Endpoint("/v1/embeddings", EmbeddingRequest, embeddings.answer, "Embed texts"),
    Endpoint("/v1/batches", batches.BatchRequest, batches.create, "Answer a file of requests in the background"),
    Endpoint("/generate", GenerateRequest, utility.generate, "Continue one prompt, with the fields of SamplingParams"),
    Endpoint("/tokenize", TokenizeRequest, utility.tokenize, "Token ids of a text or a conversation"),
    Endpoint("/score", ScoreRequest, scoring.score, "Score pairs of texts"),
    Endpoint("/v1/score", ScoreRequest, scoring.score, "Score pairs of texts"),
    Endpoint("/rerank", RerankRequest, scoring.rerank, "Order documents by a query"),
    Endpoint("/v1/rerank", RerankRequest, scoring.rerank, "Order documents by a query"),
    Endpoint("/apply-template", llamacpp.ApplyTemplateRequest, llamacpp.apply_template, "The text that a chat template renders"),
    Endpoint("/detokenize", DetokenizeRequest, utility.detokenize, "The text of token ids"),
)


INVOCATIONS = invocations.invocations(ENDPOINTS)


async def _capabilities(request: Request) -> Response:
    service = RequestContext.of(request).service
    return json_response(capabilities(ENDPOINTS, service.config.lenient, service.models.loaded()))


RESOURCES = (
    Resource("/v1/models", probes.models, "The available models"),
    Resource("/v1/models/{name:path}", probes.model, "One model"),
    Resource("/v1/segments", segments.list_segments, "The segments of this key and their size"),
    Resource("/v1/segments/{name}", segments.get_segment, "One segment"),
    Resource("/v1/segments/{name}", segments.release_segment, "Release a segment", method="DELETE"),
    Resource("/v1/responses/{name}", responses.get_response, "A stored answer"),
    Resource("/v1/responses/{name}", responses.delete_response, "Forget a stored answer", method="DELETE"),
    Resource("/v1/responses/{name}/input_items", responses.list_input_items, "The items of a stored answer's request"),
    Resource("/v1/responses/{name}/cancel", responses.cancel_response, "End an answer that runs in the background", method="POST"),
    Resource("/v1/files", files.upload, "Upload a file of requests", method="POST"),
    Resource("/v1/files", files.list_files, "The files of this key"),
    Resource("/v1/files/{name}", files.get_file, "One file"),
    Resource("/v1/files/{name}/content", files.file_content, "The bytes of a file"),
    Resource("/v1/files/{name}", files.delete_file, "Delete a file", method="DELETE"),
    Resource("/v1/batches", batches.list_batches, "The batches of this key"),
    Resource("/v1/batches/{name}", batches.get_batch, "One batch"),
    Resource("/v1/batches/{name}/cancel", batches.cancel_batch, "Cancel a batch", method="POST"),
    Resource("/v1/capabilities", _capabilities, "The support of every request field"),
    Resource("/props", llamacpp.props, "The properties of the first model, in llama.cpp's form"),
    Resource("/slots", llamacpp.slots, "The sequences that can run at a time, in llama.cpp's form"),
    Resource("/tokenizer_info", utility.tokenizer_info, "The tokenizer of the first model"),
    Resource("/health", probes.health, "Whether the engines are alive"),
    Resource("/ready", probes.ready, "Whether the server accepts new requests"),
    Resource("/version", probes.version, "The version of the server"),
    Resource("/load", probes.load, "The number of requests that are running, in vLLM's form"),
    Resource("/status", probes.status, "The load of the engines"),
    Resource("/debug/trace", debug.trace, "The next steps of an engine as a trace for Perfetto"),
    Resource("/metrics", probes.metrics, "Prometheus metrics"),
)
