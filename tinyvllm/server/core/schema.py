"""Request bodies of completions, chat completions and the small endpoints: every field of OpenAI and vLLM, with its support.

The notes (`says`) appear in /v1/capabilities and in the OpenAPI document.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from tinyvllm.request import ALL_LOGPROBS, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS
from tinyvllm.request.limits import brief
from tinyvllm.server.core.body import Body, EchoedBody, honoured, limited, refused, stop_at_first_value, unheeded
from tinyvllm.server.core.limits import (
    MAX_COUNT,
    MAX_DOCUMENTS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_NAMES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_TEXT,
    MAX_TOKEN_IDS,
    MAX_TOOLS,
    MAX_WORDS,
)
from tinyvllm.server.core.llamacpp_fields import LlamacppFields

DEFAULT_MODEL = "a name from /v1/models; the first model if unset"
ACCESS_LOG_ONLY = "written to the access log, otherwise ignored"
_NOT_STORED = "the server stores nothing"
_STREAM_ONLY = "requires stream=true"
_NOT_WITH_STREAM = "cannot be combined with stream"
_TOKEN = Annotated[int, Field(ge=0, lt=2**31)]
_MILLISECONDS = Annotated[float, Field(gt=0, le=1e9)]
_TOKENS = Annotated[list[_TOKEN], Field(max_length=MAX_TOKEN_IDS)]
_WORDS = Annotated[list[str], Field(max_length=MAX_WORDS)]  # the engine is blocked while it searches for their tokens: 30000 words took 7 s
_ALL_NOTE = "-1 lists the whole vocabulary, for few tokens"
_SIDE = Literal["left", "right"]
_SIDE_NOTE = "where truncate_prompt_tokens removes tokens: left (keeps the last ones, the default) or right"
_NUMBERS = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), WrapValidator(stop_at_first_value)]
_SHORT = Annotated[str, StringConstraints(max_length=MAX_NAME)]
Texts = Annotated[dict[_SHORT, _SHORT], Field(max_length=MAX_NAMES), WrapValidator(stop_at_first_value)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]


class StreamOptions(Body):
    """What a stream contains in addition to the answer."""

    include_usage: bool | None = honoured(example=True)
    continuous_usage_stats: bool | None = honoured(example=True, says="vLLM: usage in every event")
    include_obfuscation: Literal[False] | None = limited(says="false only: events carry no padding", example=False, beyond=True)


class JsonSchema(Body):
    """The schema of response_format."""

    name: str | None = honoured(example="answer")
    description: str | None = honoured(example="an answer")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = honoured(
        example=True, says="false: what of the schema cannot be enforced is left out and named, instead of an error"
    )


class ResponseFormat(Body):
    """text, json_object, or json_schema with its schema; `schema` is llama.cpp's place for it, with both types."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.json_schema is not None and (self.type != "json_schema" or self.schema_ is not None):
            raise PydanticCustomError("response_format", 'json_schema requires type "json_schema", and cannot be combined with schema')
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise PydanticCustomError("response_format", 'type "json_schema" requires json_schema')
        if self.type == "text" and self.schema_ is not None:
            raise PydanticCustomError("response_format", 'schema requires type "json_object" or "json_schema"')
        return self

    @property
    def lenient(self) -> bool:
        """Whether what of the schema cannot be enforced is left out."""
        return self.json_schema is not None and self.json_schema.strict is False

    @property
    def answer_schema(self) -> dict[str, Any] | bool | None:
        """The schema of the answer, wherever the client put it."""
        return self.schema_ if self.json_schema is None else self.json_schema.schema_


class StructuredOutputs(Body):
    """vLLM's constraints of an answer: exactly one of the first five fields."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool | None = None
    lenient: bool | None = None


class Function(EchoedBody):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(EchoedBody):
    """A function in the form of chat completions."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(EchoedBody):
    """A function that the assistant called; arguments are JSON text, or the value itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(EchoedBody):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class TextPart(EchoedBody):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(EchoedBody):
    """One message of a conversation. Clients also send back messages that they received, with all their fields."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class SamplingFields(Body):
    """The sampling fields of all APIs, under OpenAI's and vLLM's names. Ranges that SamplingParams checks are not repeated here."""

    frequency_penalty: float | None = honoured(example=0.5, ge=-2, le=2)
    logit_bias: _NUMBERS | None = honoured(example={"5": -10.0})
    presence_penalty: float | None = honoured(example=0.5, ge=-2, le=2)
    seed: int | None = honoured(example=7, ge=-(2**63), le=2**64 - 1)
    stop: str | _WORDS | None = honoured(example=["\n"])
    temperature: float | None = honoured(example=0.5, ge=0, le=100)
    top_p: float | None = honoured(example=0.9, gt=0, le=1)
    top_k: int | None = honoured(example=5, ge=-1, le=MAX_COUNT)
    min_p: float | None = honoured(example=0.1, ge=0, le=1)
    repetition_penalty: float | None = honoured(example=1.1, gt=0, le=100)
    stop_token_ids: _TOKENS | None = honoured(example=[1])
    include_stop_str_in_output: bool | None = honoured(example=True)
    ignore_eos: bool | None = honoured(example=True)
    min_tokens: int | None = honoured(example=2, ge=0, le=MAX_COUNT)
    skip_special_tokens: bool | None = honoured(example=False)
    spaces_between_special_tokens: Literal[True] | None = limited(says="true only", example=True, beyond=False)
    allowed_token_ids: _TOKENS | None = honoured(example=[300, 301, 302], min_length=1)
    bad_words: _WORDS | None = honoured(example=["dragon"])
    structured_outputs: StructuredOutputs | None = honoured(example={"choice": ["yes", "no"]})
    thinking_token_budget: int | None = limited(
        says="for models whose chat template or vocabulary has marks of reasoning; refused for others", beyond=16, ge=0, le=MAX_COUNT
    )
    return_tokens_as_token_ids: bool | None = honoured(example=True, says='logprobs name tokens as "token_id:5"')
    logprob_token_ids: Annotated[list[_TOKEN], Field(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = honoured(
        example=[5, 6], says="list these tokens and the drawn one instead of the most probable; requires logprobs"
    )
    priority: int | None = honoured(example=1, ge=-(2**31), le=2**31)
    cache_salt: Name | None = honoured(example="mine")
    request_id: Annotated[str, StringConstraints(pattern=r"^[\w.:-]{1,128}$")] | None = honoured(
        example="req-1", says="like the header X-Request-Id, which takes precedence"
    )
    deadline_ms: _MILLISECONDS | None = honoured(example=60000.0, says="time limit of the whole answer; also as header X-Deadline-Ms")
    ttft_deadline_ms: _MILLISECONDS | None = honoured(
        example=60000.0, says="time limit of the first token; also as header X-TTFT-Deadline-Ms"
    )
    receipt: bool | None = honoured(example=True, says="adds the costs of the request to the answer")
    explain: bool | None = honoured(example=True, says="adds to the answer why the prefix cache hit or missed")


class Sampling(LlamacppFields, SamplingFields):
    """What completions and chat completions share."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    n: int | None = honoured(example=2, ge=1, le=128)
    stream: bool | None = honoured(example=False)
    stream_options: StreamOptions | None = honoured(example={"include_usage": True}, says=_STREAM_ONLY)
    user: _SHORT | None = limited(says=ACCESS_LOG_ONLY, example="user-1")
    length_penalty: float | None = honoured(example=1.0, says="requires use_beam_search")
    use_beam_search: bool | None = honoured(example=False)
    truncate_prompt_tokens: int | None = honoured(
        example=8, ge=-1, le=MAX_COUNT, says="keep this number of prompt tokens; -1 keeps as many as fit"
    )
    truncation_side: _SIDE | None = honoured(example="right", says=_SIDE_NOTE)
    prompt_logprobs: int | None = honoured(example=1, ge=ALL_LOGPROBS, le=MAX_LOGPROBS, says=_ALL_NOTE)
    response_format: ResponseFormat | None = honoured(example={"type": "json_object"})
    return_token_ids: bool | None = honoured(example=True)
    energy: bool | None = honoured(example=True, says="adds the joules of the request to its usage; see --energy")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options: requires stream=true")
        return self


def _check_count(values: list[Any], kind: str, limit: int) -> None:
    if len(values) > limit:
        raise PydanticCustomError("too_many", f"must be at most {limit} {kind}, got {len(values)}")


def _check_prompt(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Lengths, and one error for the types of a prompt instead of one for each token."""
    if isinstance(value, list) and value:
        _check_count(value, *(("token ids", MAX_TOKEN_IDS) if isinstance(value[0], int) else ("prompts", MAX_PROMPTS)))
        for one in value:
            if isinstance(one, list):
                _check_count(one, "token ids", MAX_TOKEN_IDS)
    try:
        return check(value)
    except ValidationError:
        if isinstance(value, list) and (negative := next((one for one in value if type(one) is int and one < 0), None)) is not None:
            raise PydanticCustomError("prompt", f"token id {brief(negative)} is out of vocabulary; ids start at 0") from None
        raise PydanticCustomError("prompt", "must be a text, token ids, or a list of texts and of lists of token ids") from None


_Segments = Annotated[list[Name], Field(max_length=MAX_NAMES)]
_SEGMENTS_NOTE = "ids of segments that precede each prompt, in order, as returned by POST /v1/segments"
Prompt = Annotated[str | list[_TOKEN] | list[str | list[_TOKEN]], WrapValidator(_check_prompt)]


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    segments: _Segments | None = honoured(says=_SEGMENTS_NOTE)
    prompt: Prompt = honoured(..., example="Once upon a time")
    max_tokens: int | None = honoured(example=4, ge=0, le=MAX_COUNT, says="16 if unset; 0 requires echo")
    logprobs: int | None = honoured(example=2, ge=ALL_LOGPROBS, le=MAX_LOGPROBS, says=_ALL_NOTE)
    echo: bool | None = honoured(example=True)
    best_of: int | None = honoured(example=3, ge=1, le=128, says=_NOT_WITH_STREAM)
    suffix: str | None = refused("fill-in-the-middle is not implemented", example="the end", harmless=("",))
    add_special_tokens: bool | None = honoured(example=False)


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    segments: _Segments | None = honoured(says="ids of segments of messages that precede the conversation, in order")
    messages: list[Message] = honoured(..., example=[{"role": "user", "content": "Hello"}], min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = honoured(example=4, ge=1, le=MAX_COUNT, says="the rest of the context if unset")
    max_completion_tokens: int | None = honoured(example=4, ge=1, le=MAX_COUNT)
    logprobs: bool | None = honoured(example=True)
    top_logprobs: int | None = honoured(example=2, ge=ALL_LOGPROBS, le=MAX_LOGPROBS, says=f"requires logprobs=true; {_ALL_NOTE}")
    tools: list[Tool] | None = honoured(
        example=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}],
        max_length=MAX_TOOLS,
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = honoured(example="none")
    parallel_tool_calls: bool | None = honoured(example=True)
    reasoning_effort: str | None = limited(
        says='passed to the chat template as reasoning_effort; "none" also as enable_thinking=false', example="low"
    )
    include_reasoning: bool | None = honoured(example=True, says="vLLM: false omits reasoning_content")
    add_generation_prompt: bool | None = honoured(example=True)
    continue_final_message: bool | None = honoured(example=False)
    add_special_tokens: bool | None = honoured(example=False)
    documents: list[dict[str, Any]] | None = honoured(example=[{"title": "a", "text": "b"}], max_length=MAX_DOCUMENTS)
    chat_template: str | None = limited(says="requires a server with --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = honoured(example={"enable_thinking": False})
    echo: bool | None = honoured(example=True, says="begin the answer with the last message if it has the role of the answer")
    best_of: int | None = honoured(example=3, ge=1, le=128, says=_NOT_WITH_STREAM)
    store: bool | None = unheeded(says=f"false: {_NOT_STORED}", heeded=(False,), example=True)
    metadata: Texts | None = limited(says=f"written to the access log: {_NOT_STORED}", example={"a": "b"})
    service_tier: Name | None = unheeded(says="auto and default: there is one tier", heeded=("auto", "default"), example="flex")
    modalities: list[Literal["text"]] | None = limited(says="text only", example=["text"], beyond=["audio"])
    safety_identifier: _SHORT | None = limited(says=ACCESS_LOG_ONLY, example="user-1")
    prompt_cache_key: str | None = limited(says="not needed: the prefix cache matches tokens", example="mine")
    prompt_cache_retention: str | None = limited(says="not needed: cached blocks stay until their memory is needed", example="in_memory")
    prompt_cache_options: Any = refused("the prefix cache evicts by use only", example={"mode": "explicit"})
    audio: Any = refused("answers are text only", example={"voice": "alloy", "format": "mp3"})
    function_call: Any = refused("functions were replaced by tools; send tool_choice", example="auto")
    functions: Any = refused("functions were replaced by tools; send tools", example=[{"name": "look"}], harmless=([],))
    prediction: dict[str, Any] | None = unheeded(says="the engine drafts tokens on its own", example={"type": "content", "content": "a"})
    verbosity: Name | None = unheeded(says='"medium"', heeded=("medium",), example="low")
    web_search_options: Any = refused("web search is not implemented", example={})
    moderation: Any = refused("moderation is not implemented", example={"model": "m"})

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs: requires logprobs=true")
        return self


class ChatTokensRequest(ChatRequest):
    """POST /v1/chat/completions/input_tokens: the same, of which most fields do not matter."""

    thinking_token_budget: int | None = honoured(example=16, ge=0, le=MAX_COUNT, says="has no effect on the prompt")


_ONE_ANSWER = "one answer to each conversation"
_ONE_CONVERSATION = "it describes one conversation; send them one by one"


class BatchChatRequest(ChatRequest):
    """POST /v1/chat/completions/batch: several conversations with the same parameters, in vLLM's form."""

    messages: Annotated[list[Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]], Field(max_length=MAX_PROMPTS)] = (
        honoured(  # type: ignore[assignment]
            ..., example=[[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Once"}]], min_length=1
        )
    )
    n: Literal[1] | None = limited(says=f"1 only: {_ONE_ANSWER}", example=1, beyond=2)
    stream: Any = refused("the response comes whole", harmless=(False,))
    stream_options: Any = refused("the response comes whole", example={"include_usage": True})
    best_of: Any = refused(_ONE_ANSWER, example=2, harmless=(1,))
    use_beam_search: Any = refused(_ONE_CONVERSATION, harmless=(False,))
    length_penalty: Any = refused("it is of use_beam_search", example=1.0)
    prompt_logprobs: Any = refused(_ONE_CONVERSATION, example=1)
    receipt: Any = refused(_ONE_CONVERSATION, harmless=(False,))
    explain: Any = refused(_ONE_CONVERSATION, harmless=(False,))
    energy: Any = refused(_ONE_CONVERSATION, harmless=(False,))
    timings_per_token: Any = refused(_ONE_CONVERSATION, harmless=(False,))


class GenerateRequest(Sampling):
    """POST /generate: one prompt, the fields of SamplingParams."""

    segments: _Segments | None = honoured(says=_SEGMENTS_NOTE)
    prompt: str | _TOKENS | None = honoured(example="Once upon a time")
    prompt_token_ids: _TOKENS | None = honoured(example=[5, 6, 7])
    max_tokens: int | None = honoured(example=4, ge=1, le=MAX_COUNT)
    logprobs: int | None = honoured(example=2, ge=ALL_LOGPROBS, le=MAX_LOGPROBS, says=_ALL_NOTE)
    best_of: int | None = honoured(example=3, ge=1, le=128, says=_NOT_WITH_STREAM)
    add_special_tokens: bool | None = honoured(example=False)


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages through the chat template; or llama.cpp's `content`."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    prompt: str | None = honoured(example="Once", max_length=MAX_TEXT)
    content: str | None = honoured(example="Once", max_length=MAX_TEXT, says="llama.cpp: a prompt without special tokens at its ends")
    add_special: bool | None = honoured(example=True, says="with content: add special tokens at its ends")
    parse_special: Literal[True] | None = limited(says="true only: special tokens in a text are recognised", example=True, beyond=False)
    with_pieces: bool | None = honoured(example=True, says="with content: tokens are objects with `id` and `piece`")
    messages: list[Message] | None = honoured(example=[{"role": "user", "content": "Hello"}], min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = honoured(example=False)
    return_token_strs: bool | None = honoured(example=True)
    add_generation_prompt: bool | None = honoured(example=True)
    continue_final_message: bool | None = honoured(example=False)
    chat_template: str | None = limited(says="requires a server with --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = honoured(example={})
    tools: list[Tool] | None = honoured(example=[], max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if sum(one is not None for one in (self.prompt, self.content, self.messages)) != 1:
            raise PydanticCustomError("prompt", "prompt: send either prompt, content or messages")
        for name in ("add_special", "with_pieces"):
            if getattr(self, name) is not None and self.content is None:
                raise PydanticCustomError(name, f"{name}: requires content")
        if self.content is not None and self.add_special_tokens is not None:
            raise PydanticCustomError("add_special_tokens", "add_special_tokens: of content it is add_special")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    tokens: list[_TOKEN] = honoured(..., example=[5, 6, 7], max_length=MAX_TEXT)


class EmbeddingRequest(Body):
    """POST /v1/embeddings: texts, or messages through the chat template."""

    model: Name | None = honoured(says=DEFAULT_MODEL)
    input: Prompt | None = honoured(example="a text", min_length=1, says="required, unless messages are sent")
    messages: list[Message] | None = honoured(
        example=[{"role": "user", "content": "Hello"}], min_length=1, max_length=MAX_MESSAGES, says="vLLM: one conversation"
    )
    add_generation_prompt: bool | None = honoured(example=True, says="of messages; false if unset")
    continue_final_message: bool | None = honoured(example=False, says="of messages")
    chat_template: str | None = limited(says="requires a server with --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = honoured(example={}, says="of messages")
    encoding_format: Literal["float", "base64"] | None = honoured(example="base64")
    dimensions: int | None = honoured(
        example=16, ge=1, le=MAX_COUNT, says="the first numbers only; models that were not trained for it lose accuracy"
    )
    user: _SHORT | None = limited(says=ACCESS_LOG_ONLY, example="user-1")
    pooling: Literal["mean", "last"] | None = honoured(example="last", says="mean if unset")
    normalize: bool | None = honoured(example=False, says="to length 1; true if unset")
    use_activation: bool | None = honoured(example=False, says="vLLM's name of normalize")
    add_special_tokens: bool | None = honoured(example=False, says="true if unset; false for messages")
    truncate_prompt_tokens: int | None = honoured(example=8, ge=-1, le=MAX_COUNT)
    truncation_side: _SIDE | None = honoured(example="right", says=_SIDE_NOTE)

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingRequest:
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError("input", "input: send either input or messages")
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise PydanticCustomError("use_activation", "normalize and use_activation differ; send one of them")
        return self
