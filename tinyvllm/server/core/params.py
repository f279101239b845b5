"""From the fields of a request to SamplingParams, BeamSearchParams and RequestOptions. Unset fields take the model's defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.request import BeamSearchParams, RequestOptions, SamplingParams, StructuredOutputsParams
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.llamacpp_fields import LlamacppFields
from tinyvllm.server.core.schema import Sampling, SamplingFields, StructuredOutputs

_COPIED = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
    "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "min_tokens", "skip_special_tokens", "prompt_logprobs",
    "allowed_token_ids", "bad_words", "thinking_token_budget", "best_of", "logprob_token_ids",
)  # fmt: skip
_MAX_DIGITS = 10  # of a token id
_MAX_SHOWN = 3  # invalid keys that a message names
_WITH_BEAMS = {
    "model", "prompt", "prompt_token_ids", "messages", "segments", "use_beam_search", "n", "best_of", "max_tokens",
    "max_completion_tokens", "length_penalty", "ignore_eos", "include_stop_str_in_output", "echo", "user", "metadata",
    "safety_identifier", "request_id", "priority", "cache_salt", "deadline_ms", "ttft_deadline_ms", "receipt", "explain",
    "energy", "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
    "add_generation_prompt", "continue_final_message", "documents", "chat_template",
    "chat_template_kwargs", "reasoning_effort", "tools", "return_token_ids", "include_reasoning", "n_predict", "cache_prompt", "id_slot",
    "timings_per_token", "return_progress",
}  # fmt: skip


def sampling_params(llm: AsyncLLM, body: Sampling, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
    """The SamplingParams of a request. ArgumentError or Failure for values that cannot be combined."""
    fields = sampling_fields(body)
    if (structure := structured_outputs(body)) is not None:
        fields["structured_outputs"] = structure
    if body.stream and fields.get("best_of", 1) > fields.get("n", 1):
        text = "best_of: cannot be combined with stream, since the best answers are known only at the end"
        raise bad_field("best_of", text, "unsupported_parameter")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "prompt_logprobs: cannot be combined with stream", "unsupported_parameter")
    check_logprob_token_ids(body, logprobs)
    if body.length_penalty is not None:
        raise bad_field("length_penalty", "length_penalty: requires use_beam_search")
    fields |= {"max_tokens": max_tokens, "logprobs": logprobs, "output_kind": output_kind(body.stream), **more}
    return replace(llm.default_params, **fields)


def sampling_fields(body: SamplingFields) -> dict[str, Any]:
    """The arguments of SamplingParams that a body sets. Failure for keys of logit_bias that are not token ids."""
    fields = same_fields(body)
    if body.logit_bias:
        fields["logit_bias"] = _bias_by_token(body.logit_bias)
    return fields


def same_fields(body: SamplingFields) -> dict[str, Any]:
    """Those that need no conversion."""
    fields = {name: value for name in _COPIED if (value := getattr(body, name, None)) is not None}
    if (penalty := getattr(body, "repeat_penalty", None)) is not None:
        fields["repetition_penalty"] = penalty
    return fields


def output_length(body: Sampling, *names: str) -> int | None:
    """The number of output tokens by the first of these fields that is set, or by n_predict. Only the former may not exceed the context."""
    return next((value for name in names if (value := getattr(body, name)) is not None), body.longest_answer)


def check_logprob_token_ids(body: SamplingFields, logprobs: int | None) -> None:
    if body.logprob_token_ids and logprobs is None:
        raise bad_field("logprob_token_ids", "logprob_token_ids: requires logprobs")


def output_kind(stream: bool | None) -> str:
    """What the engine returns: new text of each step for a stream, else only the final output."""
    return "delta" if stream else "final_only"


def _bias_by_token(biases: dict[str, float]) -> dict[int, float]:
    invalid = [key for key in biases if not (key.isascii() and key.isdecimal()) or len(key) > _MAX_DIGITS]
    if invalid:
        shown = ", ".join(repr(key[:40]) for key in invalid[:_MAX_SHOWN])
        more = f" and {len(invalid) - _MAX_SHOWN} others" if len(invalid) > _MAX_SHOWN else ""
        raise bad_field("logit_bias", f"logit_bias: keys must be token ids, got {shown}{more}")
    return {int(key): bias for key, bias in biases.items()}


def structured_outputs(body: Sampling) -> StructuredOutputsParams | None:
    """The constraint of response_format or structured_outputs; None if there is none."""
    response_format, structure = body.response_format, body.structured_outputs
    if structure is not None and response_format is not None and response_format.type != "text":
        raise bad_field("response_format", "response_format and structured_outputs are mutually exclusive; send one of them")
    if structure is not None:
        return structure_params(structure)
    if response_format is None:
        return llamacpp_structure(body)
    return structure_of_format(response_format.type, response_format.answer_schema, response_format.lenient)


def llamacpp_structure(body: LlamacppFields) -> StructuredOutputsParams | None:
    """The constraint of llama.cpp's `grammar` or `json_schema`."""
    if body.grammar:
        return StructuredOutputsParams(grammar=body.grammar)
    return None if body.json_schema is None else structure_of_format("json_schema", body.json_schema, False)


def structure_params(structure: StructuredOutputs) -> StructuredOutputsParams:
    """The constraint of vLLM's structured_outputs."""
    return StructuredOutputsParams(**structure.model_dump(by_alias=True, exclude_none=True))


def structure_of_format(kind: str, schema: dict[str, Any] | bool | None, lenient: bool = False) -> StructuredOutputsParams | None:
    """The constraint of one of OpenAI's three format types. A schema that allows anything still requires JSON.

    lenient: what of the schema cannot be enforced is left out, as OpenAI's strict=false allows.
    """
    if kind != "text" and isinstance(schema, dict) and schema:
        return StructuredOutputsParams(json=schema, lenient=lenient)
    if kind != "text" and schema is False:
        raise bad_field("response_format", "response_format: the schema false allows no answer")
    return None if kind == "text" else StructuredOutputsParams(json_object=True)


def beam_params(body: Sampling, max_tokens: int) -> BeamSearchParams:
    """vLLM's beam search: best_of beams (n by default), of which the best n are returned. Failure for fields that do not apply."""
    if body.stream:
        text = "use_beam_search: cannot be combined with stream, since the beams are known only at the end"
        raise bad_field("use_beam_search", text, "unsupported_parameter")
    for name in sorted(body.model_fields_set):
        value = getattr(body, name)
        if name not in _WITH_BEAMS and value not in (None, False) and (name, value) != ("temperature", 0):
            raise bad_field(name, f"{name}: cannot be combined with use_beam_search", "unsupported_parameter")
    n = body.n or 1
    return BeamSearchParams(
        beam_width=max(n, getattr(body, "best_of", None) or n),
        n=n,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def request_options(context: RequestContext, body: Any) -> RequestOptions:
    """Priority, deadlines, key and cache salt. Headers count for deadlines that the body does not set."""

    def deadline(name: str, header: bytes) -> float | None:
        value = getattr(body, name, None)
        return context.number(header) if value is None else value

    salt = getattr(body, "cache_salt", None)
    if getattr(body, "cache_prompt", None) is False:
        salt = context.unique_id  # of no other request
    return RequestOptions(
        priority=context.default_priority if (priority := getattr(body, "priority", None)) is None else priority,
        deadline_ms=deadline("deadline_ms", b"x-deadline-ms"),
        ttft_deadline_ms=deadline("ttft_deadline_ms", b"x-ttft-deadline-ms"),
        key=context.owner.name,
        anonymous=context.owner.anonymous,
        cache_salt=context.cache_salt(salt),
        adapter=context.service.models.adapter(getattr(body, "model", None)),
        receipt=bool(getattr(body, "receipt", None)),
        explain=bool(getattr(body, "explain", None)),
        energy=bool(getattr(body, "energy", None)),
    )
