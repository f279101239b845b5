"""Tool calls and results in the forms that chat templates can render."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

_MARK = "result{}x7319"  # survives what templates do to texts: quoting, escaping, trimming


def has_tool_results(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == "tool" for message in messages)


def shows_tool_results(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether a rendered text contains the results as they are. A template that quotes or shortens them may still show them."""
    return all(message_text(message).strip() in text for message in messages if message["role"] == "tool")


def with_marks(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """(the messages with a mark in place of each tool result, the marks): a template that shows tool results renders all marks."""
    marks = [_MARK.format(i) for i, message in enumerate(messages) if message["role"] == "tool"]
    left = iter(marks)
    return [{**m, "content": next(left)} if m["role"] == "tool" else m for m in messages], marks


def with_ended_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with an end for the arguments of calls that max_tokens has cut: clients send back what they received.

    Templates take arguments as an object, so a prefix of one becomes the object of what is there. Other texts that are not JSON stay.
    """
    return [{**m, "tool_calls": [_ended(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


def _ended(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str) or not arguments.lstrip().startswith("{"):
        return call
    try:
        json.loads(arguments)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            with suppress(ValueError):
                ended = from_json(arguments, allow_partial="trailing-strings")
                return {**call, "function": {**call["function"], "arguments": ended}}
    except (RecursionError, ValueError):  # which render_chat reports
        pass
    return call


def as_plain_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with each tool result as a turn of the user's, and each call as text of the assistant's, in the JSON of required calls.

    For templates that have no role for them: these raise an error, or leave them out.
    Turns of the user's that follow each other are joined, since many templates require that roles alternate.
    """
    plain: list[Mapping[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": message_text(message)}
        elif message.get("tool_calls"):
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**rest, "content": _with_calls(message_text(message), message["tool_calls"])}
        if message["role"] == "user" and plain and plain[-1]["role"] == "user" and (is_result or after_result):
            message = {**message, "content": f"{message_text(plain.pop())}\n\n{message_text(message)}"}
        plain.append(message)
        after_result = is_result or (after_result and message["role"] == "user")
    return plain


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message, which may have parts or no content."""
    content = message.get("content")
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _with_calls(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([*([text] if text else []), *(_call(call["function"]) for call in calls)])


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "parameters": {written}}}'
