"""The body of POST /completion, in llama.cpp's names, and its conversion to prompts and sampling params."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from tinyvllm.engine.api import AsyncLLM
from tinyvllm.request import MAX_LOGPROBS, SamplingParams
from tinyvllm.server.core.body import Body, honoured, refused, unheeded
from tinyvllm.server.core.failures import bad_field
from tinyvllm.server.core.limits import MAX_COUNT, MAX_LOGIT_BIAS, MAX_NAME, MAX_PROMPTS, MAX_TOKEN_IDS
from tinyvllm.server.core.llamacpp_fields import LlamacppFields
from tinyvllm.server.core.prompts import check_size, require_tokenizer, run_aside
from tinyvllm.server.core.schema import DEFAULT_MODEL, Name, SamplingFields

_TOKEN = Annotated[int, Field(ge=0, lt=2**31)]
_MAX_BIAS = 100.0  # of the engine; false means that a token is never drawn
_NO_SAMPLER = "this sampler is not implemented"
_NO_FIM = "fill-in-the-middle is not implemented"


def _check_prompt(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Lengths, and one error for all types."""
    for one in [value, *value] if isinstance(value, list) else ():
        if isinstance(one, list) and len(one) > MAX_TOKEN_IDS:
            raise PydanticCustomError("too_many", f"must be at most {MAX_TOKEN_IDS} token ids, got {len(one)}")
    if isinstance(value, list) and (texts := sum(not isinstance(one, int) for one in value)) > MAX_PROMPTS:
        raise PydanticCustomError("too_many", f"must have at most {MAX_PROMPTS} texts or prompts, got {texts}")
    if value in ("", []):
        raise PydanticCustomError("prompt", "must not be empty")
    try:
        return check(value)
    except ValidationError:
        text = "must be a text, a list of token ids and texts, or a list of such prompts"
        raise PydanticCustomError("prompt", text) from None


class PromptObject(Body):
    """A text as an object, which llama.cpp has for texts with images."""

    prompt_string: str


_Prompt = Annotated[str | PromptObject | list[_TOKEN | str | PromptObject | list[_TOKEN | str]], WrapValidator(_check_prompt)]
_Bias = float | Literal[False]
_Pairs = Annotated[list[Annotated[list[_TOKEN | str | float | bool], Field(min_length=2, max_length=2)]], Field(max_length=MAX_LOGIT_BIAS)]
_FieldName = Annotated[str, StringConstraints(max_length=MAX_NAME)]


class NativeCompletionRequest(LlamacppFields, SamplingFields):
    """POST /completion."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    prompt: _Prompt = honoured(..., example="Once upon a time", says="a text, token ids, both mixed, or a list of these")
    stream: bool | None = honoured(example=False)
    n_cmpl: int | None = honoured(example=2, ge=1, le=128, says="number of answers to each prompt")
    n_probs: int | None = honoured(example=2, ge=0, le=MAX_LOGPROBS, says="number of alternatives that completion_probabilities lists")
    logit_bias: _Pairs | dict[_FieldName, float | bool] | None = honoured(  # type: ignore[assignment]  # of SamplingFields: OpenAI's form only
        example=[[5, -10.0]], says="pairs of a token id or a text and a bias or false, or an object; a text means all its tokens"
    )
    return_tokens: bool | None = honoured(example=True)
    response_fields: Annotated[list[_FieldName], Field(max_length=MAX_NAME)] | None = honoured(example=["content"])
    post_sampling_probs: bool | None = refused("probabilities are those of the model's logits", harmless=(False,))
    repeat_last_n: int | None = unheeded(says="-1: penalties hold for all tokens", heeded=(-1,), example=64)
    samplers: Any = unheeded(says="the order of filters is fixed", example=["top_k"])
    min_keep: int | None = unheeded(says="0", heeded=(0,), example=1)
    n_keep: int | None = unheeded(says="0: a full context ends the answer", heeded=(0,), example=4)
    n_discard: int | None = unheeded(says="0: a full context ends the answer", heeded=(0,), example=4)
    typical_p: float | None = refused(_NO_SAMPLER, example=0.5, harmless=(1,))
    dynatemp_range: float | None = refused(_NO_SAMPLER, example=0.5, harmless=(0,))
    dynatemp_exponent: float | None = unheeded(says="dynatemp_range is 0", example=1.0)
    mirostat: int | None = refused(_NO_SAMPLER, example=1, harmless=(0,))
    mirostat_tau: float | None = unheeded(says="mirostat is 0", example=5.0)
    mirostat_eta: float | None = unheeded(says="mirostat is 0", example=0.1)
    xtc_probability: float | None = refused(_NO_SAMPLER, example=0.5, harmless=(0,))
    xtc_threshold: float | None = unheeded(says="xtc_probability is 0", example=0.1)
    dry_multiplier: float | None = refused(_NO_SAMPLER, example=0.5, harmless=(0,))
    dry_base: float | None = unheeded(says="dry_multiplier is 0", example=1.75)
    dry_allowed_length: int | None = unheeded(says="dry_multiplier is 0", example=2)
    dry_penalty_last_n: int | None = unheeded(says="dry_multiplier is 0", example=-1)
    dry_sequence_breakers: Any = unheeded(says="dry_multiplier is 0", example=["\n"])
    top_n_sigma: float | None = refused(_NO_SAMPLER, example=1.0, harmless=(-1,))
    n_indent: int | None = refused(_NO_FIM, example=2, harmless=(0,))
    t_max_predict_ms: int | None = refused("send deadline_ms", example=10, harmless=(0,))
    n_cache_reuse: int | None = unheeded(says="0: the prefix cache matches from the first token", heeded=(0,), example=256)
    lora: Any = refused("an adapter is chosen by `model`, its name", example=[{"id": 0, "scale": 1.0}], harmless=([],))
    image_data: Any = refused("the model reads and writes text only", example=[{"id": 1, "data": "AAAA"}], harmless=([],))


async def prompts_of(llm: AsyncLLM, prompt: str | PromptObject | Sequence[Any]) -> list[str | list[int]]:
    """The prompts of the field. Those that mix texts and token ids become token ids; only a text that is first may begin with BOS."""
    if isinstance(prompt, (str, PromptObject)):
        return [_text_of(prompt)]
    prompts = [prompt] if any(isinstance(one, int) for one in prompt) else [_text_of(one) for one in prompt]
    mixed = [one for one in prompts if not isinstance(one, str)]
    texts = [piece for one in mixed for piece in one if isinstance(piece, str)]
    if len(texts) > MAX_PROMPTS:
        raise bad_field("prompt", f"prompt: must have at most {MAX_PROMPTS} texts between token ids, got {len(texts)}")
    for text in texts:
        check_size(llm, text, "prompt")
    return await run_aside(sum(map(len, texts)), lambda: [one if isinstance(one, str) else _joined(llm, one) for one in prompts])


def _text_of(prompt: Any) -> Any:
    return prompt.prompt_string if isinstance(prompt, PromptObject) else prompt


def _joined(llm: AsyncLLM, pieces: Sequence[int | str]) -> list[int]:
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        ids += [piece] if isinstance(piece, int) else require_tokenizer(llm).encode(piece, add_special_tokens=number == 0)
    return ids


async def biases_of(llm: AsyncLLM, given: Sequence[Sequence[Any]] | Mapping[str, Any]) -> dict[int, float] | None:
    """Biases by token id. A text means each of its tokens. Failure for a pair of another form."""
    pairs = [(int(k) if k.isascii() and k.isdecimal() else k, v) for k, v in given.items()] if isinstance(given, Mapping) else given
    if not pairs:
        return None
    for token, bias in pairs:
        if isinstance(token, (float, bool)) or bias is True or isinstance(bias, str):
            raise bad_field("logit_bias", "logit_bias: entries must be a token id or a text, and a number or false")
    texts = sum(len(token) for token, _ in pairs if isinstance(token, str))
    if texts > MAX_LOGIT_BIAS:
        raise bad_field("logit_bias", f"logit_bias: texts must have at most {MAX_LOGIT_BIAS} characters in all, got {texts}")

    def read() -> dict[int, float]:
        biases: dict[int, float] = {}
        for token, bias in pairs:
            ids = [token] if isinstance(token, int) else require_tokenizer(llm).encode(token, add_special_tokens=False)
            biases |= dict.fromkeys(ids, -_MAX_BIAS if bias is False else float(bias))
        return biases

    return await run_aside(texts, read)


def generation_settings(llm: AsyncLLM, params: SamplingParams, body: NativeCompletionRequest) -> dict[str, Any]:
    """The settings that were used. Samplers that are not implemented have the values that switch them off."""
    eos = sorted(llm.tokenizer.eos_ids) if llm.tokenizer is not None and params.ignore_eos else []
    biases = [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()]
    return {
        **sampling_settings(params),
        "n_predict": -1 if params.max_tokens == MAX_COUNT else params.max_tokens,
        "stop": list(params.stop or ()),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [*biases, *({"token": token, "bias": None} for token in eos)],  # null: never drawn
        "stream": bool(body.stream),
        "n_probs": body.n_probs or 0,
        "grammar": body.grammar or "",
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": False,
        "n_ctx": llm.max_model_len,
        "lora": [],
    }


_SWITCHED_OFF = {
    "typical_p": 1.0, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    "xtc_probability": 0.0, "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
    "dry_penalty_last_n": -1, "top_n_sigma": -1.0, "adaptive_target": -1.0, "adaptive_decay": 0.9, "min_keep": 0, "n_keep": 0,
    "n_discard": 0, "repeat_last_n": -1,
}  # fmt: skip


def sampling_settings(params: SamplingParams) -> dict[str, Any]:
    """The parameters of sampling under llama.cpp's names; 4294967295 is its seed for none."""
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    same = {name: getattr(params, name) for name in names}
    seed = 2**32 - 1 if params.seed is None else params.seed
    return {**_SWITCHED_OFF, **same, "repeat_penalty": params.repetition_penalty, "seed": seed}
