"""llama.cpp's names for what other servers have too: fields that completions, conversations and /completion accept."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from tinyvllm.server.core.body import Body, honoured, unheeded
from tinyvllm.server.core.limits import MAX_COUNT

_TO_THE_END = -1  # n_predict: until the end of the context
_SAME = (("n_predict", "max_tokens"), ("n_predict", "max_completion_tokens"), ("repeat_penalty", "repetition_penalty"))
_FORMATS = ("grammar", "json_schema", "structured_outputs", "response_format")


class LlamacppFields(Body):
    """Fields that name one thing, such as n_predict and max_tokens, may not differ."""

    n_predict: int | None = honoured(example=4, ge=-1, le=MAX_COUNT, says="max_tokens, but also ended by the context; -1: only by it")
    repeat_penalty: float | None = honoured(example=1.1, gt=0, le=100, says="repetition_penalty: of all tokens, not of the last 64")
    grammar: str | None = honoured(example='root ::= "yes" | "no"', says="GBNF; structured_outputs.grammar")
    json_schema: dict[str, Any] | bool | None = honoured(example={"type": "boolean"}, says="structured_outputs.json")
    cache_prompt: bool | None = honoured(example=False, says="false: neither use cached prefixes nor share those of this request")
    timings_per_token: bool | None = honoured(example=True, says="adds `timings` to the answer, to the last event of a stream")
    return_progress: bool | None = unheeded(says="false: a prompt in work sends no events", heeded=(False,), example=True)
    id_slot: int | None = unheeded(says="-1: the scheduler chooses", heeded=(-1,), example=0)

    @model_validator(mode="after")
    def _check_names(self) -> Any:
        for name, other in _SAME:
            own, same = getattr(self, name), getattr(self, other, None)
            if own is not None and same is not None and own != same:
                raise PydanticCustomError(name, f"{name} and {other} mean the same and differ; send one of them")
        if self.n_predict == 0:
            raise PydanticCustomError("n_predict", "n_predict: must be -1 or at least 1: an answer has at least one token")
        if self.json_schema is False:
            raise PydanticCustomError("json_schema", "json_schema: the schema false allows no answer")
        given = [name for name in _FORMATS if getattr(self, name, None) not in (None, "")]
        if len(given) > 1 and given[0] in _FORMATS[:2]:
            raise PydanticCustomError(given[0], f"{given[0]}: cannot be combined with {given[1]}; send one of them")
        return self

    @property
    def longest_answer(self) -> int | None:
        """Tokens of the answer by n_predict, which may be more than the context has room for; None if it is not set."""
        return MAX_COUNT if self.n_predict == _TO_THE_END else self.n_predict
