"""What OpenAI's two old endpoints and our own small ones take: every field that OpenAI or vLLM names, honoured, limited or refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from tinyvllm.request import MAX_LOGPROBS
from tinyvllm.server.core.body import Body, honoured, limited, refused, stop_at_first_value

ONE_MODEL = "the model's name as /v1/models lists it; the first one where it is not given"
_NOT_STORED = "nothing is stored here"
_TOKEN = Annotated[int, Field(ge=0, lt=2**31)]
_SECONDS = Annotated[float, Field(gt=0, le=1e9)]
_WORDS = Annotated[list[str], Field(max_length=512)]  # the engine stands still while it looks for their tokens: 30000 took 7 s
_NUMBERS = Annotated[dict[str, float], WrapValidator(stop_at_first_value)]
Texts = Annotated[dict[str, str], WrapValidator(stop_at_first_value)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    include_usage: bool | None = honoured(example=True)
    continuous_usage_stats: bool | None = honoured(example=True, says="vLLM: usage in every chunk")
    include_obfuscation: Literal[False] | None = limited(says="false only: chunks carry no padding", example=False, beyond=True)


class JsonSchema(Body):
    """The schema of response_format."""

    name: str = honoured(..., example="answer")
    description: str | None = honoured(example="an answer")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = limited(says="a schema is always enforced, also with strict false", example=True)


class ResponseFormat(Body):
    """text, json_object, or json_schema with its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("response_format", 'needs json_schema with type "json_schema", and only then')
        return self


class StructuredOutputs(Body):
    """vLLM's words for what an answer must be: exactly one of the first five."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool | None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function as chat completions spell it."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    """What an assistant called; arguments are JSON, as a text or as what it means."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A call in the conversation so far."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation, as clients send it and send back what they got."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Sampling(Body):
    """How to continue: OpenAI's and vLLM's names. Ranges that SamplingParams checks are not said twice."""

    model: Name | None = honoured(says=ONE_MODEL)
    frequency_penalty: float | None = honoured(example=0.5, ge=-2, le=2)
    logit_bias: _NUMBERS | None = honoured(example={"5": -10.0})
    n: int | None = honoured(example=2, ge=1, le=128)
    presence_penalty: float | None = honoured(example=0.5, ge=-2, le=2)
    seed: int | None = honoured(example=7, ge=-(2**63), le=2**64 - 1)
    stop: str | _WORDS | None = honoured(example=["\n"])
    stream: bool | None = honoured(example=False)
    stream_options: StreamOptions | None = honoured(example={"include_usage": True}, says="with stream only")
    temperature: float | None = honoured(example=0.5, ge=0, le=100)
    top_p: float | None = honoured(example=0.9, gt=0, le=1)
    user: str | None = limited(says="written to the access log, nothing else", example="somebody")
    top_k: int | None = honoured(example=5, ge=-1)
    min_p: float | None = honoured(example=0.1, ge=0, le=1)
    repetition_penalty: float | None = honoured(example=1.1, gt=0, le=100)
    length_penalty: float | None = honoured(example=1.0, says="of beams; with use_beam_search only")
    use_beam_search: bool | None = honoured(example=False)
    stop_token_ids: list[_TOKEN] | None = honoured(example=[1])
    include_stop_str_in_output: bool | None = honoured(example=True)
    ignore_eos: bool | None = honoured(example=True)
    min_tokens: int | None = honoured(example=2, ge=0)
    skip_special_tokens: bool | None = honoured(example=False)
    spaces_between_special_tokens: Literal[True] | None = limited(says="true only", example=True, beyond=False)
    truncate_prompt_tokens: int | None = honoured(example=8, ge=-1, says="keep so many last tokens of the prompt; -1: as many as fit")
    prompt_logprobs: int | None = honoured(example=1, ge=0, le=MAX_LOGPROBS)
    allowed_token_ids: list[_TOKEN] | None = honoured(example=[300, 301, 302], min_length=1)
    bad_words: _WORDS | None = honoured(example=["dragon"])
    structured_outputs: StructuredOutputs | None = honoured(example={"choice": ["yes", "no"]})
    response_format: ResponseFormat | None = honoured(example={"type": "json_object"})
    thinking_token_budget: int | None = limited(
        says="of models whose template or vocabulary has marks of thinking; refused for others", beyond=16, ge=0
    )
    return_token_ids: bool | None = honoured(example=True)
    priority: int | None = honoured(example=1, ge=-(2**31), le=2**31)
    cache_salt: Name | None = honoured(example="mine")
    request_id: Annotated[str, StringConstraints(pattern=r"^[\w.:-]{1,128}$")] | None = honoured(
        example="req-1", says="as the header X-Request-Id, which goes first"
    )
    deadline_ms: _SECONDS | None = honoured(example=60000.0, says="whole answer within; also as header X-Deadline-Ms")
    ttft_deadline_ms: _SECONDS | None = honoured(example=60000.0, says="first token within; also as header X-TTFT-Deadline-Ms")
    receipt: bool | None = honoured(example=True, says="the answer tells what it cost")
    explain: bool | None = honoured(example=True, says="the answer tells why the prefix cache hit or missed")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options: means something with stream true only")
        return self


def _one_of_four(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """One error for the four, not one for each token."""
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("prompt", "should be a text, token ids, a list of texts or a list of lists of token ids") from None


_Chunks = Annotated[list[Name], Field(max_length=64)]
_BEGINS = "ids of chunks that the prompt begins with, as POST /v1/chunks gave them, in their order"
Prompt = Annotated[str | list[str] | list[_TOKEN] | list[list[_TOKEN]], WrapValidator(_one_of_four)]


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    chunks: _Chunks | None = honoured(says=_BEGINS)
    prompt: Prompt = honoured(..., example="Once upon a time")
    max_tokens: int | None = honoured(example=4, ge=0, says="16 where not given; 0 with echo only")
    logprobs: int | None = honoured(example=2, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = honoured(example=True)
    best_of: int | None = honoured(example=3, ge=1, le=128, says="not with stream")
    suffix: str | None = refused("there is no fill-in-the-middle", example="the end", harmless=("",))
    add_special_tokens: bool | None = honoured(example=False)


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    chunks: _Chunks | None = honoured(says="ids of chunks of messages that the conversation begins with, in their order")
    messages: list[Message] = honoured(..., example=[{"role": "user", "content": "Hello"}], min_length=1)
    max_tokens: int | None = honoured(example=4, ge=1, says="what the context holds where not given")
    max_completion_tokens: int | None = honoured(example=4, ge=1)
    logprobs: bool | None = honoured(example=True)
    top_logprobs: int | None = honoured(example=2, ge=0, le=MAX_LOGPROBS, says="with logprobs only")
    tools: list[Tool] | None = honoured(
        example=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = honoured(example="none")
    parallel_tool_calls: bool | None = honoured(example=True)
    reasoning_effort: str | None = limited(
        says='given to the chat template as reasoning_effort; "none" also as enable_thinking=false', example="low"
    )
    include_reasoning: bool | None = honoured(example=True, says="vLLM: false leaves reasoning_content out")
    add_generation_prompt: bool | None = honoured(example=True)
    continue_final_message: bool | None = honoured(example=False)
    add_special_tokens: bool | None = honoured(example=False)
    documents: list[dict[str, Any]] | None = honoured(example=[{"title": "a", "text": "b"}])
    chat_template: str | None = limited(says="with --trust-request-chat-template only, else refused")
    chat_template_kwargs: dict[str, Any] | None = honoured(example={"enable_thinking": False})
    echo: Literal[False] | None = limited(says="false only", example=False, beyond=True)
    best_of: int | None = honoured(example=3, ge=1, le=128, says="not with stream")
    store: Literal[False] | None = limited(says=f"false only: {_NOT_STORED}", example=False, beyond=True)
    metadata: Texts | None = limited(says=f"written to the access log: {_NOT_STORED}", example={"a": "b"})
    service_tier: Literal["auto", "default"] | None = limited(says="auto and default only", example="auto", beyond="flex")
    modalities: list[Literal["text"]] | None = limited(says="text only", example=["text"], beyond=["audio"])
    safety_identifier: str | None = limited(says="written to the access log, nothing else", example="somebody")
    prompt_cache_key: str | None = limited(says="not needed: cached prefixes are found by their tokens", example="mine")
    prompt_cache_retention: str | None = limited(says="not needed: blocks stay until their memory is wanted", example="in_memory")
    prompt_cache_options: Any = refused("cached prefixes are kept by use alone", example={"mode": "explicit"})
    audio: Any = refused("answers are texts", example={"voice": "alloy", "format": "mp3"})
    function_call: Any = refused("functions were replaced by tools: send tool_choice", example="auto")
    functions: Any = refused("functions were replaced by tools: send tools", example=[{"name": "look"}], harmless=([],))
    prediction: Any = refused("predicted outputs are not used", example={"type": "content", "content": "a"})
    verbosity: str | None = limited(says='"medium" only', example="medium", beyond="low", pattern="^medium$")
    web_search_options: Any = refused("there is no web search", example={})
    moderation: Any = refused("nothing is moderated here", example={"model": "m"})

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs: means something with logprobs true only")
        return self


class GenerateRequest(Sampling):
    """POST /generate: one prompt, the fields of SamplingParams."""

    chunks: _Chunks | None = honoured(says=_BEGINS)
    prompt: str | list[_TOKEN] | None = honoured(example="Once upon a time")
    prompt_token_ids: list[_TOKEN] | None = honoured(example=[5, 6, 7])
    max_tokens: int | None = honoured(example=4, ge=1)
    logprobs: int | None = honoured(example=2, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = honoured(example=3, ge=1, le=128, says="not with stream")
    add_special_tokens: bool | None = honoured(example=False)


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: Name | None = honoured(says=ONE_MODEL)
    prompt: str | None = honoured(example="Once")
    messages: list[Message] | None = honoured(example=[{"role": "user", "content": "Hello"}], min_length=1)
    add_special_tokens: bool | None = honoured(example=False)
    return_token_strs: bool | None = honoured(example=True)
    add_generation_prompt: bool | None = honoured(example=True)
    continue_final_message: bool | None = honoured(example=False)
    chat_template: str | None = limited(says="with --trust-request-chat-template only, else refused")
    chat_template_kwargs: dict[str, Any] | None = honoured(example={})
    tools: list[Tool] | None = honoured(example=[])

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "prompt: give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name | None = honoured(says=ONE_MODEL)
    tokens: list[_TOKEN] = honoured(..., example=[5, 6, 7])


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    model: Name | None = honoured(says=ONE_MODEL)
    input: Prompt = honoured(..., example="a text", min_length=1)
    encoding_format: Literal["float", "base64"] | None = honoured(example="base64")
    dimensions: int | None = refused("embeddings have the model's own width", example=16)
    user: str | None = limited(says="written to the access log, nothing else", example="somebody")
    pooling: Literal["mean", "last"] | None = honoured(example="last", says="mean where not given")
    normalize: bool | None = honoured(example=False, says="to length one; true where not given")
    add_special_tokens: bool | None = honoured(example=False)
    truncate_prompt_tokens: int | None = honoured(example=8, ge=-1)
