"""Renders conversations to prompts with the model's own Jinja template, in a sandbox.

The environment is the one that transformers documents for chat templates: trimmed block whitespace, `break` and `continue`, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}` (a mark for training, without effect here). Imports no
tokenizer library.
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
    from jinja2 import Environment, Template
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.runtime import Context

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
    """The prompt text of a conversation. It contains the template's special tokens: encode it with add_special_tokens=False.

    tokenizer_or_template  a tokenizer with templates, or a template
    chat_template          the name of one of the model's templates, or another template; a model with several uses "tool_use" if there are
                           tools, else "default"
    template_kwargs        variables of the template

    A message has a role and a content: a text, or a list of {"type": "text", "text": ...} parts, which are joined by newlines. Its other
    fields (tool_calls, name, ...) are passed to the template; JSON text in arguments of tool calls is parsed. RequestError for messages or
    tools of another form; TokenizerError if there is no template, or the template is invalid or rejects the messages.
    """
    source, names = _choose(tokenizer_or_template, chat_template, bool(tools))
    variables = {
        **names,
        **template_kwargs,
        "messages": [_normalized(index, message) for index, message in enumerate(_list_of_objects("messages", messages))],
        "tools": None if tools is None else _list_of_objects("tools", tools),
        "documents": None if documents is None else _list_of_objects("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    template = _compile(source)
    try:
        return template.render(variables)
    except _RefusalError as refusal:
        raise TokenizerError(f"chat template: rejects these messages: {_line(refusal)}") from None
    except Exception as error:  # a template is code and may fail in any way
        raise TokenizerError(f"chat template: fails on these messages: {_line(error)} ({type(error).__name__})") from error


class _RefusalError(Exception):
    """The error of a template that called raise_exception."""


def _choose(tokenizer_or_template: Tokenizer | str, chosen: str | None, with_tools: bool) -> tuple[str, dict[str, str]]:
    """(template source, names of special tokens)."""
    if isinstance(tokenizer_or_template, str):
        return (tokenizer_or_template if chosen is None else chosen), {}
    templates, names = tokenizer_or_template.chat_templates, tokenizer_or_template.special_tokens
    if chosen is not None:
        return templates.get(chosen, chosen), names
    if with_tools and "tool_use" in templates:
        return templates["tool_use"], names
    if "default" in templates:
        return templates["default"], names
    if templates:
        raise TokenizerError(f"chat template: the model has no default template; choose one of {', '.join(sorted(templates))}")
    raise TokenizerError("chat template: the model has no template (it may not be a chat model); pass one as chat_template")


def _list_of_objects(name: str, value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"chat: {name} must be a list of objects, got {type(value).__name__}")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise RequestError(f"chat: {name}[{index}] must be an object, got {type(item).__name__}")
    if name == "messages" and not value:
        raise RequestError("chat: messages is empty; pass at least one message")
    return list(value)


def _normalized(index: int, message: Message) -> dict[str, Any]:
    """The message in the form that templates expect."""
    where = f"chat: messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f'{where} must have a role, such as "user", got {role!r}')
    checked = dict(message)
    if message.get("tool_calls"):
        checked["tool_calls"] = [_with_parsed_arguments(f"{where}.tool_calls", call) for call in message["tool_calls"]]
    if message.get("content") is None:
        if not checked.get("tool_calls"):
            raise RequestError(f"{where} ({role}) must have a content")
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
            raise RequestError(f'{where}.content: only parts of the form {{"type": "text", "text": "..."}} are supported, got {part!r:.80}')
        texts.append(part["text"])
    return "\n".join(texts)


def _with_parsed_arguments(where: str, call: object) -> object:
    """A tool call with parsed arguments, if they are JSON text as in OpenAI's API."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except RecursionError:
        raise RequestError(f"{where}: arguments are nested too deeply: {function['arguments']!r:.80}") from None
    except ValueError as error:
        raise RequestError(f"{where}: arguments must be JSON ({error}), got {function['arguments']!r:.80}") from None
    return {**call, "function": {**function, "arguments": arguments}}


_MAX_REPEATED = 1 << 20  # characters or items


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    from jinja2 import TemplateError

    try:
        return _environment().from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # the last three: Python's own errors for deep nesting
        line = getattr(error, "lineno", None)
        raise TokenizerError(f"chat template: cannot be compiled: {_line(error)}{f' (line {line})' if line else ''}") from error


def _environment() -> Environment:
    """A sandbox, one for each template. jinja2 is imported here, with the first template."""
    from jinja2.exceptions import SecurityError
    from jinja2.ext import LoopControlExtension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """jinja2's sandbox does not limit memory: this one limits the operators `*` and `**`."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if operator == "*" and hasattr(sized, "__len__") and isinstance(times, int) and len(sized) * times > _MAX_REPEATED:
                raise SecurityError(f"{len(sized)} times {times} exceeds the limit of {_MAX_REPEATED} for a template")
            if operator == "**" and not (abs(left) <= 2**64 and abs(right) <= 64):
                raise SecurityError(f"{left!r:.20} ** {right!r:.20} is too large for a template")
            return super().call_binop(context, operator, left, right)

    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_generation_extension(), LoopControlExtension])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_refusal, "strftime_now": _strftime_now}
    return environment


def _generation_extension() -> type[Extension]:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks assistant text for training; here it is only a scope."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return Generation


def _line(error: Exception) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_refusal(text: object) -> NoReturn:
    raise _RefusalError(str(text))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
