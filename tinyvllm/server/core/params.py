"""From the fields of a request to SamplingParams and Terms. The model's own recommendation stands where nothing was given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.request import BeamSearchParams, RequestOptions, SamplingParams, StructuredOutputsParams
from tinyvllm.server.core.context import Call
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.schema import Sampling

_ALIKE = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
    "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "min_tokens", "skip_special_tokens", "prompt_logprobs",
    "allowed_token_ids", "bad_words", "thinking_token_budget", "best_of",
)  # fmt: skip


def sampling_params(llm: AsyncLLM, body: Sampling, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
    """The SamplingParams of a request: fields of the same name, and what needs a second look. ArgumentError or Failure if it cannot be."""
    given = {name: value for name in _ALIKE if (value := getattr(body, name, None)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if (structure := structured_outputs(body)) is not None:
        given["structured_outputs"] = structure
    if body.stream and given.get("best_of", 1) > given.get("n", 1):
        raise bad_field("best_of", "best_of: the best are known at the end only, so not with stream", "unsupported_parameter")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "prompt_logprobs: not with stream", "unsupported_parameter")
    if body.length_penalty is not None:
        raise bad_field("length_penalty", "length_penalty: means something with use_beam_search only")
    kind = "delta" if body.stream else "final_only"
    return replace(llm.default_params, **{**given, "max_tokens": max_tokens, "logprobs": logprobs, "output_kind": kind, **more})


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 10:
        raise bad_field("logit_bias", f"logit_bias: expected token ids as names, got {text[:40]!r}")
    return int(text)


def structured_outputs(body: Sampling) -> StructuredOutputsParams | None:
    """What response_format or structured_outputs asks for."""
    wanted, structure = body.response_format, body.structured_outputs
    if structure is not None and wanted is not None and wanted.type != "text":
        raise bad_field("response_format", "response_format and structured_outputs are both given: send one of them")
    if structure is not None:
        fields = structure.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputsParams(**fields)
    if wanted is None:
        return None
    return formatted(wanted.type, None if wanted.json_schema is None else wanted.json_schema.schema_)


def formatted(kind: str, schema: dict[str, Any] | bool | None) -> StructuredOutputsParams | None:
    """OpenAI's three kinds of format. A schema that allows anything still asks for JSON."""
    if kind == "json_schema" and isinstance(schema, dict) and schema:
        return StructuredOutputsParams(json=schema)
    if kind == "json_schema" and schema is False:
        raise bad_field("response_format.json_schema.schema", "the schema false allows no answer at all")
    return None if kind == "text" else StructuredOutputsParams(json_object=True)


_OF_BEAMS = {
    "model", "prompt", "prompt_token_ids", "messages", "chunks", "use_beam_search", "n", "best_of", "max_tokens", "max_completion_tokens",
    "length_penalty", "ignore_eos", "include_stop_str_in_output", "echo", "user", "metadata", "safety_identifier", "request_id", "priority",
    "cache_salt", "deadline_ms", "ttft_deadline_ms", "receipt", "explain", "add_special_tokens", "truncate_prompt_tokens",
    "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort", "tools",
    "return_token_ids", "include_reasoning",
}  # fmt: skip


def beam_params(body: Sampling, max_tokens: int) -> BeamSearchParams:
    """Beam search as vLLM's fields ask for it: best_of beams, or n, of which the best n are given. Other fields are refused."""
    if body.stream:
        raise bad_field("use_beam_search", "use_beam_search: beams are known at the end only, so not with stream", "unsupported_parameter")
    for name in sorted(body.model_fields_set):
        if name not in _OF_BEAMS and getattr(body, name) not in (None, False) and (name, getattr(body, name)) != ("temperature", 0):
            raise bad_field(name, f"{name}: not with use_beam_search", "unsupported_parameter")
    n = body.n or 1
    return BeamSearchParams(
        beam_width=max(n, getattr(body, "best_of", None) or n),
        n=n,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def request_options(call: Call, body: Any) -> RequestOptions:
    """Urgency, deadlines and whose request it is. A header counts where the body says nothing."""

    def first(name: str, header: bytes) -> float | None:
        value = getattr(body, name, None)
        return call.number(header) if value is None else value

    return RequestOptions(
        priority=getattr(body, "priority", None) or 0,
        deadline_ms=first("deadline_ms", b"x-deadline-ms"),
        ttft_deadline_ms=first("ttft_deadline_ms", b"x-ttft-deadline-ms"),
        key=call.key.name if call.key is not None else "",
        cache_salt=getattr(body, "cache_salt", None),
        receipt=bool(getattr(body, "receipt", None)),
        explain=bool(getattr(body, "explain", None)),
    )
