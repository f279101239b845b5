"""llama.cpp's small endpoints: /apply-template renders a conversation, /props describes the model, /slots the sequences that run."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.server.api.llamacpp_body import sampling_settings
from tinyvllm.server.core.body import Body, honoured, limited
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.conversation import conversation_of, render_conversation
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.limits import MAX_MESSAGES, MAX_TOOLS
from tinyvllm.server.core.response import ResponseWriter, json_response
from tinyvllm.server.core.schema import DEFAULT_MODEL, Message, Name, Tool
from tinyvllm.version import VERSION


class ApplyTemplateRequest(Body):
    """POST /apply-template."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    messages: list[Message] = honoured(..., example=[{"role": "user", "content": "Hello"}], min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = honoured(example=[], max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = honoured(example=True)
    continue_final_message: bool | None = honoured(example=False)
    chat_template: str | None = limited(says="requires a server with --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = honoured(example={})


async def apply_template(context: RequestContext, body: ApplyTemplateRequest, writer: ResponseWriter) -> None:
    """The text that the chat template renders. It may be longer than the context, since nothing is generated."""
    async with context.service.models.use(body.model) as (_, llm):
        conversation = conversation_of(context.service.config, context.data, body.chat_template_kwargs or {})
        await writer.json({"prompt": await render_conversation(llm, conversation, context.data.get("tools") or None)})


async def props(request: Request) -> Response:
    """The properties of the first model, or of ?model=NAME. `model_path` is the last part of the path: the rest is private."""
    context = RequestContext.of(request)
    async with context.service.models.use(request.query_params.get("model")) as (model, llm):
        tokenizer, params = llm.tokenizer, llm.default_params
        template = None if tokenizer is None else context.service.config.chat_template or tokenizer.chat_templates.get("default")
        bos = None if tokenizer is None or tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
        eos = None if tokenizer is None or not tokenizer.eos_ids else tokenizer.token_text(min(tokenizer.eos_ids))
        return json_response(
            {
                "default_generation_settings": {
                    "n_ctx": llm.max_model_len,
                    "params": {**sampling_settings(params), "n_predict": -1},
                },
                "total_slots": llm.config.all_seqs,
                "model_alias": model,
                "model_path": context.service.models.path(model),
                "chat_template": template,
                "bos_token": bos,
                "eos_token": eos,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"tinyvllm {VERSION}",
                "is_sleeping": False,
            }
        )


async def slots(request: Request) -> Response:
    """An entry for each sequence that the first model, or ?model=NAME, can run at a time. ?fail_on_no_slot=1: 503 if all of them run."""
    context = RequestContext.of(request)
    async with context.service.models.use(request.query_params.get("model")) as (_, llm):
        total, running = llm.config.all_seqs, llm.status()["running"]
        if running >= total and request.query_params.get("fail_on_no_slot"):
            raise Failure(503, "no slot available", code="server_busy")
        entries = [{"id": i, "n_ctx": llm.max_model_len, "is_processing": i < running} for i in range(total)]
        return json_response(entries)
