"""Conversations to prompts, through the model's own Jinja template in a sandbox.

The environment is the one that transformers documents for chat templates: whitespace of blocks trimmed, `break` and `continue`, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}` (which only marks and changes nothing). Knows no tokenizer
library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from tinyvllm.errors import RequestError, TokenizerError
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]


def render_chat(
    tokenizer_or_template: Tokenizer | str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    *,
    chat_template: str | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """The prompt text of a conversation. It holds the special tokens that the template writes: encode it with add_special_tokens=False.

    tokenizer_or_template: whose template to use, or the template itself. chat_template: the name of one of the model's templates, or
    another template. Of a model with several, "tool_use" is taken for tools, else "default". template_kwargs are the template's own
    variables.

    A message has a role and a content: a text, or a list of {"type": "text", "text": ...} parts, which are joined by newlines. What else it
    holds (tool_calls, name, ...) reaches the template; arguments of tool calls that are JSON texts become values. RequestError for messages
    or tools that are not of that form; TokenizerError if there is no template, or it is broken, or refuses the messages.
    """
    source, names = _choose(tokenizer_or_template, chat_template, bool(tools))
    variables = {
        **names,
        **template_kwargs,
        "messages": [_checked(index, message) for index, message in enumerate(_list_of_objects("messages", messages))],
        "tools": None if tools is None else _list_of_objects("tools", tools),
        "documents": None if documents is None else _list_of_objects("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    template = _compile(source)
    try:
        return template.render(variables)
    except _RefusalError as refusal:
        raise TokenizerError(f"chat template: refuses these messages: {_line(refusal)}") from None
    except Exception as error:  # a template is code of its author's and may fail in any way
        raise TokenizerError(f"chat template: fails on these messages: {_line(error)} ({type(error).__name__})") from error


class _RefusalError(Exception):
    """What a template says through raise_exception."""


def _choose(tokenizer_or_template: Tokenizer | str, wanted: str | None, with_tools: bool) -> tuple[str, dict[str, str]]:
    """(template source, names of special tokens)."""
    if isinstance(tokenizer_or_template, str):
        return (tokenizer_or_template if wanted is None else wanted), {}
    templates, names = tokenizer_or_template.chat_templates, tokenizer_or_template.special_tokens
    if wanted is not None:
        return templates.get(wanted, wanted), names
    if with_tools and "tool_use" in templates:
        return templates["tool_use"], names
    if "default" in templates:
        return templates["default"], names
    if templates:
        raise TokenizerError(f"chat template: the model has no default one; name one of {', '.join(sorted(templates))}")
    raise TokenizerError("chat template: the model has none (it may not be a chat model): give one as chat_template")


def _list_of_objects(name: str, value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"chat: {name} must be a list of objects, got {type(value).__name__}")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise RequestError(f"chat: {name}[{index}] must be an object, got {type(item).__name__}")
    if name == "messages" and not value:
        raise RequestError("chat: messages is empty: give at least one message")
    return list(value)


def _checked(index: int, message: Message) -> dict[str, Any]:
    """The message as templates expect it."""
    where = f"chat: messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f'{where} needs a role, such as "user", got {role!r}')
    checked = dict(message)
    if message.get("tool_calls"):
        checked["tool_calls"] = [_with_parsed_arguments(f"{where}.tool_calls", call) for call in message["tool_calls"]]
    if message.get("content") is None:
        if not checked.get("tool_calls"):
            raise RequestError(f"{where} ({role}) needs a content")
        checked["content"] = ""
    else:
        checked["content"] = _text_of(where, message["content"])
    return checked


def _text_of(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}.content must be a text or a list of text parts, got {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{where}.content: only parts like {{"type": "text", "text": "..."}} can be read, got {part!r:.80}')
        texts.append(part["text"])
    return "\n".join(texts)


def _with_parsed_arguments(where: str, call: object) -> object:
    """A tool call whose arguments, if they are JSON text as in the OpenAI interface, are what the text means."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise RequestError(f"{where}: arguments must be JSON ({error}), got {function['arguments']!r:.80}") from None
    return {**call, "function": {**function, "arguments": arguments}}


_LARGEST = 1 << 20  # characters or items


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    """jinja2 and its environment are loaded here, when the first template is needed."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox keeps templates from the process, not from its memory: what they repeat or raise has a bound here."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if operator == "*" and hasattr(sized, "__len__") and isinstance(times, int) and len(sized) * times > _LARGEST:
                raise SecurityError(f"{len(sized)} times {times} is more than the {_LARGEST} that a template may repeat")
            if operator == "**" and not (abs(left) <= 2**64 and abs(right) <= 64):
                raise SecurityError(f"{left!r:.20} ** {right!r:.20} is too large for a template")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks what an assistant wrote, for training; here it is only a scope."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    try:
        return environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # the last three: Python's own, for what is nested too deep
        line = getattr(error, "lineno", None)
        raise TokenizerError(f"chat template: cannot be compiled: {_line(error)}{f' (line {line})' if line else ''}") from error


def _line(error: Exception) -> str:
    """What a template's error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(text: object) -> NoReturn:
    raise _RefusalError(str(text))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
