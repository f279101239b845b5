"""Tool calls and results as plain turns, for chat templates that have no role for them: they raise an error, or leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def as_plain_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with each tool result as a turn of the user's, and each call as text of the assistant's, in the JSON of required calls.

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
