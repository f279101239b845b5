"""Renders conversations to prompts with the model's own Jinja template, in a sandbox.

The environment is the one that transformers documents for chat templates: trimmed block whitespace, `break` and `continue`, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}` (a mark for training, without effect here). Imports no
tokenizer library.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tinyvllm.errors import RequestError, TokenizerError
from tinyvllm.text.template_budget import LimitError, RefusalError, SlowTemplateError, limited, rendering
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

MAX_TEMPLATE = 128 << 10  # characters; the largest published templates have 30,000, and a second compiles about this many

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
        "messages": [_normalized(index, message, source) for index, message in enumerate(_list_of_objects("messages", messages))],
        "tools": None if tools is None else _list_of_objects("tools", tools),
        "documents": None if documents is None else _list_of_objects("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    if limited() and source not in _compiled:
        raise SlowRenderError("chat template: it was not compiled before")
    template = _compile(source)
    try:
        return _output(template, variables)
    except SlowTemplateError as error:
        raise SlowRenderError(f"chat template: {error} for these messages; shorten them, or use a simpler template") from None
    except LimitError as error:
        raise TokenizerError(f"chat template: {error}; shorten the messages, or use a simpler template") from None
    except RefusalError as refusal:
        raise TokenizerError(f"chat template: rejects these messages: {_line(refusal)}") from None
    except Exception as error:  # a template is code and may fail in any way
        raise TokenizerError(f"chat template: fails on these messages: {_line(error)} ({type(error).__name__})") from error


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class SlowRenderError(TokenizerError):
    """The template has used up its processor time, or would have to be compiled where there is little of it."""


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


def _normalized(index: int, message: Message, source: str) -> dict[str, Any]:
    """The message in the form that templates expect. RequestError for a role that is none of ROLES and that the template does not name."""
    where = f"chat: messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f'{where} must have a role, such as "user", got {role!r}')
    if role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
        raise RequestError(f"{where} must have one of the roles {', '.join(ROLES)}, or one that the chat template names, got {role!r:.80}")
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


_compiled: deque[str] = deque(maxlen=32)  # sources, as many as are kept


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    from jinja2 import TemplateError

    from tinyvllm.text.template_sandbox import TemplateEnvironment  # jinja2 comes with it, with the first template

    if len(source) > MAX_TEMPLATE:
        raise TokenizerError(f"chat template: it has {len(source)} characters, and at most {MAX_TEMPLATE} are compiled")
    try:
        template = TemplateEnvironment().from_string(source)
    except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last three: Python's own, for deep nesting
        line = getattr(error, "lineno", None)
        raise TokenizerError(f"chat template: cannot be compiled: {_line(error)}{f' (line {line})' if line else ''}") from error
    _compiled.append(source)
    return template


def _output(template: Template, variables: dict[str, Any]) -> str:
    """What the template writes, piece by piece, so that no more is kept than the budget allows."""
    parts: list[str] = []
    with rendering() as budget:
        for part in template.root_render_func(template.new_context(variables)):
            budget.step()
            budget.spend_output(len(part))
            parts.append(part)
    return "".join(parts)


def _line(error: BaseException) -> str:
    """An error's message, or its name if it has none."""
    return str(error).strip() or type(error).__name__
